"""The server process: connections with limits, and an end on which nothing is lost.

SIGTERM and Ctrl-C: what was taken is answered, everything else refused (503), and then the server ends;
at the second one it ends at once.
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
# seconds between looks at whether the server has started, or is to end
SHUTDOWN_POLL_SECONDS, IDLE_POLL_SECONDS = 0.05, 0.5
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
            return
        self._head_timer = self.loop.call_later(REQUEST_HEAD_TIMEOUT_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer and self.cycle is not None and not self.cycle.response_complete:
            self._head_timer.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:  # else the next one has come already
            if self._head_timer:
                self._head_timer.cancel()
            self._head_timer = self.loop.call_later(REQUEST_HEAD_TIMEOUT_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_STALL_TIMEOUT_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer:
            self._write_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer:
                timer.cancel()
        super().connection_lost(exc)


class HttpService(Protocol):
    """What a server serves until it is drained and all is answered, or until it fails.

    connections: how many are open; set by the server. error: why it has ended by itself. idle: whether
    nobody waits for an answer.
    """

    app: Starlette
    limits: ServingConfig
    connections: Callable[[], int]

    @property
    def idle(self) -> bool: ...
    @property
    def error(self) -> BaseException | None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


class _Server(uvicorn.Server):
    """uvicorn without its signals, on which it would end before what runs is answered."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def create_server(service: HttpService) -> uvicorn.Server:
    """uvicorn's server of a service, with our limits; signals do not end it."""
    config = uvicorn.Config(
        service.app, http=TimedConnection, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, h11_max_incomplete_event_size=MAX_REQUEST_HEAD_BYTES, proxy_headers=False,
        timeout_keep_alive=ceil(REQUEST_HEAD_TIMEOUT_SECONDS), timeout_graceful_shutdown=1,
        limit_concurrency=service.limits.max_connections + 1,  # uvicorn refuses from this number on
    )  # fmt: skip
    server = _Server(config)
    service.connections = lambda: len(server.server_state.connections)
    return server


def run_server(service: HttpService, sock: socket.socket, ready: Callable[[], object]) -> None:
    """Serves at a bound socket until a signal has come and what was taken is answered.

    `ready` is called when requests are let in. Raises what has ended the service, if no signal has.
    """
    uvloop.run(_run_server(service, sock, ready))


async def _run_server(service: HttpService, sock: socket.socket, ready: Callable[[], object]) -> None:
    server = create_server(service)
    loop, signals = asyncio.get_running_loop(), 0

    def count_signal() -> None:
        nonlocal signals
        signals += 1
        service.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, count_signal)
    serving = asyncio.ensure_future(server.serve([sock]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(SHUTDOWN_POLL_SECONDS)
        ready()
        while service.error is None and signals < 2 and not serving.done():
            if signals and service.idle:
                break
            await asyncio.sleep(SHUTDOWN_POLL_SECONDS if signals else IDLE_POLL_SECONDS)
    finally:
        server.should_exit = True
        await serving
        await asyncio.to_thread(service.close)
    if service.error is not None:
        raise service.error
