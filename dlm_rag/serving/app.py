"""The application: what is at which address (docs/reference/http.md), and how an answer is sent."""

import asyncio
import copy
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import quote

from prometheus_client import Gauge, generate_latest
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from dlm_rag.decode.rollout import Rollout, RolloutStep
from dlm_rag.engine.engine import Decoder
from dlm_rag.page.render import render_live_page
from dlm_rag.questions import Question
from dlm_rag.retrieval.base import count_passages
from dlm_rag.serving.async_engine import AsyncEngine, EngineRequest
from dlm_rag.serving.chat_completions import ChatResponse, Event, ParsedRequest, RequestParser, stream_trace
from dlm_rag.serving.conversation import reply_to_greeting
from dlm_rag.serving.http_server import AccessControl, ApiError, HttpService, run_unless_disconnected
from dlm_rag.serving.search_app import SearchService

ANSWER_TIMEOUT_SECONDS = 300.0  # of a question, waiting included
MAX_KEPT_PASSAGES = 4096  # cited passages whose texts are kept, the last ones
OPEN_PATHS = ("/", "/health", "/metrics")  # which need no key
# A proxy must not wait for the end of a stream; nobody may keep what was said.
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class AnswerService(HttpService):
    """One decoder over HTTP. `app` is what a server runs; `close` ends the engine."""

    def __init__(
        self,
        decoder: Decoder,
        name: str,
        access: AccessControl,
        search: SearchService | None = None,
        known: tuple[Sequence[str], str] = ((), ""),
    ) -> None:
        """name: of the model. search: lets clients search the corpus too. known: questions that the model
        can answer, and what stands below each answer.
        """
        super().__init__()
        examples, self._note = known
        told = {"examples": examples, "description": self._note}
        own = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "dlm_rag"}
        self.name, self._model = name, own | {key: value for key, value in told.items() if value}
        self._decoder, self._parser, self._search = decoder, RequestParser(decoder), search
        self._tokenizer = copy.deepcopy(decoder.tokenizer)  # which is not for two threads at once
        self.engine = AsyncEngine(decoder)
        count = Gauge("dlm_rag_connections", "Open connections.", registry=self.engine.registry)
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
    def error(self) -> BaseException | None:
        return self.engine.error or (self._search.error if self._search else None)

    def close(self) -> None:
        super().close()
        self.engine.close()
        if self._search:
            self._search.close()

    async def _health(self, request: Request) -> Response:
        status = "ok" if self.engine.is_healthy else "failing"
        if self.error is not None:
            status = "going down"
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
        text = self._passages.get(request.path_params["name"])
        if text is None:
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
        steps = self._follow(self._build_job(asked))
        link = partial(self._publish_passage, str(request.base_url))
        reply = ChatResponse(asked, self.name, self._tokenizer, link, self._note)
        if asked.body.stream:
            return await self._stream(request, reply.stream(steps))
        return JSONResponse(await run_unless_disconnected(request, reply.complete(steps)))

    async def _answers(self, request: Request) -> Response:
        asked = await self.read(request, self._parser.parse_answer)
        steps = self._follow(self._build_job(asked, record_provisional=True))
        return await self._stream(request, stream_trace(steps, self._tokenizer.end_ids))

    def _build_job(self, asked: ParsedRequest, record_provisional: bool = False) -> EngineRequest:
        """Returns the question for the engine; of a greeting, what is said to it at once.

        By the id and the seed a sampling draws: the same question gives the same text again.
        """
        question = Question("q1", asked.question, system=asked.system)
        job = EngineRequest(question, asked.settings, record_provisional)
        if said := reply_to_greeting(asked.asked, self._passage_count):
            settings, step = asdict(asked.settings) | {"abstain": "never"}, RolloutStep(0, None, (), False)
            job.rollout = Rollout(
                "q1", asked.question, self._decoder.evidence_layout, 0, [step], said, settings,
                finished=True, answer_form="whole",
            )  # fmt: skip
            job.news.set()
        return job

    async def _follow(self, job: EngineRequest) -> AsyncGenerator[tuple[Rollout, RolloutStep]]:
        """Submits a job; yields its steps as they come. Who goes away gives it up; raises `ApiError`."""
        deadline = asyncio.get_running_loop().time() + ANSWER_TIMEOUT_SECONDS
        if not job.done:  # a greeting is: it needs no engine
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
                for step in job.get_rollout().steps[taken:]:
                    taken += 1
                    yield job.get_rollout(), step
        finally:
            self.engine.cancel(job)

    async def _stream(self, request: Request, events: AsyncGenerator[Event]) -> Response:
        """Sends events as they come. A failure before the first one has its own status."""
        first = await run_unless_disconnected(request, anext(events))

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
