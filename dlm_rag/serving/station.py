"""The station: one thread that owns the engine, and the questions that wait for a place in it.

    station = Station(decoder, ServingConfig(), wake=print)
    job = station.submit(Job(Question("1", "Who wrote Emma?"), decoder.config))
    station.close()

Rows join and leave at every step. Keys take turns in who gets the next free place; whose questions are too
many is refused alone. What only the thread touches needs no lock: the engine and what is in flight.
"""

import logging
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from dlm_rag.config import DecodeConfig, ServingConfig
from dlm_rag.decode.decoder import Decoder
from dlm_rag.decode.engine import Event
from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.row import Ticket
from dlm_rag.errors import RunError, UserError, fold_message, is_failure
from dlm_rag.questions import Question
from dlm_rag.serving.access import RefusedError

log = logging.getLogger(__name__)

FAILURES = 3  # answers in a row that fail until the server is not well, steps until it ends
PAUSE = 1.0  # seconds until a server that has failed asks itself
PROBE = Question("probe", "Who wrote Emma?")
LONGEST_PAUSE = 60  # seconds that a refused client is told to wait at most
SMOOTHING = 0.1  # weight of the newest answer in the mean time of one


@dataclass(eq=False)
class Job:
    """A question on its way. The station alone writes it; `wake` is called when there is news.

    rollout: grows with every step, from the first one on. refused: why there is no answer.
    """

    question: Question
    settings: DecodeConfig
    key: str = ""
    watched: bool = False  # whether every step is news
    deadline: float = math.inf  # on the monotonic clock
    guesses: bool = False  # whether its steps record what is guessed
    ticket: Ticket | None = None
    rollout: Rollout | None = None
    refused: RefusedError | None = None
    gone: bool = False  # whether nobody wants the answer any more
    begun: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> bool:
        """Whether there will be no more news."""
        return self.refused is not None or (self.rollout is not None and self.rollout.finished)


class Station:
    """Takes questions from any thread and answers them on its own, as one batch.

    wake: called on the station's thread with the jobs of which there is news. After a failed step nobody is
    let in before a question of the station's own has taken one. `error` is why the station has ended, if
    nobody has closed it: `RunError` where no step succeeds, `UserError` where no answer can be right.
    """

    def __init__(
        self, decoder: Decoder, limits: ServingConfig, wake: Callable[[Sequence[Job]], object]
    ) -> None:
        self._decoder, self._limits, self._wake = decoder, limits, wake
        self._engine = decoder.new_engine()
        self.places = self._engine.capacity
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by key, the next in turn first
        self._taken: list[Job] = []  # that have got a place, and are not in flight yet
        self._flying: dict[Ticket, Job] = {}
        self._failed = self._broken = 0  # answers and steps that have failed in a row
        self.error: BaseException | None = None
        self._draining = self._ended = False
        self._seconds = 1.0  # of an answer, on average
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def draining(self) -> bool:
        """Whether no more questions are taken."""
        return self._draining

    @property
    def waiting(self) -> int:
        """Questions without a place."""
        with self._changed:
            return sum(map(len, self._waiting.values()))

    @property
    def rows(self) -> int:
        """Questions in the batch."""
        return len(self._flying)

    @property
    def alive(self) -> bool:
        """Whether questions are taken from those who wait."""
        return self._thread.is_alive()

    @property
    def well(self) -> bool:
        """Whether the last questions were answered; one of the station's own will tell where all fail."""
        return self._failed < FAILURES

    def submit(self, job: Job) -> Job:
        """Lets a question wait for its place; raises `RefusedError`."""
        with self._changed:
            if self._draining or not self.alive:
                raise RefusedError(503, "the server is going down and takes no more questions")
            line = self._waiting.setdefault(job.key, deque())
            if len(line) >= self._limits.waiting:
                self.counts["refused"] += 1
                error = RefusedError(429, f"{len(line)} questions are waiting: ask again later")
                pause = math.ceil(len(line) * self._seconds / self.places)
                error.retry_after = min(max(1, pause), LONGEST_PAUSE)
                raise error
            line.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Gives up a question; its row is free before the next step."""
        with self._changed:
            if not job.done:
                job.gone = True
                self._changed.notify()

    def drain(self) -> None:
        """Takes no more questions; what was taken is answered."""
        with self._changed:
            self._draining = True
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread; what is in flight is given up."""
        with self._changed:
            self._draining = self._ended = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._admit():
                self._step()
        except BaseException as error:
            self.error = error
        with self._changed:
            self._draining = self._ended = True
        self._fail_all("the server is going down")
        self._engine.close()

    def _step(self) -> None:
        """Raises `RunError` where one step after another has failed, `UserError` for what no step mends."""
        try:
            self._fill()
            self._take(events := self._engine.step())
            if self._broken and any(event.finished or event.rollout.forwards for event in events):
                self._broken = 0  # the model has run: a first step only searches
        except UserError:  # the corpus has changed, say
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            log.warning("a step failed", exc_info=error)
            self._fail_all()
            self._failed, self._broken = FAILURES, self._broken + 1
            if self._broken == FAILURES:
                raise RunError(f"every step fails, the last with: {fold_message(error)}") from None

    def _admit(self) -> bool:
        """Waits for work, drops what nobody waits for, gives away free places; False at the end."""
        with self._changed:
            while not self._ended:
                self._drop()
                self._taken = [] if self._broken else self._next(self._engine.capacity)
                if self._taken or self._engine.busy:
                    return True
                if not self._failed:
                    self._changed.wait()
                elif not self._changed.wait_for(self._is_wanted, PAUSE):
                    self._taken = [Job(PROBE, self._decoder.config)]
                    return True
        return False

    def _is_wanted(self) -> bool:
        return self._ended or (not self._broken and bool(self._waiting))

    def _fill(self) -> None:
        """Submits the questions that have got a place."""
        while self._taken:
            job = self._taken[0]
            try:
                job.ticket = self._engine.submit(job.question, job.settings, job.guesses)
                self._flying[job.ticket] = job
            except UserError as error:
                self._refuse(job, RefusedError(400, str(error)))
            del self._taken[0]

    def _next(self, free: int) -> list[Job]:
        """The jobs that get the free places, keys in turn."""
        taken: list[Job] = []
        while len(taken) < free and self._waiting:
            key, line = self._waiting.popitem(last=False)
            taken.append(line.popleft())
            if line:
                self._waiting[key] = line
        return taken

    def _drop(self) -> None:
        """Frees the places of those who have gone, or whose time is over."""
        now, late = time.monotonic(), []
        for key, line in list(self._waiting.items()):
            late += [job for job in line if now > job.deadline and not job.gone]
            kept = deque(job for job in line if not job.gone and now <= job.deadline)
            self.counts["cancelled"] += sum(job.gone for job in line)
            if kept:
                self._waiting[key] = kept
            else:
                del self._waiting[key]
        for ticket, job in list(self._flying.items()):
            if job.gone or now > job.deadline:
                del self._flying[ticket]
                self._engine.cancel(ticket)
                if job.gone:
                    self.counts["cancelled"] += 1
                else:
                    late.append(job)
        for job in late:
            seconds = f"{self._limits.seconds:g}"
            self._refuse(job, RefusedError(504, f"the question took longer than {seconds} seconds"))

    def _take(self, events: list[Event]) -> None:
        news = []
        self.counts["steps"] += 1
        self.counts["row_steps"] += len(events)
        for event in events:
            job, rollout = self._flying[event.ticket], event.rollout
            job.rollout = rollout
            last = rollout.steps[-1] if rollout.steps else None
            if last is not None and not rollout.error:
                self.counts["forwards"] += last.step > 0
                self.counts["searches"] += last.retrieved
            if event.finished:
                del self._flying[event.ticket]
                self._failed = self._failed + 1 if rollout.error else 0
                self._seconds += SMOOTHING * (time.monotonic() - job.begun - self._seconds)
                # Not step by step: what is taken back would count each time that it is committed again.
                self.counts["tokens"] += 0 if rollout.error else rollout.tokens_committed
                self.counts["failed" if rollout.error else "answered"] += 1
            if event.finished or job.watched:
                news.append(job)
        if news:
            self._wake(news)

    def _fail_all(self, reason: str = "the step of this question failed") -> None:
        """Ends what is in flight without an answer, and at the end of all what waits too."""
        jobs = [*self._flying.items(), *((Ticket(0), job) for job in self._taken)]
        self._flying.clear()
        self._taken = []
        if self._ended:
            with self._changed:
                jobs += [(Ticket(0), job) for line in self._waiting.values() for job in line]
                self._waiting.clear()
        for ticket, job in jobs:
            with suppress(KeyError):  # the engine may have dropped it
                self._engine.cancel(ticket)
            self._refuse(job, RefusedError(503 if self._ended else 500, reason))

    def _refuse(self, job: Job, error: RefusedError) -> None:
        job.refused = error
        self.counts["failed"] += 1
        self._wake([job])
