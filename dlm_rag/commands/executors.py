"""Who answers a job: a decoder in this process, or workers; weights stay from one job to the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag import __version__
from dlm_rag.commands.answer_job import AnswerEngine, EngineSource, PreparedQuestions
from dlm_rag.commands.prepare_decoder import PreparedDecoder, prepare_decoder
from dlm_rag.config import Config
from dlm_rag.decode.rollout import Rollout
from dlm_rag.energy.meter import EnergyMeter, EnergyReading, open_meter
from dlm_rag.errors import ConfigError
from dlm_rag.machine import compute_code_digest, describe_machine
from dlm_rag.questions import Question

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlm_rag.config import ModelConfig
    from dlm_rag.decode.decoder import AnyDenoiser, Decoder
    from dlm_rag.workers.worker_pool import WorkerPool

    OnMachine = Callable[[dict[str, str | int]], None]


@contextmanager
def open_engines(workers: str | None, jobs: Iterable[PreparedDecoder]) -> Iterator[EngineSource]:
    """The engines of these jobs, until the end of the block; nothing starts before the first question.

    Raises `ConfigError` for workers that are not possible.
    """
    if workers is None:
        yield LocalEngines()
        return
    import torch

    from dlm_rag.workers.placement import plan_cluster_workers, plan_local_workers
    from dlm_rag.workers.worker_pool import WorkerPool

    jobs = list(jobs)
    device, weights = jobs[0].device, max(job.weight_bytes for job in jobs)
    if len({job.device for job in jobs}) > 1:
        raise ConfigError("workers= has one device for all settings: leave model.device out of compare")
    if workers.startswith("ray://"):
        plan = partial(plan_cluster_workers, gpus=device.type == "cuda", weights=weights)
        pool, threads = WorkerPool(workers, plan), 1
    else:
        placement = plan_local_workers(workers, device, weights)
        pool, threads = WorkerPool("local", placement), placement.threads_per_worker
    torch.set_num_threads(threads)  # the stamp names a worker's
    with pool:
        yield WorkerEngines(pool)


class LocalEngines:
    """A decoder in this process."""

    def __init__(self) -> None:
        self._model: ModelConfig | None = None
        self._denoiser: AnyDenoiser | None = None

    def open(self, asked: PreparedQuestions, on_machine: OnMachine | None = None) -> AnswerEngine:
        """The decoder of a job; the same weights are not read twice."""
        model = asked.prepared.config.model
        decoder = asked.prepared.load(self._denoiser if model == self._model else None)
        self._model, self._denoiser = model, decoder.denoiser
        return decoder

    def energy_gauge(self, asked: PreparedQuestions) -> EnergyMeter:
        return open_meter(asked.prepared.config.energy, asked.prepared.device)


class WorkerEngines:
    """Decoders in processes of their own, used as one decoder is."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.describe = pool.describe

    def open(self, asked: PreparedQuestions, on_machine: OnMachine | None = None) -> AnswerEngine:
        """Gets the workers ready for a job; on_machine is called with each machine."""
        factory, batch_size = make_decoder_factory(asked), asked.config.decode.batch_size
        self._prepared = asked.prepared
        for machine in self._pool.open(factory, factory.config.model, factory.config.energy, batch_size):
            if on_machine:
                on_machine(machine)
        return self

    def stream(self, questions: Sequence[Question]) -> Iterator[Rollout]:
        return self._pool.stream(questions, self._make_failed_rollout)

    def energy_gauge(self, asked: PreparedQuestions) -> WorkerEngines:
        """Itself: the meters of the workers run from when all are open."""
        self.reading = EnergyReading(0.0)
        return self

    def __enter__(self) -> WorkerEngines:
        return self

    def __exit__(self, *error: object) -> None:
        self.reading = self._pool.read_energy()

    def _make_failed_rollout(self, question: Question, error: str) -> Rollout:
        decode = self._prepared.config.decode
        assert decode.max_new_tokens is not None
        return Rollout(
            question.id, question.question, self._prepared.evidence_layout, decode.max_new_tokens,
            settings=asdict(decode), finished=True, error=error,
        )  # fmt: skip


def make_decoder_factory(asked: PreparedQuestions) -> CheckedDecoderFactory:
    """Makes a job's decoders in workers: with absolute paths, and the device and dtype of here."""
    config, prepared = asked.config, asked.prepared
    dtype = str(prepared.dtype).removeprefix("torch.")
    path = _make_absolute(config.model.path)
    model = replace(config.model, path=path, device=prepared.device.type, dtype=dtype)
    names = ("corpus", "index_dir", "embedding_model")
    paths: dict[str, Any] = {name: _make_absolute(getattr(config.retrieval, name)) for name in names}
    config = replace(config, model=model, retrieval=replace(config.retrieval, **paths))
    questions = asked.questions if config.retrieval.oracle else []
    return CheckedDecoderFactory(config, questions, prepared.answers_depend_on(), describe_code_version())


def describe_code_version() -> str:
    """The version and a digest of this process's sources."""
    return f"{__version__} ({compute_code_digest()})"


def _make_absolute(path: str | None) -> str | None:
    """The absolute path of a file or folder; anything else (a hub id, None) unchanged."""
    found = Path(path or "").expanduser()
    return str(found.absolute()) if path and found.exists() else path


@dataclass(frozen=True)
class CheckedDecoderFactory:
    """Makes a decoder in a worker, if code, corpus and checkpoint are those of the main process.

    questions: only for oracle evidence.
    """

    config: Config
    questions: list[Question]
    depends_on: dict[str, Any]
    code: str

    def __call__(
        self, denoiser: AnyDenoiser | None, workers_per_machine: int
    ) -> tuple[Decoder, dict[str, str | int]]:
        """As `workers.worker.DecoderFactory`. Raises `UserError` for what is missing here or differs."""
        from dlm_rag.evidence.segment_kv_cache import default_pool_bytes

        if (code := describe_code_version()) != self.code:
            raise ConfigError(f"dlm_rag is {code}, and {self.code} in the main process: install the same")
        prepared = prepare_decoder(self.config, self.questions)
        here = prepared.answers_depend_on()
        for key, value in self.depends_on.items():
            if here.get(key) != value:
                raise ConfigError(f"{key} is {here.get(key)}, and {value} in the main process")
        engine = prepared.config.engine
        if engine.prefix_cache_gib is None:
            gib = default_pool_bytes(prepared.device) / 2**30 / workers_per_machine
            engine = replace(engine, prefix_cache_gib=gib)
            prepared = replace(prepared, config=replace(prepared.config, engine=engine))
        return prepared.load(denoiser), describe_machine(prepared.device, prepared.attention)
