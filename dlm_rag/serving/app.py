"""The application: what is at which address (docs/reference/http.md), and how an answer is sent."""

import asyncio
import copy
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse

from dlm_rag.config import ServingConfig
from dlm_rag.decode.decoder import Decoder
from dlm_rag.energy.meter import EnergyMeter
from dlm_rag.errors import QuestionError
from dlm_rag.evidence.truncation import ContextBudget, truncate_evidence
from dlm_rag.page.render import render_live_page
from dlm_rag.questions import Question
from dlm_rag.serving.async_engine import AsyncEngine, EngineRequest
from dlm_rag.serving.metrics import render_prometheus_metrics
from dlm_rag.serving.middleware import (
    AccessControl,
    ApiError,
    RequestHandler,
    read_body,
    run_unless_disconnected,
)
from dlm_rag.serving.requests import ParsedRequest, RequestParser
from dlm_rag.serving.responses import (
    AnswerEvents,
    ChatResponse,
    Event,
    ReplyContext,
    build_task_completion,
    get_finished_rollout,
)
from dlm_rag.serving.search_app import SEARCH_PATH, SearchService

MAX_REQUEST_BYTES = 2**20
# Of a question, for each token of the context: tokenizing 1 MiB takes seconds.
MAX_QUESTION_CHARS_PER_TOKEN = 16
MAX_KEPT_PASSAGES = 4096  # that answers have cited, the last ones
# A proxy must not wait for the end of a stream; nobody may keep what was said.
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@dataclass(frozen=True)
class ServedModel:
    """What clients are told of the model: its name, questions that it can answer, what it knows.

    note: stands below each answer; "" for nothing.
    """

    name: str
    examples: tuple[str, ...] = ()
    note: str = ""

    def describe(self) -> dict[str, Any]:
        """The model in OpenAI's form."""
        known = {"examples": self.examples, "description": self.note}
        ids = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "dlm_rag"}
        return ids | {name: value for name, value in known.items() if value}


class AnswerService:
    """One decoder over HTTP. `app` is what a server runs; `close` ends the engine."""

    def __init__(
        self,
        decoder: Decoder,
        model: ServedModel,
        limits: ServingConfig,
        access: AccessControl | None = None,
    ) -> None:
        """access: without keys, for this machine alone, where None."""
        self.model, self.limits, access = model, limits, access or AccessControl()
        canvas = limits.max_tokens or decoder.config.max_new_tokens
        assert canvas is not None
        self._parser = RequestParser(decoder, canvas)
        self._tokenizer = copy.deepcopy(decoder.tokenizer)  # for this thread: one is not for two
        self._decoder, self.meter = decoder, EnergyMeter()
        self.connections: Callable[[], int] = lambda: 0
        self.engine = AsyncEngine(decoder, limits.max_queue_per_key)
        self._passages: dict[str, str] = {}
        page = HTMLResponse(
            render_live_page(access.keys is not None, model.examples), headers={"X-Frame-Options": "DENY"}
        )
        models = JSONResponse({"object": "list", "data": [model.describe()]})
        chat = partial(self._complete, self._parser.parse_chat)
        routes: list[tuple[str, str, RequestHandler, bool]] = [
            ("GET", "/", _reply_with(page), False),
            ("GET", "/health", self._health, False),
            ("GET", "/metrics", self._metrics, False),
            ("GET", "/v1/models", _reply_with(models), True),
            ("GET", "/v1/models/{name:path}", self._one_model, True),
            ("POST", "/v1/chat/completions", chat, True),
            ("POST", "/chat/completions", chat, True),  # datatrove asks other machines without /v1
            ("POST", "/v1/completions", partial(self._complete, self._parser.parse_completion), True),
            ("GET", "/passages/{name:path}", self._passage, True),
            ("POST", "/v1/answers", self._answers, True),
        ]
        self.app = access.create_app(routes, MAX_REQUEST_BYTES)
        self._search: SearchService | None = None

    def offer_search(self, search: SearchService) -> None:
        """Lets clients search the corpus too, at `SEARCH_PATH`."""
        self._search = search
        self.app.router.routes += [r for r in search.app.routes if getattr(r, "path", "") == SEARCH_PATH]

    @property
    def error(self) -> BaseException | None:
        """Why the engine has ended by itself, if it has."""
        return self.engine.error or (self._search.error if self._search else None)

    def drain(self) -> None:
        """Takes no more questions."""
        self.engine.draining = True
        if self._search:
            self._search.drain()

    def close(self) -> None:
        """Ends the engine."""
        self.engine.close()
        if self._search:
            self._search.close()

    async def _health(self, request: Request) -> Response:
        status = "ok" if self.engine.is_healthy else "failing"
        if self.engine.draining or self.engine.error is not None:
            status = "going down"
        return JSONResponse({"status": status, "model": self.model.name}, 200 if status == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        text = render_prometheus_metrics(self.engine, self._decoder, self.meter, self.connections())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self.model.describe())

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model.name:
            raise ApiError(404, f"the model here is '{self.model.name}'", "model", "model_not_found")

    async def _passage(self, request: Request) -> Response:
        text = self._passages.get(request.path_params["name"])
        if text is None:
            raise ApiError(404, "no answer of late has cited a passage of this id")
        return PlainTextResponse(text)

    def _publish_passage(self, name: str, text: str) -> str:
        """Keeps a passage for who follows its link; returns its path."""
        self._passages.pop(name, None)
        self._passages[name] = text
        if len(self._passages) > MAX_KEPT_PASSAGES:
            del self._passages[next(iter(self._passages))]
        return f"passages/{quote(name)}"

    async def _complete(self, parse: Callable[[bytes], ParsedRequest], request: Request) -> Response:
        asked = parse(await read_body(request))
        self._check_model(asked.model)
        if asked.task is not None:
            return JSONResponse(build_task_completion(asked.task, self.model.name))
        jobs, room = self._create_jobs(asked, request, asked.stream)
        context = ReplyContext(
            self.model.name, self._tokenizer, room,
            lambda name, text: f"{request.base_url}{self._publish_passage(name, text)}", self.model.note,
        )  # fmt: skip
        reply = ChatResponse(asked, jobs, context)
        if asked.stream:
            return await self._stream(request, jobs, reply.new_events)
        await run_unless_disconnected(request, self._finish(jobs))
        return JSONResponse(reply.build_completion())

    async def _answers(self, request: Request) -> Response:
        asked = self._parser.parse_answer(await read_body(request))
        jobs, _ = self._create_jobs(asked, request, watched=True)
        jobs[0].record_provisional = True  # which the page shows
        return await self._stream(request, jobs, AnswerEvents(jobs[0], self._tokenizer).new_events)

    def _create_jobs(
        self, asked: ParsedRequest, request: Request, watched: bool
    ) -> tuple[list[EngineRequest], ContextBudget]:
        """What the engine is asked, the room of its prompt; raises `ApiError` where it has none."""
        shape, layout = self._decoder.denoiser.config, self._decoder.evidence_layout
        room = ContextBudget.from_config(shape, layout, asked.settings.max_new_tokens)
        most = MAX_QUESTION_CHARS_PER_TOKEN * room.context_length
        try:
            if len(asked.question) + len(asked.system) > most:
                raise QuestionError(f"the question has more than the {most} characters that are read here")
            truncate_evidence(self._tokenizer.build_prompt(asked.question, [], asked.system), room)
        except QuestionError as error:
            raise ApiError(400, str(error), None, "context_length_exceeded") from None
        # A sampling draws by seed and id: the same seed and question give the same text.
        question, news = Question("q1", asked.question, system=asked.system), asyncio.Event()
        seeds = range(asked.settings.seed, asked.settings.seed + asked.n)
        settings = [replace(asked.settings, seed=seed) for seed in seeds]
        return [
            EngineRequest(question, own, request.state.key, watched, news=news) for own in settings
        ], room

    async def _follow(self, jobs: Sequence[EngineRequest]) -> AsyncGenerator[bool]:
        """Submits the jobs of a request, which share their news; yields at every news whether all are done.

        Who goes away gives them up.
        """
        deadline = asyncio.get_running_loop().time() + self.limits.timeout
        submitted: list[EngineRequest] = []
        try:
            for job in jobs:
                submitted.append(self.engine.submit(job))
            done = False
            while not done:
                try:
                    async with asyncio.timeout_at(deadline):
                        await jobs[0].news.wait()
                except TimeoutError:
                    for job in jobs:
                        self.engine.cancel(job, "failed")
                    reason = f"the question took longer than {self.limits.timeout:g} seconds"
                    raise ApiError(504, reason) from None
                jobs[0].news.clear()
                done = all(job.done for job in jobs)
                yield done
        finally:
            for job in submitted:
                self.engine.cancel(job)

    async def _finish(self, jobs: Sequence[EngineRequest]) -> None:
        async for _ in self._follow(jobs):
            pass

    async def _stream(
        self, request: Request, jobs: Sequence[EngineRequest], new_events: Callable[[bool], Iterator[Event]]
    ) -> Response:
        """The events of every news, as they come. What fails before the first one has a status of its own.

        Nothing is kept for who reads slowly but the rollout: what is new is looked up when there is room.
        """
        follow = self._follow(jobs)
        try:
            done = await run_unless_disconnected(request, anext(follow))
            if done:
                for job in jobs:
                    get_finished_rollout(job)
        except BaseException:
            await follow.aclose()
            raise

        async def stream() -> AsyncIterator[str]:
            try:
                for event in new_events(done):
                    yield _format_sse_event(*event)
                async for last in follow:
                    for event in new_events(last):
                        yield _format_sse_event(*event)
            except ApiError as error:
                yield _format_sse_event("error", error.body())
            finally:
                await follow.aclose()

        return StreamingResponse(stream(), media_type="text/event-stream", headers=STREAM_HEADERS)


def _reply_with(response: Response) -> RequestHandler:
    async def reply(request: Request) -> Response:
        return response

    return reply


def _format_sse_event(name: str | None, data: dict[str, Any] | str) -> str:
    """A server-sent event; JSON has no line break of its own."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data, separators=(',', ':'))}\n\n"
