"""What runs in a process of its own: an engine that is handed questions and hands back rollouts.

Ray calls one method after another. `advance` steps the engine for a moment and returns what was finished
until then; what was not stays in flight, so the batch never drains between two calls.
"""

from __future__ import annotations

import logging
import os
import platform
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from dlm_rag.errors import UserError

if TYPE_CHECKING:
    from dlm_rag.decode.decoder import AnyDenoiser, Decoder, DecoderStats
    from dlm_rag.decode.engine import Engine
    from dlm_rag.decode.rollout import Rollout
    from dlm_rag.energy.reading import EnergyReading
    from dlm_rag.questions import Question

ADVANCE_SECONDS = 0.25  # of `advance`, where a step does not take longer


class DecoderFactory(Protocol):
    """How a worker gets ready for a job; pickled, so of a module that workers can import."""

    @property
    def model(self) -> object:
        """What the weights depend on: for an equal one those that are there serve again."""
        ...

    @property
    def energy(self) -> str:
        """As in `Config.energy`."""
        ...

    def __call__(self, denoiser: AnyDenoiser | None, sharing: int) -> tuple[Decoder, dict[str, str | int]]:
        """The decoder, with this denoiser where there is one, and `describe_machine` of here.

        sharing: how many workers share the memory.
        """
        ...


@dataclass(frozen=True)
class AdvanceResult:
    """What came of an `advance`."""

    rollouts: list[Rollout]
    machinery: DecoderStats
    warning_records: list[tuple[int, str]]  # warnings of the package: level and text


class Worker:
    """The actor; a process of its own, and the only engine in it."""

    def __init__(self, threads: int, sharing: int) -> None:
        for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):  # read when torch and numba load
            os.environ[name] = str(threads)
        self._sharing = sharing
        self._decoder: Decoder | None = None
        self._engine: Engine | None = None
        self._model: object = None
        self._waiting: deque[Question] = deque()
        self._said = _WarningBuffer()
        logging.getLogger("dlm_rag").addHandler(self._said)

    def open(self, opening: DecoderFactory) -> dict[str, str | int]:
        """Gets ready for a job; describes the machine. Raises `UserError` that names the machine."""
        if self._engine is not None:
            self._engine.close()
        kept = self._decoder.denoiser if self._decoder and opening.model == self._model else None
        # What was kept of evidence is freed first: the next pool is a share of what is free.
        self._engine = self._decoder = None
        try:
            self._decoder, machine = opening(kept, self._sharing)
        except UserError as error:
            raise type(error)(f"on {platform.node()}: {error}") from None
        self._engine, self._model = self._decoder.new_engine(), opening.model
        self._said.take()  # whoever asked has said the same
        from dlm_rag.energy.meter import EnergyMeter

        self._meter = EnergyMeter()  # until `measure`
        self._meter.start()
        return machine

    def measure(self, energy: str) -> None:
        """Begins to measure, after the idle power where `energy` says so: for that no other may load."""
        from dlm_rag.energy.meter import open_meter

        assert self._decoder is not None, "opened first"
        self._meter = open_meter(energy, self._decoder.denoiser.device)
        self._meter.start()

    def measured(self) -> EnergyReading:
        """What was drawn since `measure`."""
        return self._meter.stop()

    def advance(self, questions: list[Question]) -> AdvanceResult:
        """Takes questions in, and steps for a moment or until nothing is left.

        Raises what the model raises (no memory, say), and `UserError` for what is wrong with them all.
        """
        assert self._decoder is not None and self._engine is not None, "opened first"
        self._waiting.extend(questions)
        rollouts, end = [], perf_counter() + ADVANCE_SECONDS
        while True:
            while self._waiting and self._engine.capacity:
                self._engine.submit(self._waiting.popleft(), guesses=self._decoder.record_provisional)
            if not self._engine.busy:
                break
            rollouts += [event.rollout for event in self._engine.step() if event.finished]
            if perf_counter() > end:
                break
        return AdvanceResult(rollouts, self._decoder.stats, self._said.take())


class _WarningBuffer(logging.Handler):
    """Keeps warnings for the process that has a person before it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.levelno, record.getMessage()))

    def take(self) -> list[tuple[int, str]]:
        taken, self._lines = self._lines, []
        return taken
