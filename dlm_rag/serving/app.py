"""The application: what is at which address (docs/reference/http.md), and the queue in front of the engine.

Rows join and leave between steps, first come, first served. Steps run on a thread, the rest on the loop.
"""

import asyncio
import copy
import json
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from dlm_rag.config import DecodeConfig
from dlm_rag.decode.rollout import Rollout, RolloutStep
from dlm_rag.energy import EnergyMeter
from dlm_rag.engine.engine import Decoder, StepEvent
from dlm_rag.engine.row import Ticket
from dlm_rag.errors import RunError, UserError, is_failure, summarize_error
from dlm_rag.page.render import render_live_page
from dlm_rag.questions import Question
from dlm_rag.retrieval.base import count_passages
from dlm_rag.serving.chat_completions import ChatParser, ChatRequest, ChatResponse, Event, Steps, play_trace
from dlm_rag.serving.conversation import reply_to_greeting
from dlm_rag.serving.http_server import AccessControl, ApiError, HttpService, SearchService

log = logging.getLogger(__name__)

MAX_WAITING = 1024  # questions without a place; further ones get status 429
MAX_FAILURES = 3  # answers in a row that fail until the server is not well, steps until it ends
UNHEALTHY_SECONDS = 10.0  # after the last failure, so that a balancer sends questions again
RETRY_SECONDS = 1.0  # between a failed step and the next one
PROBE_QUESTION = Question("probe", "Who wrote Emma?")  # of the server's own, before it ends
COUNTED = ("steps", "row_steps", "forwards", "searches", "tokens")
OUTCOMES = ("answered", "failed", "cancelled", "refused")
METRIC_HELP = "See docs/reference/http.md."
BUCKET_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
ANSWER_TIMEOUT_SECONDS = 300.0  # of a question, waiting included
MAX_KEPT_PASSAGES = 4096  # cited passages whose texts are kept, the last ones
OPEN_PATHS = ("/", "/health", "/metrics")  # which need no key
# A proxy must not wait for the end of a stream; nobody may keep what was said.
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@dataclass(eq=False)
class EngineRequest:
    """A question on its way; `news` is set after every step, and when it is done.

    record_provisional: whether steps record what is guessed. rollout: grows with every step, from the first
    one on; a step under way may change it. error: why there is none. submitted: when it was asked.
    """

    question: Question
    settings: DecodeConfig
    record_provisional: bool = False
    rollout: Rollout | None = None
    error: ApiError | None = None
    submitted: float = field(default_factory=time.monotonic)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> bool:
        """Whether there will be no more news."""
        return self.error is not None or (self.rollout is not None and self.rollout.finished)


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
        self._failed_steps, self._closed = 0, False  # the former without an answer between
        self.error: BaseException | None = None
        self.counts: Counter[str] = Counter()
        self.meter = EnergyMeter()
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        make = partial(Histogram, documentation=METRIC_HELP, registry=self.registry, buckets=BUCKET_SECONDS)
        self._answer_seconds = make("dlm_rag_answer_seconds")
        self._first_token_seconds = make("dlm_rag_first_token_seconds")

    @property
    def is_healthy(self) -> bool:
        """Whether the last questions were answered, or failed long enough ago to try again."""
        return self._failures < MAX_FAILURES or time.monotonic() > self._last_failure + UNHEALTHY_SECONDS

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
        if not job.done:
            job.error = ApiError(503, "nobody waits for the answer")
            self.counts[outcome] += 1
            with suppress(ValueError):  # it may have its place already
                self.waiting.remove(job)

    def close(self) -> None:
        """Gives up what is in flight, after the step under way."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)
        self._engine.close()

    async def _run(self) -> None:
        try:
            while not self._closed and self._admit():
                await self._step()
        except Exception as error:
            self.error = error
            self._fail([*self.in_flight.values(), *self.waiting], ApiError(503, "the server is going down"))

    def _admit(self) -> bool:
        """Takes out who has gone and lets in who waits; whether there is a step to take."""
        for ticket in [ticket for ticket, job in self.in_flight.items() if job.error]:
            del self.in_flight[ticket]
            with suppress(KeyError):  # the engine drops some of those whose step fails
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
        run = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        try:
            if self._failed_steps == MAX_FAILURES - 1:  # or does one client ask again what always fails?
                await run(self._decoder.ask, PROBE_QUESTION)
                self._failed_steps = 0
            events = await run(self._engine.step)
        except BaseException as error:
            if isinstance(error, UserError) or not is_failure(error):
                raise
            log.warning("a step failed", exc_info=error)
            self._failed_steps += 1
            self._failures, self._last_failure = MAX_FAILURES, time.monotonic()
            self._fail(self.in_flight.values(), ApiError(500, "the step of this question failed"))
            if self._failed_steps >= MAX_FAILURES:
                raise RunError(f"every step fails, the last with: {summarize_error(error)}") from None
            await asyncio.sleep(RETRY_SECONDS)
        else:
            self._handle_events(events)

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
                self._failures, self._last_failure = self._failures + 1, time.monotonic()
                if not rollout.error:
                    self._failures = self._failed_steps = 0
                # Not step by step: what is taken back would count each time that it is committed again.
                self.counts["tokens"] += 0 if rollout.error else rollout.tokens_committed
                if job.error is None:
                    self.counts["failed" if rollout.error else "answered"] += 1
                    self._answer_seconds.observe(time.monotonic() - job.submitted)
            job.news.set()

    def _fail(self, jobs: Iterable[EngineRequest], error: ApiError) -> None:
        for job in jobs:
            self.counts["failed"] += job.error is None
            job.error = job.error or error
            job.news.set()

    def collect(self) -> Iterator[Metric]:
        """Yields the figures but the histograms, as they are asked for."""
        runner = self._decoder.model_runner
        reuse, pool = runner.cache_stats, runner.cache
        hits = reuse.requested_tokens - reuse.encoded_tokens
        gauges = {"waiting": len(self.waiting), "rows": len(self.in_flight), "places": self.capacity}
        if pool is not None:
            gauges |= {"pool_bytes": pool.used_bytes, "pool_most_bytes": pool.budget_bytes}
        counters: dict[str, float] = {name: self.counts[name] for name in COUNTED}
        counters |= {"pool_wanted_tokens": reuse.requested_tokens, "pool_hit_tokens": hits}
        counters["processor_seconds"] = time.process_time()
        if self.meter.counters:
            counters["joules"] = self.meter.count_joules()
        for kind, figures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, value in figures.items():
                yield kind(f"dlm_rag_{name}", METRIC_HELP, value)
        answers = CounterMetricFamily("dlm_rag_answers", METRIC_HELP, labels=("outcome",))
        for name in OUTCOMES:
            answers.add_metric((name,), self.counts[name])
        yield answers


class AnswerService(HttpService):
    """One decoder over HTTP. `app` is what a server runs; `close` ends the engine."""

    def __init__(
        self, decoder: Decoder, name: str, access: AccessControl, search: SearchService | None = None,
        known: tuple[Sequence[str], str] = ((), ""),
    ) -> None:  # fmt: skip
        """name: of the model. search: lets clients search the corpus too. known: questions that the model
        can answer, and what stands below each answer."""
        super().__init__()
        examples, self._note = known
        self.name, self._model = name, {
            "id": name, "object": "model", "created": int(time.time()), "owned_by": "dlm_rag",
            "examples": examples, "description": self._note,
        }  # fmt: skip
        self._decoder, self._parser, self._search = decoder, ChatParser(decoder), search
        self._tokenizer = copy.deepcopy(decoder.tokenizer)  # which is not for two threads at once
        self.engine = AsyncEngine(decoder)
        count = Gauge("dlm_rag_connections", METRIC_HELP, registry=self.engine.registry)
        count.set_function(lambda: len(self.connections))
        self._passages: dict[str, str] = {}
        self._passage_count = count_passages(decoder.retriever)
        about = f"{reply_to_greeting('hello', self._passage_count)} {self._note}".strip()
        page = render_live_page(access.keys is not None, examples, about)
        models = JSONResponse({"object": "list", "data": [self._model]})
        routes = [
            Route("/", HTMLResponse(page, headers={"X-Frame-Options": "DENY"}), methods=["GET"]),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/chat/completions", self._chat, methods=["POST"]),  # as datatrove asks other machines
            Route("/passages/{name:path}", self._passage),
            Route("/v1/answers", self._answers, methods=["POST"]),
        ]
        self.app = access.create_app(routes + ([search.route] if search else []), OPEN_PATHS)

    @property
    def error(self) -> BaseException | None:  # type: ignore[override]
        return self.engine.error or (self._search.error if self._search else None)

    def close(self) -> None:
        super().close()
        self.engine.close()
        if self._search:
            self._search.close()

    async def _health(self, request: Request) -> Response:
        status = "going down" if self.error else "ok" if self.engine.is_healthy else "failing"
        return JSONResponse({"status": status, "model": self.name}, 200 if status == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.engine.registry), media_type="text/plain; version=0.0.4")

    async def _one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise ApiError(404, f"the model here is '{self.name}'", "model", "model_not_found")

    async def _passage(self, request: Request) -> Response:
        if (text := self._passages.get(request.path_params["name"])) is None:
            raise ApiError(404, "no answer of late has cited a passage of this id")
        return PlainTextResponse(text)

    def _publish_passage(self, base: str, name: str, text: str) -> str:
        """Keeps a passage for who follows its link; returns its address."""
        self._passages.pop(name, None)
        self._passages[name] = text
        if len(self._passages) > MAX_KEPT_PASSAGES:
            del self._passages[next(iter(self._passages))]
        return f"{base}passages/{quote(name)}"

    async def _chat(self, request: Request) -> Response:
        asked = await self.read(request, self._parser.parse_chat)
        self._check_model(asked.body.model)
        steps, link = self._follow(asked), partial(self._publish_passage, str(request.base_url))
        reply = ChatResponse(asked, self.name, self._tokenizer, link, self._note)
        if asked.body.stream:
            return await self._stream(request, reply.stream(steps))
        return JSONResponse(await self.run_unless_disconnected(request, reply.complete(steps)))

    async def _answers(self, request: Request) -> Response:
        asked = await self.read(request, self._parser.parse_answer)
        steps = self._follow(asked, record_provisional=True)
        return await self._stream(request, play_trace(steps, self._tokenizer.end_ids))

    async def _follow(self, asked: ChatRequest, record_provisional: bool = False) -> Steps:
        """Yields the steps of a question, which ends when its client goes; of a greeting, what is said."""
        if said := reply_to_greeting(asked.asked, self._passage_count):
            step, text = RolloutStep(0, None, (), False), asked.question.question
            layout = self._decoder.evidence_layout
            yield Rollout("q1", text, layout, 0, [step], said, finished=True, answer_form="whole"), step
            return
        deadline = asyncio.get_running_loop().time() + ANSWER_TIMEOUT_SECONDS
        job = EngineRequest(asked.question, asked.settings, record_provisional)
        self.engine.submit(job)
        done, taken = False, 0
        try:
            while not done:
                try:
                    async with asyncio.timeout_at(deadline):
                        await job.news.wait()
                except TimeoutError:
                    self.engine.cancel(job, "failed")
                    reason = f"the question took longer than {ANSWER_TIMEOUT_SECONDS:g} seconds"
                    raise ApiError(504, reason) from None
                job.news.clear()
                done = job.done  # now: it may come while the reader takes the steps before it
                if job.error is not None:
                    raise job.error
                assert job.rollout is not None
                if job.rollout.error:  # which may name a file or a host
                    raise ApiError(500, job.rollout.error.partition(":")[0])
                for step in job.rollout.steps[taken:]:
                    taken += 1
                    yield job.rollout, step
        finally:
            self.engine.cancel(job)

    async def _stream(self, request: Request, events: AsyncGenerator[Event]) -> Response:
        """Sends events as they come. A failure before the first one has its own status."""
        first = await self.run_unless_disconnected(request, anext(events))

        async def stream() -> AsyncIterator[str]:
            try:
                yield _format_sse_event(*first)
                async for event in events:
                    yield _format_sse_event(*event)
            except ApiError as error:
                yield _format_sse_event("error", error.body())

        return StreamingResponse(stream(), media_type="text/event-stream", headers=STREAM_HEADERS)


def _format_sse_event(name: str | None, data: dict[str, Any] | str) -> str:
    """Returns a server-sent event; JSON has no line break of its own."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data, separators=(',', ':'))}\n\n"
