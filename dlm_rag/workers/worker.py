"""The Ray actor: an engine in a process of its own, which answers each question as it finishes.

Ray calls `answer` once for each question. All calls share one engine, which steps as long as any is
unanswered, so the batch never drains between two of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections import deque
from collections.abc import Callable
from logging.handlers import BufferingHandler
from typing import TYPE_CHECKING, NamedTuple

from dlm_rag.errors import UserError

if TYPE_CHECKING:
    from dlm_rag.decode.rollout import Rollout
    from dlm_rag.engine.engine import AnyDenoiser, Decoder, DecoderStats, Engine
    from dlm_rag.questions import Question

    # Makes the decoder of a job, around this denoiser if there is one, for so many workers on the machine;
    # returns it with `describe_machine`. It is pickled, so it comes from a module that workers can import.
    DecoderFactory = Callable[[AnyDenoiser | None, int], tuple[Decoder, dict[str, str | int]]]


class WorkerAnswer(NamedTuple):
    """A finished rollout, with the worker's statistics and the warnings (level, text) logged meanwhile."""

    rollout: Rollout
    stats: DecoderStats
    warnings: list[tuple[int, str]]


class Worker:
    """Answers questions for a `WorkerPool`."""

    def __init__(self, threads: int, workers_per_machine: int) -> None:
        for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):  # read when torch and numba load
            os.environ[name] = str(threads)
        self._workers_per_machine = workers_per_machine
        self._decoder: Decoder | None = None
        self._engine: Engine | None = None
        self._model: object = None
        self._waiting: deque[Question] = deque()
        self._answers: dict[str, asyncio.Future[WorkerAnswer]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._warnings = BufferingHandler(10**6)
        self._warnings.setLevel(logging.WARNING)
        logging.getLogger("dlm_rag").addHandler(self._warnings)

    async def open(self, factory: DecoderFactory, model: object) -> dict[str, str | int]:
        """Gets ready for a job and describes the machine; the weights of an equal `model` are kept.

        Raises `UserError` that names the machine.
        """
        if self._engine is not None:
            self._engine.close()
        kept = self._decoder.denoiser if self._decoder and model == self._model else None
        self._engine = self._decoder = None  # frees the KV pool: the next one is a share of what is free
        self._waiting.clear()
        self._answers.clear()
        try:
            self._decoder, machine = factory(kept, self._workers_per_machine)
        except UserError as error:
            raise type(error)(f"on {platform.node()}: {error}") from None
        self._engine, self._model = self._decoder.new_engine(), model
        self._warnings.buffer.clear()  # the main process has logged the same
        return machine

    async def answer(self, question: Question) -> WorkerAnswer:
        """Raises whatever the engine raises, out of memory or `UserError`."""
        self._waiting.append(question)
        answer = self._answers[question.id] = asyncio.get_running_loop().create_future()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_until_idle())
        return await answer

    async def _step_until_idle(self) -> None:
        while self._answers:
            assert self._decoder is not None and self._engine is not None
            try:
                while self._waiting and self._engine.capacity:
                    self._engine.submit(self._waiting.popleft(), guesses=self._decoder.record_provisional)
                finished = [event.rollout for event in self._engine.step() if event.finished]
            except Exception as error:
                for answer in self._answers.values():
                    answer.set_exception(error)
                self._answers.clear()
                self._waiting.clear()
                return
            for rollout in finished:
                warnings = [(record.levelno, record.getMessage()) for record in self._warnings.buffer]
                self._warnings.buffer.clear()
                result = WorkerAnswer(rollout, self._decoder.stats, warnings)
                self._answers.pop(rollout.id).set_result(result)
            await asyncio.sleep(0)  # Ray's calls come in and go out
