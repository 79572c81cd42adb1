"""One thread that owns the decoding engine, and the queue of questions in front of it.

    engine = AsyncEngine(decoder, ServingConfig(), wake=print)
    request = engine.submit(EngineRequest(Question("1", "Who wrote Emma?"), decoder.config))
    engine.close()

Rows join and leave at every step. Keys take turns in who gets the next free place; only the key that
exceeds its queue is refused. What only the thread touches needs no lock: the engine and what is in flight.
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
from dlm_rag.decode.engine import StepEvent
from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.row import Ticket
from dlm_rag.errors import RunError, UserError, is_failure, summarize_error
from dlm_rag.questions import Question
from dlm_rag.serving.middleware import ApiError

log = logging.getLogger(__name__)

MAX_CONSECUTIVE_FAILURES = 3  # answers in a row that fail until the server is not well, steps until it ends
PROBE_INTERVAL_SECONDS = 1.0  # seconds until a server that has failed asks itself
PROBE_QUESTION = Question("probe", "Who wrote Emma?")
MAX_RETRY_AFTER_SECONDS = 60  # longest `Retry-After`, in seconds
LATENCY_EMA_WEIGHT = 0.1  # weight of the newest answer in the mean time of one


@dataclass(eq=False)
class EngineRequest:
    """A question on its way. The engine's thread alone writes it; `wake` is called when there is news.

    rollout: grows with every step, from the first one on. error: why there is no answer.
    """

    question: Question
    settings: DecodeConfig
    key: str = ""
    notify_every_step: bool = False  # whether every step is news
    deadline: float = math.inf  # on the monotonic clock
    record_provisional: bool = False  # whether its steps record what is guessed
    ticket: Ticket | None = None
    rollout: Rollout | None = None
    error: ApiError | None = None
    cancelled: bool = False  # whether nobody wants the answer any more
    submitted_at: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> bool:
        """Whether there will be no more news."""
        return self.error is not None or (self.rollout is not None and self.rollout.finished)


class AsyncEngine:
    """Takes questions from any thread and answers them on its own, as one batch.

    wake: called on the engine's thread with the jobs of which there is news. After a failed step nobody is
    let in before a question of its own has taken one. `error` is why the engine has ended, if
    nobody has closed it: `RunError` where no step succeeds, `UserError` where no answer can be right.
    """

    def __init__(
        self, decoder: Decoder, limits: ServingConfig, wake: Callable[[Sequence[EngineRequest]], object]
    ) -> None:
        self._decoder, self._limits, self._wake = decoder, limits, wake
        self._engine = decoder.new_engine()
        self.capacity = self._engine.capacity
        self._changed = threading.Condition()
        # by key, the next in turn first
        self._waiting: OrderedDict[str, deque[EngineRequest]] = OrderedDict()
        self._admitted: list[EngineRequest] = []  # that have got a place, and are not in flight yet
        self._in_flight: dict[Ticket, EngineRequest] = {}
        self._failed_answers = self._failed_steps = 0  # answers and steps that have failed in a row
        self.error: BaseException | None = None
        self.draining = self._ended = False  # draining: no more questions are taken
        self._seconds = 1.0  # of an answer, on average
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Questions without a place."""
        with self._changed:
            return sum(map(len, self._waiting.values()))

    @property
    def num_running(self) -> int:
        """Questions in the batch."""
        return len(self._in_flight)

    @property
    def is_alive(self) -> bool:
        """Whether questions are taken from those who wait."""
        return self._thread.is_alive()

    @property
    def is_healthy(self) -> bool:
        """Whether the last questions were answered; one of its own will tell where all fail."""
        return self._failed_answers < MAX_CONSECUTIVE_FAILURES

    def submit(self, job: EngineRequest) -> EngineRequest:
        """Lets a question wait for its place; raises `ApiError`."""
        with self._changed:
            if self.draining or not self.is_alive:
                raise ApiError(503, "the server is going down and takes no more questions")
            line = self._waiting.setdefault(job.key, deque())
            if len(line) >= self._limits.max_queue_per_key:
                self.counts["refused"] += 1
                error = ApiError(429, f"{len(line)} questions are waiting: ask again later")
                pause = math.ceil(len(line) * self._seconds / self.capacity)
                error.retry_after = min(max(1, pause), MAX_RETRY_AFTER_SECONDS)
                raise error
            line.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: EngineRequest) -> None:
        """Gives up a question; its row is free before the next step."""
        with self._changed:
            if not job.done:
                job.cancelled = True
                self._changed.notify()

    def drain(self) -> None:
        """Takes no more questions; what was taken is answered."""
        with self._changed:
            self.draining = True
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread; what is in flight is given up."""
        with self._changed:
            self.draining = self._ended = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._admit():
                self._step()
        except BaseException as error:
            self.error = error
        with self._changed:
            self.draining = self._ended = True
        self._fail_all("the server is going down")
        self._engine.close()

    def _step(self) -> None:
        """Raises `RunError` where one step after another has failed, `UserError` for what no step mends."""
        try:
            self._submit_admitted()
            self._handle_events(events := self._engine.step())
            if self._failed_steps and any(event.finished or event.rollout.forwards for event in events):
                self._failed_steps = 0  # the model has run: a first step only searches
        except UserError:  # the corpus has changed, say
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            log.warning("a step failed", exc_info=error)
            self._failed_answers, self._failed_steps = MAX_CONSECUTIVE_FAILURES, self._failed_steps + 1
            self._fail_all()  # after the counts: who is refused may ask for the health at once
            if self._failed_steps == MAX_CONSECUTIVE_FAILURES:
                raise RunError(f"every step fails, the last with: {summarize_error(error)}") from None

    def _admit(self) -> bool:
        """Waits for work, drops what nobody waits for, gives away free places; False at the end."""
        with self._changed:
            while not self._ended:
                self._drop_expired()
                self._admitted = [] if self._failed_steps else self._pick_waiting(self._engine.capacity)
                if self._admitted or self._engine.busy:
                    return True
                if not self._failed_answers:
                    self._changed.wait()
                elif not self._changed.wait_for(self._is_wanted, PROBE_INTERVAL_SECONDS):
                    self._admitted = [EngineRequest(PROBE_QUESTION, self._decoder.config)]
                    return True
        return False

    def _is_wanted(self) -> bool:
        return self._ended or (not self._failed_steps and bool(self._waiting))

    def _submit_admitted(self) -> None:
        """Submits the questions that have got a place."""
        while self._admitted:
            job = self._admitted[0]
            try:
                job.ticket = self._engine.submit(job.question, job.settings, job.record_provisional)
                self._in_flight[job.ticket] = job
            except UserError as error:
                self._refuse(job, ApiError(400, str(error)))
            del self._admitted[0]

    def _pick_waiting(self, free: int) -> list[EngineRequest]:
        """The jobs that get the free places, keys in turn."""
        taken: list[EngineRequest] = []
        while len(taken) < free and self._waiting:
            key, line = self._waiting.popitem(last=False)
            taken.append(line.popleft())
            if line:
                self._waiting[key] = line
        return taken

    def _drop_expired(self) -> None:
        """Frees the places of those who have gone, or whose time is over."""
        now, over = time.monotonic(), list[EngineRequest]()
        for key, line in list(self._waiting.items()):
            over += [job for job in line if job.cancelled or now > job.deadline]
            kept = deque(job for job in line if not job.cancelled and now <= job.deadline)
            if kept:
                self._waiting[key] = kept
            else:
                del self._waiting[key]
        for ticket, job in list(self._in_flight.items()):
            if job.cancelled or now > job.deadline:
                del self._in_flight[ticket]
                self._engine.cancel(ticket)
                over.append(job)
        for job in over:
            if job.cancelled:
                self.counts["cancelled"] += 1
            else:
                seconds = f"{self._limits.timeout:g}"
                self._refuse(job, ApiError(504, f"the question took longer than {seconds} seconds"))

    def _handle_events(self, events: list[StepEvent]) -> None:
        news = []
        self.counts["steps"] += 1
        self.counts["row_steps"] += len(events)
        for event in events:
            job, rollout = self._in_flight[event.ticket], event.rollout
            job.rollout = rollout
            last = rollout.steps[-1] if rollout.steps else None
            if last is not None and not rollout.error:
                self.counts["forwards"] += last.step > 0
                self.counts["searches"] += last.retrieved
            if event.finished:
                del self._in_flight[event.ticket]
                self._failed_answers = self._failed_answers + 1 if rollout.error else 0
                self._seconds += LATENCY_EMA_WEIGHT * (time.monotonic() - job.submitted_at - self._seconds)
                # Not step by step: what is taken back would count each time that it is committed again.
                self.counts["tokens"] += 0 if rollout.error else rollout.tokens_committed
                self.counts["failed" if rollout.error else "answered"] += 1
            if event.finished or job.notify_every_step:
                news.append(job)
        if news:
            self._wake(news)

    def _fail_all(self, reason: str = "the step of this question failed") -> None:
        """Ends what is in flight without an answer, and at the end of all what waits too."""
        jobs = [*self._in_flight.items(), *((Ticket(0), job) for job in self._admitted)]
        self._in_flight.clear()
        self._admitted = []
        if self._ended:
            with self._changed:
                jobs += [(Ticket(0), job) for line in self._waiting.values() for job in line]
                self._waiting.clear()
        for ticket, job in jobs:
            with suppress(KeyError):  # the engine may have dropped it
                self._engine.cancel(ticket)
            self._refuse(job, ApiError(503 if self._ended else 500, reason))

    def _refuse(self, job: EngineRequest, error: ApiError) -> None:
        job.error = error
        self.counts["failed"] += 1
        self._wake([job])
