"""What the servers share: connections with limits, who may ask, how much is read, what becomes of errors;
and the service that searches a corpus for others, in the protocol that `retrieval/http.py` describes.

A reply holds nothing of this machine: sentences of ours, and of other errors that they happened. On SIGTERM
and Ctrl-C nobody else is let in, and the server ends when all have their answers; at a second one at once.
"""

import asyncio
import json
import logging
import re
import signal
import socket
import stat
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from ipaddress import ip_address
from types import FrameType
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import h11
import uvicorn
import uvloop
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dlm_rag.config import RetrievalConfig
from dlm_rag.config.sections import BM25_NAMES
from dlm_rag.errors import ConfigError, UserError, suggest_nearest, summarize_error
from dlm_rag.files.checked_json import parse_json
from dlm_rag.files.paths import resolve_regular_file
from dlm_rag.retrieval.base import CorpusRetriever, Query

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512  # open at once; further ones get status 503
CLIENT_SECONDS = 30.0  # for the head of a request, for its body, and to read anything of the reply
SWEEP_SECONDS = 0.1  # between two looks at the connections
MAX_REQUEST_HEAD_BYTES = 2**15
TOO_MANY_CONNECTIONS = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
DISCARD_WAIT_SECONDS = 1.0  # for more of a body that is too large
UNLOGGED_PATHS = ("/health", "/metrics")  # asked for every few seconds
SEARCH_PATH = "/retrieve"
MAX_TOP_K = 1000
MAX_QUERIES = 4096  # of a request
_KEY = re.compile(r"[!-~]{16,512}")
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
EXTRA_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "2"}}  # seconds

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")


class ApiError(Exception):
    """A request that is not answered: its status, a sentence, and the fields of OpenAI's error body."""

    def __init__(self, status: int, reason: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The refusal in OpenAI's form."""
        own = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = ERROR_TYPES.get(self.status, own)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def read_api_keys(path: str) -> dict[bytes, str]:
    """The keys of a file, one a line, by their digests: comparing one takes as long whatever it is.

    Blank lines and what begins with # are left out. Warns if all can read it. Raises `ConfigError`.
    """
    found = resolve_regular_file(path, "keys file", ConfigError)
    if found.stat().st_mode & stat.S_IROTH:
        log.warning("%s can be read by every user of this machine: chmod o= %s", path, path)
    keys: dict[bytes, str] = {}
    for number, line in enumerate(found.read_bytes().decode("ascii", "replace").splitlines(), start=1):
        if not (key := line.strip()) or key.startswith("#"):
            continue
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{path}, line {number}: a key has 16 to 512 letters, digits and signs")
        keys[sha256(key.encode()).digest()] = f"key{number}"
    if not keys:
        raise ConfigError(f"{path} holds no keys: write one a line, or leave serving.api_keys_file out")
    return keys


class AccessControl:
    """Who may ask.

    host: where the server listens; one that this machine alone reaches is to be called by no other name.
    keys_file: as `read_api_keys` reads it, a request needs a key; None: none is needed.
    """

    def __init__(self, host: str = "127.0.0.1", keys_file: str | None = None) -> None:
        self.local = is_loopback(host)
        self.keys = None if keys_file is None else read_api_keys(keys_file)

    def create_app(self, routes: Sequence[Route], open_paths: Collection[str] = ()) -> ASGIApp:
        """Returns the application, which logs each request once its reply has ended: method, path, status,
        seconds, whose key; never a question or an answer. open_paths: those that need no key."""
        handled = (ApiError, HTTPException, ClientDisconnect, Exception)
        routed = Starlette(routes=routes, exception_handlers=dict.fromkeys(handled, _refuse))
        routed.router.redirect_slashes = False

        async def guard(scope: Scope, receive: Receive, send: Send) -> None:
            status, key, path, begun = 500, "-", scope["path"], time.monotonic()
            app: ASGIApp = routed

            async def watch(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                key = self.check_request(Request(scope), path not in open_paths)
            except ApiError as error:
                app = await _refuse(Request(scope), error)
            try:
                await app(scope, receive, watch)
            finally:
                if path not in UNLOGGED_PATHS:
                    seconds = time.monotonic() - begun
                    log.info("%s %s %d %.3f s %s", scope["method"], quote(path), status, seconds, key)

        return guard

    def check_request(self, request: Request, keyed: bool) -> str:
        """Returns whose key a request brings, "-" where it needs none; raises `ApiError`. Pages of other
        sites may not ask: a browser would let them in its reader's name."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        name = re.sub(r":\d*$", "", host).strip("[]").casefold()  # without the port
        own = origin in (None, f"http://{host}", f"https://{host}")
        if not own or (self.local and not is_loopback(name)):
            raise ApiError(403, "a page of another site may not ask here")
        if {"content-length", "transfer-encoding"} <= {*request.headers}:  # who reads which may differ
            raise ApiError(400, "the length of a body is given twice")
        if self.keys is None or not keyed:
            return "-"
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        found = self.keys.get(sha256(key.strip().encode()).digest())
        if scheme.casefold() != "bearer" or found is None:
            reason = "this server needs an API key, as in Authorization: Bearer KEY"
            raise ApiError(401, reason, code="invalid_api_key")
        return found


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class RequestBody(BaseModel):
    """A JSON object in which every field is known and has its type."""

    model_config = ConfigDict(extra="forbid", strict=True)


def parse_body(kind: type[Body], body: bytes) -> Body:
    """The JSON object of a request; raises `ApiError` naming the field."""
    try:
        return kind.model_validate(parse_json(body, "the request cannot be read", UserError, "body"))
    except UserError as error:
        raise ApiError(400, str(error)) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    if not first["loc"]:
        raise ApiError(400, "the body must be a JSON object")
    names = [str(name)[:60] for name in first["loc"]]
    if first["type"] == "extra_forbidden":
        hint = suggest_nearest(names[-1], kind.model_fields)
        raise ApiError(400, f"the field {names[-1]!a} is not known{hint}", names[-1])
    raise ApiError(400, f"'{'.'.join(names)}': {first['msg'][0].lower()}{first['msg'][1:]}", names[0])


async def _refuse(request: Request, error: Exception) -> Response:
    """The connection is closed, for what else it brings may have no end."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)  # which nobody reads
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, error.detail)
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the request failed: the server's log says why")
    headers = {"Connection": "close"} | EXTRA_HEADERS.get(error.status, {})
    return JSONResponse(error.body(), error.status, headers)


class HttpService:
    """An application that is served until a signal comes, or until it fails: `error` says why.

    What a body says is read on a thread of the service, so that a large one delays nobody else.
    connections: those that are open; set by the server.
    """

    app: ASGIApp
    max_body_bytes = 2**20
    error: BaseException | None = None  # why the service has ended by itself, if it has

    def __init__(self) -> None:
        self.connections: Collection[object] = ()
        self._thread = ThreadPoolExecutor(1)

    async def read(self, request: Request, parse: Callable[[bytes], Result]) -> Result:
        """Returns what `parse` returns of the body; raises `ApiError` for one too slow or too large.

        The latter is read to its end and dropped: a connection closed before that would take the refusal
        with it. Where nothing more comes for a while the refusal is sent at once.
        """
        most = self.max_body_bytes
        too_large = ApiError(413, f"the body has more than {most >> 20} MiB")
        size, body = int(request.headers.get("content-length", "0")), bytearray()  # h11 has checked it
        if size > most and "expect" in request.headers:  # such a client waits before it sends anything
            raise too_large
        loop = asyncio.get_running_loop()
        end, parts = loop.time() + CLIENT_SECONDS, request.stream()
        try:
            part = b"begun"
            while part:  # the last one is empty
                soon = loop.time() + DISCARD_WAIT_SECONDS if size > most else end
                async with asyncio.timeout_at(min(end, soon)):
                    part = await anext(parts)
                size = max(size, len(body) + len(part))
                body += part if size <= most else b""
        except TimeoutError:
            if size <= most:
                raise ApiError(408, f"the body did not come within {CLIENT_SECONDS:g} seconds") from None
        if size > most:
            raise too_large
        if (coding := request.headers.get("content-encoding", "")).casefold() not in ("", "identity"):
            raise ApiError(415, f"Content-Encoding {coding[:40]!a} is not read: send the body uncompressed")
        work = loop.run_in_executor(self._thread, parse, bytes(body))
        return await self.run_unless_disconnected(request, work)

    async def run_unless_disconnected(self, request: Request, work: Awaitable[Result]) -> Result:
        """What `work` returns; given up, and `ClientDisconnect` raised, when the client goes away."""

        async def wait_for_disconnect() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        tasks = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                return tasks[0].result()
            raise ClientDisconnect
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Ends the thread, after the work under way."""
        self._thread.shutdown(cancel_futures=True)


TOP_K_NAMES = AliasChoices("topk", "top_k", "k")  # the first is Search-R1's


class SearchBody(RequestBody):
    """A search in the protocol of Search-R1, and the parts of each query if the client sends them."""

    model_config = ConfigDict(extra="ignore")

    queries: Annotated[list[str], Field(max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MAX_TOP_K)] | None = Field(None, validation_alias=TOP_K_NAMES)
    return_scores: bool | None = None
    parts: list[list[str]] | None = None


class SearchService(HttpService):
    """One retriever over HTTP, one search at a time; `route` is for another service to offer.

    access: for this machine alone where None. A search that no other can follow, for the corpus has
    changed, is the `error` that ends the server.
    """

    max_body_bytes = 2**24

    def __init__(
        self, retriever: CorpusRetriever, config: RetrievalConfig, access: AccessControl | None = None
    ) -> None:
        super().__init__()
        self._retriever, self._config = retriever, config
        names = ("method", "embedding_model", "query_prompt", "passage_prompt")
        settings = {name: getattr(config, name) for name in names}
        own, usual = (vars(each) for each in (config, RetrievalConfig()))
        of_bm25 = (*BM25_NAMES, "min_score_ratio")
        settings |= {name: own[name] for name in of_bm25 if own[name] != usual[name]}
        digest = sha256(json.dumps([retriever.fingerprint, settings]).encode()).hexdigest()
        self._note = {"fingerprint": digest, "asks": list(retriever.query_fields)}
        self.route = Route(SEARCH_PATH, self._search, methods=["POST"])
        self.app = (access or AccessControl()).create_app([Route("/", self._about), self.route])

    async def _about(self, request: Request) -> Response:
        limits = {"topk": MAX_TOP_K, "queries": MAX_QUERIES, "bytes": self.max_body_bytes}
        used = {"kind": self._config.method, "topk": self._config.top_k, "most": limits}
        size = {"passages": len(self._retriever.corpus), "search": f"POST {SEARCH_PATH}"}
        return JSONResponse({"dlm_rag": self._note} | used | size)

    async def _search(self, request: Request) -> Response:
        return await self.read(request, self._reply)

    def _reply(self, body: bytes) -> Response:
        if self.error is not None:
            raise ApiError(503, "the server is going down and searches no more")
        try:
            return JSONResponse(self.answer(body))
        except ApiError:
            raise
        except Exception as error:
            if isinstance(error, UserError):
                self.error = error
            else:
                log.warning("a search failed", exc_info=error)
            raise ApiError(500, f"the search failed: {summarize_error(error)}") from None

    def answer(self, body: bytes) -> dict[str, Any]:
        """The answer to a search; raises `ApiError`, and what the retriever raises."""
        asked = parse_body(SearchBody, body)
        whole = [[text] if text.strip() else [] for text in asked.queries]
        parts = whole if asked.parts is None else asked.parts
        if len(parts) != len(asked.queries):
            raise ApiError(400, "'parts' must be a list of texts for each query")
        queries = [Query(text, tuple(own)) for text, own in zip(asked.queries, parts, strict=True)]
        results = []
        for found in self._retriever.search_scored(queries, asked.topk or self._config.top_k):
            documents = [{"id": p.id, "title": p.title, "contents": p.text} for p, _ in found]
            scored = [{"document": d, "score": s} for d, (_, s) in zip(documents, found, strict=True)]
            results.append(scored if asked.return_scores else documents)
        return {"result": results, "dlm_rag": self._note}


class HttpServer(uvicorn.Server):
    """uvicorn's server of a service, with limits on connections; calls `ready` when clients can connect."""

    def __init__(self, service: HttpService, ready: Callable[[], object] = lambda: None) -> None:
        super().__init__(uvicorn.Config(
            self._answer, interface="asgi3", http="h11", ws="none", lifespan="off", log_config=None,
            access_log=False, server_header=False, proxy_headers=False,
            h11_max_incomplete_event_size=MAX_REQUEST_HEAD_BYTES,
        ))  # fmt: skip
        self._service, self._ready = service, ready
        service.connections = self.server_state.connections

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Cut off by a second Ctrl-C, or by what is no HTTP behind a head that was: no faults to be traced.
        with suppress(asyncio.CancelledError, h11.LocalProtocolError):
            await self._service.app(scope, receive, send)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends the server, a second Ctrl-C at once; uvicorn's own raises the signal again after that."""
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._sweeping = asyncio.create_task(self._sweep_connections())
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await asyncio.to_thread(self._service.close)

    async def _sweep_connections(self) -> None:
        """Drops connections that are too many, bring no request or read nothing; looks out for the end."""
        # Since when one waits for a request after the last, or has read nothing of what waits for it.
        stuck: dict[tuple[Any, Any], float] = {}
        while True:
            now = time.monotonic()
            connections: list[Any] = [*self.server_state.connections]
            idle = {(c, c.cycle) for c in connections if not c.cycle or c.cycle.response_complete}
            deaf = {(c, c.transport.get_write_buffer_size()) for c in connections if c.flow.write_paused}
            stuck = {key: stuck.get(key, now) for key in idle | deaf}
            newest = sorted(idle, key=stuck.__getitem__, reverse=True)
            for connection, _ in newest[: max(0, len(connections) - MAX_CONNECTIONS)]:
                connection.transport.write(TOO_MANY_CONNECTIONS)
                connection.transport.close()
            for (connection, _), since in stuck.items():
                if now - since > CLIENT_SECONDS:
                    connection.transport.abort()
            self.should_exit = self.should_exit or self._service.error is not None
            await asyncio.sleep(SWEEP_SECONDS)


def run_server(service: HttpService, sock: socket.socket, ready: Callable[[], object]) -> None:
    """Serves at a bound socket until a signal has come and accepted questions are answered. `ready` is
    called when clients can connect. Raises the error that has ended the service, if any."""
    uvloop.run(HttpServer(service, ready).serve([sock]))
    if service.error is not None:
        raise service.error
