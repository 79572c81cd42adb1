"""Who answers a job: a decoder in this process, or workers; weights stay from one job to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag import __version__
from dlm_rag.commands.job import Asked, Engine, Engines
from dlm_rag.commands.prepare import Prepared, prepare
from dlm_rag.config import Config
from dlm_rag.decode.rollout import Rollout
from dlm_rag.energy.meter import Meter, open_meter
from dlm_rag.energy.reading import Reading
from dlm_rag.errors import ConfigError
from dlm_rag.machine import describe_machine, digest_of_code
from dlm_rag.questions import Question

if TYPE_CHECKING:
    from dlm_rag.config import ModelConfig
    from dlm_rag.decode.decoder import Decoder, Weights
    from dlm_rag.workers.crew import Crew

    Met = Callable[[dict[str, str | int]], None]


@contextmanager
def answering(workers: str | None, jobs: Iterable[Prepared]) -> Iterator[Engines]:
    """What `Job.run` needs, for these jobs, until the end of the block.

    Nothing is started before a question is asked. Raises `ConfigError` for workers that cannot be.
    """
    if workers is None:
        yield Here()
        return
    import torch

    from dlm_rag.workers.crew import Crew
    from dlm_rag.workers.places import is_cluster, places_here, places_of

    jobs = list(jobs)
    device, weights = jobs[0].device, max(job.weight_bytes for job in jobs)
    if len({job.device for job in jobs}) > 1:
        raise ConfigError("workers= has one device for all settings: leave model.device out of compare")
    if is_cluster(workers):
        crew = Crew(workers, partial(places_of, gpus=device.type == "cuda", weights=weights))
        threads = 1
    else:
        places = places_here(workers, device, weights)
        crew, threads = Crew("local", places), places.threads
    torch.set_num_threads(threads)  # of the stamp: a worker's
    with crew:
        yield Workers(crew)


class Here:
    """A decoder in this process."""

    def __init__(self) -> None:
        self._model: ModelConfig | None = None
        self._denoiser: Weights | None = None

    def open(self, asked: Asked, met: Met | None = None) -> Engine:
        """The decoder of a job; the same weights are not read twice."""
        model = asked.prepared.config.model
        decoder = asked.prepared.load(self._denoiser if model == self._model else None)
        self._model, self._denoiser = model, decoder.denoiser
        return decoder

    def gauge(self, asked: Asked) -> Meter:
        return open_meter(asked.prepared.config.energy, asked.prepared.device)


class Workers:
    """Decoders in processes of their own, of which this one knows as much as of a decoder."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def open(self, asked: Asked, met: Met | None = None) -> Engine:
        """Gets the workers ready for a job; met: told of their machines."""
        opening = opening_of(asked.config, asked.prepared, asked.questions)
        for machine in self._crew.open(opening, asked.config.decode.batch_size):
            if met:
                met(machine)
        self._prepared = asked.prepared
        return self

    def stream(self, questions: Sequence[Question]) -> Iterator[Rollout]:
        return self._crew.stream(questions, self._given_up)

    def describe(self) -> str:
        return self._crew.describe()

    def gauge(self, asked: Asked) -> Workers:
        """Itself: every worker has a meter, which runs from when all of them are open."""
        self.reading = Reading(0.0)
        return self

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.reading = self._crew.measured()

    def _given_up(self, question: Question, error: str) -> Rollout:
        own = self._prepared.config.decode
        assert own.canvas_length is not None
        return Rollout(
            question.id, question.question, self._prepared.evidence_layout, own.canvas_length,
            settings=asdict(own), finished=True, error=error,
        )  # fmt: skip


def opening_of(config: Config, prepared: Prepared, questions: list[Question]) -> JobOpening:
    """How a worker gets ready for a job: its paths mean the same in any folder, its device is settled."""
    model = replace(
        config.model,
        path=_absolute(config.model.path),
        device=prepared.device.type,
        dtype=str(prepared.dtype).removeprefix("torch."),
    )
    retrieval = replace(config.retrieval)
    for name in ("corpus", "index_folder", "dense_model"):
        setattr(retrieval, name, _absolute(getattr(retrieval, name)))
    config = replace(config, model=model, retrieval=retrieval)
    asked = questions if config.retrieval.oracle else []
    return JobOpening(config, asked, prepared.answers_depend_on(), code_here())


def code_here() -> str:
    """The code of this process, for comparison with that of others."""
    return f"{__version__} ({digest_of_code()})"


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

    def __call__(self, denoiser: Weights | None, sharing: int) -> tuple[Decoder, dict[str, str | int]]:
        """As in `worker.Opening`. Raises `UserError` for what is not here, or not the same."""
        from dlm_rag.evidence.pool import default_budget

        if (code := code_here()) != self.code:
            raise ConfigError(
                f"dlm_rag is {code}, and {self.code} where the command was given: install the same version "
                "on both"
            )
        prepared = prepare(self.config, self.questions)
        here = prepared.answers_depend_on()
        for key, value in self.depends_on.items():
            if here.get(key) != value:
                raise ConfigError(f"{key} is {here.get(key)}, and {value} where the command was given")
        engine = prepared.config.engine
        if engine.pool_gib is None:
            engine = replace(engine, pool_gib=default_budget(prepared.device) / 2**30 / sharing)
            prepared = replace(prepared, config=replace(prepared.config, engine=engine))
        return prepared.load(denoiser), describe_machine(prepared.device, prepared.attention)
