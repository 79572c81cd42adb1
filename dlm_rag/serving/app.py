"""The application: what is at which address, who may ask, and what becomes of errors.

    GET  /                        the trace page, which plays an answer while it is made
    GET  /v1/models               the one model, in OpenAI's form
    POST /v1/chat/completions     an answer in OpenAI's form, whole or as a stream
    POST /v1/answers              every step of an answer, as server-sent events
    GET  /health, /metrics        for machines

Chat completions are at /chat/completions too: datatrove asks other machines without /v1.
"""

import asyncio
import copy
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse

from dlm_rag.config import ServingConfig
from dlm_rag.decode.decoder import Decoder
from dlm_rag.energy.meter import Meter
from dlm_rag.errors import QuestionError
from dlm_rag.evidence.fitting import Room, fit
from dlm_rag.page.write import live_html
from dlm_rag.questions import Question
from dlm_rag.serving.access import Access, RefusedError, error_body, read_body, unless_gone
from dlm_rag.serving.metrics import exposition
from dlm_rag.serving.replies import AnswerEvents, ChatReply, failure
from dlm_rag.serving.requests import Asked, Reader
from dlm_rag.serving.station import Job, Station

MOST_BYTES = 2**20  # of a request
MOST_CHARACTERS = 16  # of a question, for each token of the context: tokenizing 1 MiB takes seconds
# A proxy must not wait for the end of a stream; nobody may keep what was said.
UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Service:
    """One decoder behind addresses. `app` is what a server runs; `close` ends the station."""

    def __init__(
        self,
        decoder: Decoder,
        model: str,
        limits: ServingConfig,
        meter: Meter | None = None,
        access: Access | None = None,
        bounded: bool = False,
    ) -> None:
        """model: its name for clients. access: without keys, for this machine alone, where None. bounded:
        as in `Reader`.
        """
        self.model, self.limits, access = model, limits, access or Access()
        self._shape, self._layout = decoder.denoiser.config, decoder.evidence_layout
        canvas = limits.tokens or decoder.config.canvas_length
        assert canvas is not None
        heads = decoder.denoiser.heads is not None
        self._reader = Reader(decoder.config, self._shape, canvas, heads, bounded)
        self._tokenizer = copy.deepcopy(decoder.tokenizer)  # for this thread: one is not for two
        self._decoder, self._meter = decoder, meter or Meter()
        self._news: dict[Job, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}
        self._created = int(time.time())
        self.connections: Callable[[], int] = lambda: 0
        self.station = Station(decoder, limits, self._wake)
        page = live_html(access.keys is not None)
        self._page = HTMLResponse(page, headers={"X-Frame-Options": "DENY"})
        self.app = self._application(access)

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer, nor for the rest of one."""
        return not (self._news or self.station.rows or self.station.waiting)

    @property
    def error(self) -> BaseException | None:
        """What has ended the station, if nobody has told it to."""
        return self.station.error

    def drain(self) -> None:
        """Takes no more questions."""
        self.station.drain()

    def close(self) -> None:
        """Ends the station."""
        self.station.close()

    def _application(self, access: Access) -> Starlette:
        places = [
            ("GET", "/", self._show_page, False),
            ("GET", "/health", self._health, False),
            ("GET", "/metrics", self._metrics, False),
            ("GET", "/v1/models", self._models, True),
            ("GET", "/v1/models/{name:path}", self._one_model, True),
            ("POST", "/v1/chat/completions", self._chat, True),
            ("POST", "/chat/completions", self._chat, True),
            ("POST", "/v1/answers", self._answers, True),
        ]
        return access.application(places)

    async def _show_page(self, request: Request) -> Response:
        return self._page

    async def _health(self, request: Request) -> Response:
        status = "ok" if self.station.well else "failing"
        if self.station.draining or not self.station.alive:
            status = "going down"
        return JSONResponse({"status": status, "model": self.model}, 200 if status == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        text = exposition(self.station, self._decoder.proposer, self._meter, self.connections())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": self._created, "owned_by": "dlm_rag"}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise RefusedError(404, f"the model here is '{self.model}'", "model", "model_not_found")

    async def _chat(self, request: Request) -> Response:
        asked = self._reader.chat(await read_body(request, MOST_BYTES))
        self._check_model(asked.model)
        job, room = self._job(asked, request.state.key, asked.stream)
        reply = ChatReply(asked, job, self.model, self._tokenizer, room)
        if not asked.stream:
            return JSONResponse(await unless_gone(request, self._whole(job, reply)))

        def chunks(done: bool) -> Iterable[str]:
            yield from (_event(chunk) for chunk in reply.news(done))
            if done:
                yield "data: [DONE]\n\n"

        return await self._stream(request, job, chunks)

    async def _whole(self, job: Job, reply: ChatReply) -> dict[str, Any]:
        async for _ in self._follow(job):
            pass
        return reply.whole()

    async def _answers(self, request: Request) -> Response:
        asked = self._reader.answer(await read_body(request, MOST_BYTES))
        job, _ = self._job(asked, request.state.key, watched=True)
        job.guesses = True  # which the page shows
        events = AnswerEvents(job, self._tokenizer)

        def lines(done: bool) -> Iterable[str]:
            yield from (_event(data, name) for name, data in events.news(done))

        return await self._stream(request, job, lines)

    def _job(self, asked: Asked, key: str, watched: bool) -> tuple[Job, Room]:
        """The job of a request, the room of its prompt; raises `RefusedError` where it has none."""
        room = Room.of(self._shape, self._layout, asked.settings.canvas_length)
        try:
            if len(asked.question) > (most := MOST_CHARACTERS * room.context_length):
                raise QuestionError(f"the question has more than the {most} characters that are read here")
            fit(self._tokenizer.prompt(asked.question, []), room)
        except QuestionError as error:
            raise RefusedError(400, str(error), None, "context_length_exceeded") from None
        # A sampling draws by seed and id: the same seed and question give the same text.
        question = Question("q1", asked.question)
        deadline = time.monotonic() + self.limits.seconds
        return Job(question, asked.settings, key, watched, deadline), room

    async def _follow(self, job: Job) -> AsyncGenerator[bool]:
        """Submits a job; yields whether it is done at every news of it. Who goes away gives it up."""
        self._news[job] = asyncio.get_running_loop(), (event := asyncio.Event())
        try:
            self.station.submit(job)
            done = False
            while not done:
                await event.wait()
                event.clear()
                done = job.done
                yield done
        finally:
            del self._news[job]
            self.station.cancel(job)

    def _wake(self, jobs: Sequence[Job]) -> None:
        """Called by the station."""
        for job in jobs:
            if (waits := self._news.get(job)) is not None:
                loop, event = waits
                try:
                    loop.call_soon_threadsafe(event.set)
                except RuntimeError:  # the loop has ended
                    self._news.pop(job, None)

    async def _stream(
        self, request: Request, job: Job, pieces: Callable[[bool], Iterable[str]]
    ) -> Response:
        """The pieces of every news, as they come. What fails before the first one has a status of its own.

        Nothing is kept for who reads slowly but the rollout: what is new is looked up when there is room.
        """
        follow = self._follow(job)
        try:
            done = await unless_gone(request, anext(follow))
            if done and (error := failure(job)) is not None:
                raise error
        except BaseException:
            await follow.aclose()
            raise

        async def sent() -> AsyncIterator[str]:
            try:
                for piece in pieces(done):
                    yield piece
                async for last in follow:
                    for piece in pieces(last):
                        yield piece
            except RefusedError as error:
                yield _event(error_body(error), "error")
            finally:
                await follow.aclose()

        return StreamingResponse(sent(), media_type="text/event-stream", headers=UNBUFFERED)


def _event(data: dict[str, Any], name: str | None = None) -> str:
    """A server-sent event; JSON has no line break of its own."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n"
