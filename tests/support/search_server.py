"""Search over HTTP: a server in this process, servers that say whatever a test wants, and requests."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager
from http.client import HTTPConnection
from types import SimpleNamespace

from dlm_rag.commands.serve import get_socket_url
from dlm_rag.config import RetrievalConfig
from dlm_rag.serving import http_server
from dlm_rag.serving.middleware import ApiError
from dlm_rag.serving.search_app import SEARCH_PATH, SearchService

NO_PASSAGES = SimpleNamespace(query_fields=("text",), fingerprint="none", corpus=())


@contextmanager
def serve_search(service, port=0):
    """A server in a thread of this process; gives its URL."""
    with socket.create_server(("127.0.0.1", port)) as sock:
        served = http_server.create_server(service)
        service.served = served
        ended = http_server.serve_until_ended(served, service, sock)
        thread = threading.Thread(target=lambda: asyncio.run(ended))
        thread.start()
        try:
            yield f"{get_socket_url(sock)}{SEARCH_PATH}"
        finally:
            served.should_exit = True
            thread.join()


def post(url, body, path="/retrieve", **headers):
    """Status and answer of one request; a GET where there is no body."""
    connection = HTTPConnection(url.split("/")[2], timeout=60)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, data, headers)
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


class CannedService(SearchService):
    """Says what it is told to; `status` is that of a refusal. `asked` has what it was sent."""

    def __init__(self, said, status=0):
        super().__init__(NO_PASSAGES, RetrievalConfig())
        self.said, self.status, self.asked = said, status, []

    def answer(self, body):
        self.asked.append(json.loads(body))
        if self.status:
            raise ApiError(self.status, self.said)
        return self.said


@contextmanager
def speak_bytes(*parts, wait=0.0):
    """A service that reads a request, says each of `parts` after a wait, and closes; gives its URL."""
    listening = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def speak():
        while not over.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                try:
                    for part in parts:
                        over.wait(wait)
                        connection.sendall(part)
                    connection.shutdown(socket.SHUT_WR)
                    over.wait()  # closed before all was read it would be reset
                except OSError:
                    pass

    thread = threading.Thread(target=speak)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/retrieve"
    finally:
        over.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()
