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
from dlm_rag.serving.http_server import SEARCH_PATH, SearchService

NO_PASSAGES = SimpleNamespace(query_fields=("text",), fingerprint="none", corpus=())


@contextmanager
def serve_search(service, port=0):
    """A server in a thread of this process; gives its URL."""
    with socket.create_server(("127.0.0.1", port)) as sock:
        served = http_server.HttpServer(service)
        thread = threading.Thread(target=lambda: asyncio.run(served.serve([sock])))
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
    """Says what it is told to; `asked` has what it was sent."""

    def __init__(self, said):
        super().__init__(NO_PASSAGES, RetrievalConfig())
        self.said, self.asked = said, []

    def answer(self, body):
        self.asked.append(json.loads(body))
        return self.said
