"""The client of a search by HTTP alone: what becomes of its token."""

import json
import logging
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dlm_rag import load_retriever
from dlm_rag.errors import ConfigError
from dlm_rag.retrieval import http
from dlm_rag.retrieval.base import SearchUnavailableError
from tests.support.retrievers import list_passage_ids, make_query

SECRET = "sk-0123456789abcdef"


class Service(ThreadingHTTPServer):
    """Finds one passage for each query, for whoever brings `token` where there is one."""

    daemon_threads, request_queue_size = True, 64
    token, moved, connections = "", "", 0

    def get_request(self):
        self.connections += 1
        return super().get_request()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        given = self.headers.get("Authorization", "")
        if self.server.moved:
            return self.say(307, {}, self.server.moved)
        if self.server.token and given != f"Bearer {self.server.token}":
            return self.say(401, {"error": f"not allowed with {given!r}"})
        return self.say(200, {"result": [[{"id": "a", "contents": "x"}] for _ in body["queries"]]})

    def say(self, status, value, location=""):
        self.send_response(status)
        data = json.dumps(value).encode()
        self.send_header("Content-Length", str(len(data)))
        if location:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def running():
    """A service with its `port`."""
    with Service(("127.0.0.1", 0), Handler) as service:
        service.port = service.server_address[1]
        thread = threading.Thread(target=service.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield service
        finally:
            service.shutdown()
            thread.join()


def found_at(url, **settings):
    return list_passage_ids(
        load_retriever(url=url, **settings).search([make_query("Who?"), make_query("Where?")])
    )


def test_a_token_goes_to_the_service_and_nowhere_else(monkeypatch, caplog):
    """Not into errors, even where the service repeats it, nor into logs, nor to where it is sent on."""
    caplog.set_level(logging.DEBUG)
    with running() as service, running() as elsewhere:
        service.token, url = SECRET, f"http://127.0.0.1:{service.port}/retrieve"
        with pytest.raises(ConfigError, match="HTTP status 401 .*DLM_RAG_RETRIEVAL_TOKEN .* not set"):
            found_at(url)
        monkeypatch.setenv(http.RETRIEVAL_TOKEN_VARIABLE, f"{SECRET}\n")
        retriever = load_retriever(url=url)
        assert list_passage_ids(retriever.search([make_query("Who?")])) == [["a"]]
        service.token = "another"
        with pytest.raises(SearchUnavailableError, match="401 .*not its key") as refused:
            retriever.search([make_query("Who?")])
        service.moved = f"http://127.0.0.1:{elsewhere.port}/retrieve"
        with pytest.raises(SearchUnavailableError, match="307"):
            retriever.search([make_query("Who?")])
        assert not elsewhere.connections
    assert SECRET not in f"{refused.value!r}{caplog.text}{retriever._client._client.headers!r}"


@pytest.mark.parametrize("token", ["line\nbreak", "schlüssel"])
def test_what_is_no_token_is_refused_before_anything_is_sent(monkeypatch, token):
    monkeypatch.setenv(http.RETRIEVAL_TOKEN_VARIABLE, token)
    with pytest.raises(ConfigError, match="DLM_RAG_RETRIEVAL_TOKEN .* is not a bearer token") as error:
        load_retriever(url="http://127.0.0.1:1/retrieve")
    assert token not in str(error.value)
