"""The decoding engine under an event loop, the queue of questions in front of it, and its figures.

Rows join and leave between steps; who comes first is served first. Steps run on a thread, everything else
on the event loop.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlm_rag.config import DecodeConfig
from dlm_rag.decode.rollout import Rollout
from dlm_rag.energy import EnergyMeter
from dlm_rag.engine.engine import Decoder, StepEvent
from dlm_rag.engine.row import Ticket
from dlm_rag.errors import RunError, UserError, is_failure, summarize_error
from dlm_rag.questions import Question
from dlm_rag.serving.http_server import ApiError

log = logging.getLogger(__name__)

MAX_WAITING = 1024  # questions without a place; further ones get status 429
MAX_CONSECUTIVE_FAILURES = 3  # answers in a row that fail until the server is not well, steps until it ends
UNHEALTHY_SECONDS = 10.0  # after the last failure, so that a balancer sends questions again
PROBE_INTERVAL_SECONDS = 1.0  # between a failed step and a question of the server's own
PROBE_QUESTION = Question("probe", "Who wrote Emma?")
BUCKET_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)


@dataclass(eq=False)
class EngineRequest:
    """A question on its way; `news` is set after every step, and when it is done.

    record_provisional: whether steps record what is guessed. rollout: grows with every step, from the first
    one on. error: why there is no answer. cancelled: whether nobody wants the answer any more. submitted:
    when it was asked.
    """

    question: Question
    settings: DecodeConfig
    record_provisional: bool = False
    rollout: Rollout | None = None
    error: ApiError | None = None
    cancelled: bool = False
    submitted: float = field(default_factory=time.monotonic)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> bool:
        """Whether there will be no more news."""
        return self.error is not None or (self.rollout is not None and self.rollout.finished)

    def get_rollout(self) -> Rollout:
        """The rollout so far; raises `ApiError`, which names no file or host, where there is no answer."""
        if self.error is not None:
            raise self.error
        assert self.rollout is not None
        if self.rollout.error:
            raise ApiError(500, self.rollout.error.partition(":")[0])
        return self.rollout


class AsyncEngine(Collector):
    """Answers the questions of an event loop as one batch; its figures are in `registry`, for Prometheus.

    `error` is why it has ended, if nobody has closed it: `RunError` where no step succeeds, `UserError`
    where no answer can be right. meter: what its energy is measured by.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._engine = decoder, decoder.new_engine()
        self._thread = ThreadPoolExecutor(1, "engine")
        self.capacity = self._engine.capacity
        self.waiting: deque[EngineRequest] = deque()  # questions without a place
        self.in_flight: dict[Ticket, EngineRequest] = {}  # questions in the batch
        self._driver: asyncio.Task[None] | None = None  # takes steps while anybody waits
        self._failures, self._last_failure = 0, 0.0  # answers in a row that have failed; when
        self.error: BaseException | None = None
        self.counts: Counter[str] = Counter()
        self.meter = EnergyMeter()
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        histogram = partial(Histogram, registry=self.registry, buckets=BUCKET_SECONDS)
        self._answer_seconds = histogram("dlm_rag_answer_seconds", "From a question to its answer.")
        self._first_token_seconds = histogram(
            "dlm_rag_first_token_seconds", "From a question to the first token that is committed."
        )

    @property
    def is_healthy(self) -> bool:
        """Whether the last questions were answered, or failed long enough ago to try again."""
        few = self._failures < MAX_CONSECUTIVE_FAILURES
        return few or time.monotonic() > self._last_failure + UNHEALTHY_SECONDS

    def submit(self, job: EngineRequest) -> None:
        """Lets a question wait for its place; raises `ApiError`."""
        if self.error is not None:
            raise ApiError(503, "the server is going down and takes no more questions")
        if len(self.waiting) >= MAX_WAITING:
            self.counts["refused"] += 1
            raise ApiError(429, f"{len(self.waiting)} questions are waiting: ask again later")
        self.waiting.append(job)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._run())

    def cancel(self, job: EngineRequest, outcome: str = "cancelled") -> None:
        """Gives up a question, counted as `outcome`; its row is free before the next step."""
        if not job.done and not job.cancelled:
            job.cancelled = True
            self.counts[outcome] += 1
            with suppress(ValueError):  # it may have its place already
                self.waiting.remove(job)

    def close(self) -> None:
        """Gives up what is in flight, after the step under way."""
        self._thread.shutdown(cancel_futures=True)
        self._engine.close()

    async def _run(self) -> None:
        try:
            while self._admit():
                await self._step()
        except Exception as error:
            self.error = error
            self._fail([*self._clear_batch(), *self.waiting], ApiError(503, "the server is going down"))
            self.waiting.clear()

    def _admit(self) -> bool:
        """Takes out who has gone and lets in who waits; whether there is a step to take."""
        for ticket in [ticket for ticket, job in self.in_flight.items() if job.cancelled]:
            del self.in_flight[ticket]
            self._engine.cancel(ticket)
        while self._engine.capacity and self.waiting:
            job = self.waiting.popleft()
            try:
                ticket = self._engine.submit(job.question, job.settings, job.record_provisional)
                self.in_flight[ticket] = job
            except UserError as error:
                self._fail([job], ApiError(400, str(error)))
        return self._engine.busy

    async def _step(self) -> None:
        """Raises `RunError` where one step after another has failed, `UserError` for what no step mends."""
        if (events := await self._attempt(self._engine.step)) is not None:
            return self._handle_events(events)
        self._failures, self._last_failure = MAX_CONSECUTIVE_FAILURES, time.monotonic()
        self._fail(self._clear_batch(), ApiError(500, "the step of this question failed"))
        for _ in range(1, MAX_CONSECUTIVE_FAILURES):  # nobody is let in before the model has run
            await asyncio.sleep(PROBE_INTERVAL_SECONDS)
            if await self._attempt(self._probe) is not None:
                self._failures = 0
                return None
        raise RunError(f"every step fails, the last with: {self._failure}")

    async def _attempt(self, work: Callable[[], list[StepEvent]]) -> list[StepEvent] | None:
        """Works on the thread; None where that failed. Raises what no other step mends."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except BaseException as error:
            if isinstance(error, UserError) or not is_failure(error):
                raise
            log.warning("a step failed", exc_info=error)
            self._failure = summarize_error(error)
            return None

    def _probe(self) -> list[StepEvent]:
        """Runs the model for a question of the server's own, alone; raises what a step raises."""
        ticket, event = self._engine.submit(PROBE_QUESTION, self._decoder.config), None
        while event is None or not (event.finished or event.rollout.forwards):
            event = next(iter(self._engine.step()), None)
        if not event.finished:
            self._engine.cancel(ticket)
        return []

    def _handle_events(self, events: list[StepEvent]) -> None:
        self.counts["steps"] += 1
        self.counts["row_steps"] += len(events)
        for event in events:
            job, rollout = self.in_flight[event.ticket], event.rollout
            job.rollout = rollout
            if rollout.steps and not rollout.error:
                self.counts["forwards"] += rollout.steps[-1].step > 0
                self.counts["searches"] += rollout.steps[-1].retrieved
                if [step for step in rollout.steps if step.committed] == rollout.steps[-1:]:
                    self._first_token_seconds.observe(time.monotonic() - job.submitted)
            if event.finished:
                del self.in_flight[event.ticket]
                self._failures = self._failures + 1 if rollout.error else 0
                self._last_failure = time.monotonic()
                # Not step by step: what is taken back would count each time that it is committed again.
                self.counts["tokens"] += 0 if rollout.error else rollout.tokens_committed
                if not job.cancelled:
                    self.counts["failed" if rollout.error else "answered"] += 1
                    self._answer_seconds.observe(time.monotonic() - job.submitted)
            job.news.set()

    def _clear_batch(self) -> list[EngineRequest]:
        """Frees all places; returns the questions that had them."""
        jobs, self.in_flight = self.in_flight, {}
        for ticket in jobs:
            with suppress(KeyError):  # the engine may have dropped it
                self._engine.cancel(ticket)
        return [*jobs.values()]

    def _fail(self, jobs: Iterable[EngineRequest], error: ApiError) -> None:
        for job in jobs:
            job.error = error
            self.counts["failed"] += 1
            job.news.set()

    def collect(self) -> Iterator[Metric]:
        """Yields the figures of the engine, its evidence pool and its meter, as they are asked for."""
        counts, runner = self.counts, self._decoder.model_runner
        reuse, pool = runner.cache_stats, runner.cache
        gauges = [
            ("waiting", "Questions without a place.", len(self.waiting)),
            ("rows", "Questions in the batch.", len(self.in_flight)),
            ("places", "Places in the batch.", self.capacity),
        ]
        if pool is not None:
            gauges += [
                ("pool_bytes", "Keys and values kept of evidence, on the device.", pool.used_bytes),
                ("pool_most_bytes", "Their limit (engine.prefix_cache_gib).", pool.budget_bytes),
            ]
        hits = reuse.requested_tokens - reuse.encoded_tokens
        counters = [
            ("steps", "Steps of the engine.", counts["steps"]),
            ("row_steps", "Steps of questions; by steps: how many shared one.", counts["row_steps"]),
            ("forwards", "Denoising passes of questions.", counts["forwards"]),
            ("searches", "Searches; a query that did not change makes none.", counts["searches"]),
            ("tokens", "Committed tokens of answers.", counts["tokens"]),
            ("pool_wanted_tokens", "Context tokens that rows saw.", reuse.requested_tokens),
            ("pool_hit_tokens", "Context tokens that were kept from before.", hits),
            ("processor_seconds", "Processor time of all threads.", time.process_time()),
        ]
        if self.meter.counters:
            counters.append(("joules", "Energy since the start.", self.meter.count_joules()))
        yield from (GaugeMetricFamily(f"dlm_rag_{name}", words, value) for name, words, value in gauges)
        yield from (CounterMetricFamily(f"dlm_rag_{name}", words, value) for name, words, value in counters)
        answers = CounterMetricFamily("dlm_rag_answers", "Questions by outcome.", labels=("outcome",))
        for name in ("answered", "failed", "cancelled", "refused"):
            answers.add_metric((name,), counts[name])
        yield answers
