"""The server process: connections with limits, and an end on which nothing is lost.

SIGTERM and Ctrl-C: accepted questions are answered, everything else is refused, and then the server ends.
A second Ctrl-C ends it at once.
"""

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

import uvicorn
import uvloop
from starlette.applications import Starlette

MAX_CONNECTIONS = 512  # open at once; further ones get status 503
REQUEST_HEAD_TIMEOUT_SECONDS = 30.0  # until the head of a request has come
WRITE_STALL_TIMEOUT_SECONDS = 30.0  # until a client that reads nothing is dropped
SWEEP_SECONDS = 0.1  # between two looks at the connections
MAX_REQUEST_HEAD_BYTES = 2**15
TOO_MANY_CONNECTIONS = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class HttpService(Protocol):
    """An application that is served until a signal comes, or until it fails: `error` says why."""

    app: Starlette

    @property
    def error(self) -> BaseException | None: ...
    def watch_connections(self, count: Callable[[], int]) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


def create_server(service: HttpService) -> uvicorn.Server:
    """Returns uvicorn's server of a service, with our limits."""
    config = uvicorn.Config(
        service.app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, h11_max_incomplete_event_size=MAX_REQUEST_HEAD_BYTES, proxy_headers=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    service.watch_connections(lambda: len(server.server_state.connections))
    return server


async def serve_until_ended(server: uvicorn.Server, service: HttpService, sock: socket.socket) -> None:
    """Serves at a bound socket until a signal comes or the service fails."""
    sweeping = asyncio.create_task(_sweep_connections(server, service))
    try:
        await server.serve([sock])
    finally:
        sweeping.cancel()
        await asyncio.to_thread(service.close)


async def _sweep_connections(server: uvicorn.Server, service: HttpService) -> None:
    """Drops connections that are too many, bring no request head or read nothing; looks out for the end."""
    idle: dict[Any, float] = {}  # by connection: since when it has no request, or reads nothing
    stalled: dict[Any, float] = {}
    while True:
        now = time.monotonic()
        waiting, unread = [], []
        open_now: list[Any] = [*server.server_state.connections]
        for connection in open_now:
            if connection.cycle is None or connection.cycle.response_complete:
                waiting.append(connection)
            if connection.flow.write_paused:
                unread.append(connection)
        idle = {each: idle.get(each, now) for each in sorted(waiting, key=lambda each: idle.get(each, now))}
        stalled = {each: stalled.get(each, now) for each in unread}
        excess = max(0, len(open_now) - MAX_CONNECTIONS)
        for connection in [*idle][len(idle) - min(excess, len(idle)) :]:  # the newest
            connection.transport.write(TOO_MANY_CONNECTIONS)
            connection.transport.close()
        late = [each for each, start in idle.items() if now - start > REQUEST_HEAD_TIMEOUT_SECONDS]
        late += [each for each, start in stalled.items() if now - start > WRITE_STALL_TIMEOUT_SECONDS]
        for connection in late:
            connection.transport.abort()
        server.should_exit = server.should_exit or service.error is not None
        if server.should_exit:
            service.drain()
        await asyncio.sleep(SWEEP_SECONDS)


def run_server(service: HttpService, sock: socket.socket, ready: Callable[[], object]) -> None:
    """Serves at a bound socket until a signal has come and accepted questions are answered.

    `ready` is called when clients can connect. Raises the error that has ended the service, if any.
    """

    async def serve() -> None:
        sock.listen()  # from now on who connects waits to be let in
        ready()
        await serve_until_ended(create_server(service), service, sock)

    # uvicorn raises the signal again at its end: it has done its work by then.
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        uvloop.run(serve())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if service.error is not None:
        raise service.error
