"""The server process: connections with limits, and an end on which nothing is lost.

SIGTERM and Ctrl-C: what was taken is answered, everything else refused, and then the server ends; at the
second one it ends at once.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any, Protocol

import uvicorn
import uvloop
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from dlm_rag.config import ServingConfig

REQUEST_HEAD_TIMEOUT_SECONDS = 30.0  # in which the head of a request must have come
WRITE_STALL_TIMEOUT_SECONDS = 30.0  # after which who reads nothing of an answer is dropped
MAX_REQUEST_HEAD_BYTES = 2**15
TOO_MANY_CONNECTIONS = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class TimedConnection(H11Protocol):
    """A connection that is dropped if it is one too many, no request head comes, or nobody reads."""

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            transport.write(TOO_MANY_CONNECTIONS)  # uvicorn itself waits for a request
            transport.close()
        else:
            self._head_timer = self._abort_after(REQUEST_HEAD_TIMEOUT_SECONDS)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._head_timer)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:  # else the next one has come already
            _cancel(self._head_timer)
            self._head_timer = self._abort_after(REQUEST_HEAD_TIMEOUT_SECONDS)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self._abort_after(WRITE_STALL_TIMEOUT_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head_timer)
        _cancel(self._write_timer)
        super().connection_lost(exc)

    def _abort_after(self, seconds: float) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class HttpService(Protocol):
    """What a server serves until a signal comes, or until it fails.

    connections: how many are open; set by the server. error: why it has ended by itself.
    """

    app: Starlette
    limits: ServingConfig
    connections: Callable[[], int]

    @property
    def error(self) -> BaseException | None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


class _Server(uvicorn.Server):
    """uvicorn, which also ends when the service does, and leaves signals to `run_server`."""

    service: HttpService

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.service.error is not None

    def take_signal(self) -> None:
        """At the first one, what was taken is answered; at the second one nothing is waited for."""
        self.service.drain()
        self.force_exit, self.should_exit = self.should_exit, True


def create_server(service: HttpService) -> _Server:
    """uvicorn's server of a service, with our limits; signals do not end it."""
    config = uvicorn.Config(
        service.app, http=TimedConnection, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, h11_max_incomplete_event_size=MAX_REQUEST_HEAD_BYTES, proxy_headers=False,
        timeout_keep_alive=ceil(REQUEST_HEAD_TIMEOUT_SECONDS),
        limit_concurrency=service.limits.max_connections + 1,  # uvicorn refuses from this number on
    )  # fmt: skip
    server = _Server(config)
    server.service = service
    service.connections = lambda: len(server.server_state.connections)
    return server


def run_server(service: HttpService, sock: socket.socket, ready: Callable[[], object]) -> None:
    """Serves at a bound socket until a signal has come and what was taken is answered.

    `ready` is called when clients can connect. Raises what has ended the service, if no signal has.
    """

    async def serve() -> None:
        server = create_server(service)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.take_signal)
        sock.listen()  # from now on who connects waits to be let in
        ready()
        try:
            await server.serve([sock])
        finally:
            await asyncio.to_thread(service.close)

    uvloop.run(serve())
    if service.error is not None:
        raise service.error
