"""The Ray actor: an engine in a process of its own, which answers each question as it finishes.

Ray calls `answer` once for each question. All calls share one engine, which steps as long as any is
unanswered, so the batch never drains between two of them.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from dlm_rag.errors import UserError

if TYPE_CHECKING:
    from dlm_rag.decode.rollout import Rollout
    from dlm_rag.engine.engine import Decoder, DecoderStats
    from dlm_rag.questions import Question

    # Makes the decoder of a job, for so many workers on the machine; returns it with `describe_machine`. It
    # is pickled, so it comes from a module that workers can import.
    DecoderFactory = Callable[[int], tuple[Decoder, dict[str, str | int]]]


class WorkerAnswer(NamedTuple):
    """A finished rollout, with the statistics of its worker: a machine and a process there."""

    rollout: Rollout
    stats: DecoderStats
    process: str


class Worker:
    """Answers the questions of a job for a `WorkerPool`; Ray makes it anew where it dies."""

    def __init__(self, factory: DecoderFactory, threads: int, workers_per_machine: int) -> None:
        for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):  # read when torch and numba load
            os.environ[name] = str(threads)
        self._factory, self._workers_per_machine = factory, workers_per_machine
        self._decoder: Decoder | None = None
        self._waiting: deque[Question] = deque()
        self._answers: dict[str, asyncio.Future[WorkerAnswer]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def open(self) -> dict[str, str | int]:
        """Loads the model, once, and describes the machine. Raises `UserError` that names it."""
        if self._decoder is None:
            try:
                self._decoder, self._machine = self._factory(self._workers_per_machine)
            except UserError as error:
                raise type(error)(f"on {platform.node()}: {error}") from None
            self._engine = self._decoder.new_engine()
        return self._machine

    async def answer(self, question: Question) -> WorkerAnswer:
        """Raises whatever the engine raises, as `UserError`."""
        await self.open()  # where Ray has begun this worker again
        self._waiting.append(question)
        answer = self._answers[question.id] = asyncio.get_running_loop().create_future()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_until_idle())
        return await answer

    async def _step_until_idle(self) -> None:
        assert self._decoder is not None
        process = f"{platform.node()}:{os.getpid()}"
        while self._answers:
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
                result = WorkerAnswer(rollout, self._decoder.stats, process)
                self._answers.pop(rollout.id).set_result(result)
            await asyncio.sleep(0)  # Ray's calls come in and go out
