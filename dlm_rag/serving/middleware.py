"""What the servers share: who may ask, how much of a request is read, what becomes of errors.

A reply holds nothing of this machine: sentences of ours, and of other errors that they happened.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dlm_rag.errors import UserError, suggest_nearest
from dlm_rag.files.checked_json import parse_json
from dlm_rag.serving.api_keys import ApiKeys

MAX_BODY_SECONDS = 30.0  # in which a body must have come
ERROR_TYPES_BY_STATUS = {401: "authentication_error", 429: "rate_limit_error"}

Body = TypeVar("Body", bound=BaseModel)
RequestHandler = Callable[[Request], Awaitable[Response]]


class ApiError(Exception):
    """A request that is not answered: its status, a sentence, and the fields of OpenAI's error body."""

    def __init__(self, status: int, reason: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.param, self.code = status, param, code
        self.retry_after: int | None = None


class AccessControl:
    """Who may ask.

    local: whether the server listens to this machine alone, and is to be called by no other name. keys:
    a request needs one of them; None: no key is needed.
    """

    def __init__(self, local: bool = True, keys: ApiKeys | None = None) -> None:
        self.local, self.keys = local, keys

    def create_app(self, routes: Sequence[tuple[str, str, RequestHandler, bool]]) -> Starlette:
        """What a server runs. routes: method, path, what answers there, and whether that needs a key."""
        app = Starlette(
            routes=[Route(at, self._guarded(run, keyed), methods=[by]) for by, at, run, keyed in routes],
            exception_handlers={
                ApiError: _handle_api_error,
                HTTPException: _handle_http_error,
                Exception: _handle_server_error,
            },
        )
        app.router.redirect_slashes = False
        return app

    def _guarded(self, run: RequestHandler, keyed: bool) -> RequestHandler:
        """`run` for those who may ask; `state.key` is whose question it is."""

        async def guarded(request: Request) -> Response:
            self._check_names(request)
            if {"content-length", "transfer-encoding"} <= {*request.headers}:  # who reads which may differ
                raise ApiError(400, "the length of a body is said twice")
            request.state.key = ""
            if keyed and self.keys is not None:
                holder = self.keys.find_key_name(request.headers.get("authorization", ""))
                if holder is None:
                    raise ApiError(
                        401, "this server needs an API key, as in Authorization: Bearer KEY", None,
                        "invalid_api_key",
                    )  # fmt: skip
                request.state.key = holder
            try:
                return await run(request)
            except ClientDisconnect:
                return Response(status_code=400)  # which nobody reads

        return guarded

    def _check_names(self, request: Request) -> None:
        """Refuses pages of other sites, which a browser would let ask in its reader's name."""
        host = request.headers.get("host", "")
        try:
            name, origin = urlsplit(f"//{host}").hostname, request.headers.get("origin")
            same = origin is None or urlsplit(origin).netloc == host
        except ValueError:
            name, same = None, False
        if (self.local and not is_loopback(name or "")) or not same:
            raise ApiError(403, "a page of another site may not ask here")


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def read_body(request: Request, most: int) -> bytes:
    """What was sent; raises `ApiError` for more than `most` bytes, and for what comes too slowly."""
    said = request.headers.get("content-length", "0")
    body = bytearray()
    too_long = ApiError(413, f"the body has more than {most} bytes")
    if not said.isdecimal() or len(said) > 18 or int(said) > most:
        raise too_long
    try:
        async with asyncio.timeout(MAX_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {MAX_BODY_SECONDS:g} seconds") from None
    return bytes(body)


class RequestBody(BaseModel):
    """A JSON object in which every field is known and has its type."""

    model_config = ConfigDict(extra="forbid", strict=True)


def parse_body(kind: type[Body], body: bytes) -> Body:
    """The JSON object of a request; raises `ApiError` naming the field."""
    try:
        asked = parse_json(body, "the request cannot be read", UserError, "body")
    except UserError as error:
        raise ApiError(400, str(error)) from None
    if not isinstance(asked, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    field, last = str(first["loc"][0])[:60], str(first["loc"][-1])[:60]
    if first["type"] == "extra_forbidden":
        hint = suggest_nearest(last, kind.model_fields)
        raise ApiError(400, f"the field {last!a} is not known{hint}", last)
    place = ".".join(map(str, first["loc"]))
    raise ApiError(400, f"'{place}': {first['msg'][0].lower()}{first['msg'][1:]}", field)


async def run_unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """What `work` returns; given up, and `ClientDisconnect` raised, when the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_error_body(error: ApiError) -> dict[str, Any]:
    """A refusal in OpenAI's form."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": str(error),
            "type": ERROR_TYPES_BY_STATUS.get(error.status, kind),
            "param": error.param,
            "code": error.code,
        }
    }


async def _handle_api_error(request: Request, error: Exception) -> Response:
    """A refusal; the connection is closed, for what else it brings may have no end."""
    assert isinstance(error, ApiError)
    headers = {"Connection": "close"}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(make_error_body(error), error.status, headers)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "")
    there = ", ".join(route.path for route in request.app.routes)
    reason = f"this address takes {allowed}" if error.status_code == 405 else f"nothing is here but {there}"
    return await _handle_api_error(request, ApiError(error.status_code, reason))


async def _handle_server_error(request: Request, error: Exception) -> Response:
    return await _handle_api_error(request, ApiError(500, "the request failed: the server's log says why"))
