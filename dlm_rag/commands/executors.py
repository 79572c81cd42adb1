"""Who answers a job: a decoder in this process, or workers; weights stay from one job to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag import __version__
from dlm_rag.commands.answer_job import AnswerEngine, EngineSource, PreparedQuestions
from dlm_rag.commands.startup import PreparedDecoder, prepare_decoder
from dlm_rag.config import Config
from dlm_rag.decode.rollout import Rollout
from dlm_rag.energy.meter import EnergyMeter, open_meter
from dlm_rag.energy.reading import EnergyReading
from dlm_rag.errors import ConfigError
from dlm_rag.machine import compute_code_digest, describe_machine
from dlm_rag.questions import Question

if TYPE_CHECKING:
    from dlm_rag.config import ModelConfig
    from dlm_rag.decode.decoder import AnyDenoiser, Decoder
    from dlm_rag.workers.worker_pool import WorkerPool

    Met = Callable[[dict[str, str | int]], None]


@contextmanager
def open_engines(workers: str | None, jobs: Iterable[PreparedDecoder]) -> Iterator[EngineSource]:
    """What `Job.run` needs, for these jobs, until the end of the block.

    Nothing is started before a question is asked. Raises `ConfigError` for workers that cannot be.
    """
    if workers is None:
        yield LocalEngines()
        return
    import torch

    from dlm_rag.workers.placement import is_ray_cluster, plan_cluster_workers, plan_local_workers
    from dlm_rag.workers.worker_pool import WorkerPool

    jobs = list(jobs)
    device, weights = jobs[0].device, max(job.weight_bytes for job in jobs)
    if len({job.device for job in jobs}) > 1:
        raise ConfigError("workers= has one device for all settings: leave model.device out of compare")
    if is_ray_cluster(workers):
        pool = WorkerPool(
            workers, partial(plan_cluster_workers, gpus=device.type == "cuda", weights=weights)
        )
        threads = 1
    else:
        places = plan_local_workers(workers, device, weights)
        pool, threads = WorkerPool("local", places), places.threads_per_worker
    torch.set_num_threads(threads)  # of the stamp: a worker's
    with pool:
        yield WorkerEngines(pool)


class LocalEngines:
    """A decoder in this process."""

    def __init__(self) -> None:
        self._model: ModelConfig | None = None
        self._denoiser: AnyDenoiser | None = None

    def open(self, asked: PreparedQuestions, met: Met | None = None) -> AnswerEngine:
        """The decoder of a job; the same weights are not read twice."""
        model = asked.prepared.config.model
        decoder = asked.prepared.load(self._denoiser if model == self._model else None)
        self._model, self._denoiser = model, decoder.denoiser
        return decoder

    def energy_gauge(self, asked: PreparedQuestions) -> EnergyMeter:
        return open_meter(asked.prepared.config.energy, asked.prepared.device)


class WorkerEngines:
    """Decoders in processes of their own, of which this one knows as much as of a decoder."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def open(self, asked: PreparedQuestions, met: Met | None = None) -> AnswerEngine:
        """Gets the workers ready for a job; met: told of their machines."""
        opening = make_job_opening(asked.config, asked.prepared, asked.questions)
        for machine in self._pool.open(opening, asked.config.decode.batch_size):
            if met:
                met(machine)
        self._prepared = asked.prepared
        return self

    def stream(self, questions: Sequence[Question]) -> Iterator[Rollout]:
        return self._pool.stream(questions, self._given_up)

    def describe(self) -> str:
        return self._pool.describe()

    def energy_gauge(self, asked: PreparedQuestions) -> WorkerEngines:
        """Itself: every worker has a meter, which runs from when all of them are open."""
        self.reading = EnergyReading(0.0)
        return self

    def __enter__(self) -> WorkerEngines:
        return self

    def __exit__(self, *error: object) -> None:
        self.reading = self._pool.read_energy()

    def _given_up(self, question: Question, error: str) -> Rollout:
        own = self._prepared.config.decode
        assert own.max_new_tokens is not None
        return Rollout(
            question.id, question.question, self._prepared.evidence_layout, own.max_new_tokens,
            settings=asdict(own), finished=True, error=error,
        )  # fmt: skip


def make_job_opening(config: Config, prepared: PreparedDecoder, questions: list[Question]) -> JobOpening:
    """How a worker gets ready for a job: its paths mean the same in any folder, its device is settled."""
    model = replace(
        config.model,
        path=_absolute(config.model.path),
        device=prepared.device.type,
        dtype=str(prepared.dtype).removeprefix("torch."),
    )
    retrieval = replace(config.retrieval)
    for name in ("corpus", "index_dir", "embedding_model"):
        setattr(retrieval, name, _absolute(getattr(retrieval, name)))
    config = replace(config, model=model, retrieval=retrieval)
    asked = questions if config.retrieval.oracle else []
    return JobOpening(config, asked, prepared.answers_depend_on(), describe_code_version())


def describe_code_version() -> str:
    """The code of this process, for comparison with that of others."""
    return f"{__version__} ({compute_code_digest()})"


def _absolute(path: str | None) -> str | None:
    """The path of what is there; hub ids and what is not there stay."""
    found = Path(path or "").expanduser()
    return str(found.absolute()) if path and found.exists() else path


@dataclass(frozen=True)
class JobOpening:
    """Opens what has been checked, in a worker; `questions`: where the evidence depends on them."""

    config: Config
    questions: list[Question]
    depends_on: dict[str, Any]
    code: str

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def energy(self) -> str:
        return self.config.energy

    def __call__(self, denoiser: AnyDenoiser | None, sharing: int) -> tuple[Decoder, dict[str, str | int]]:
        """As in `worker.DecoderFactory`. Raises `UserError` for what is not here, or not the same."""
        from dlm_rag.evidence.segment_kv_cache import default_pool_bytes

        if (code := describe_code_version()) != self.code:
            raise ConfigError(
                f"dlm_rag is {code}, and {self.code} where the command was given: install the same version "
                "on both"
            )
        prepared = prepare_decoder(self.config, self.questions)
        here = prepared.answers_depend_on()
        for key, value in self.depends_on.items():
            if here.get(key) != value:
                raise ConfigError(f"{key} is {here.get(key)}, and {value} where the command was given")
        engine = prepared.config.engine
        if engine.prefix_cache_gib is None:
            engine = replace(engine, prefix_cache_gib=default_pool_bytes(prepared.device) / 2**30 / sharing)
            prepared = replace(prepared, config=replace(prepared.config, engine=engine))
        return prepared.load(denoiser), describe_machine(prepared.device, prepared.attention)
