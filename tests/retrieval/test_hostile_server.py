"""Answers of a hostile or broken server: one sentence in bounded time and memory, never a traceback."""

import gzip
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from dlm_rag.baselines import run as baselines_run
from dlm_rag.baselines.run import ChatClient, ChatError
from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError
from dlm_rag.retrieval import http
from dlm_rag.retrieval.http import HttpRetriever

REPLY = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": {}}


@contextmanager
def serve(*parts, pause=0.0, endless=False):
    """A server of raw bytes, at most those parts for each connection; gives its URL."""
    listener, over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def answer(connection):
        with connection:
            connection.recv(1 << 16)
            try:
                for part in parts:
                    connection.sendall(part)
                    over.wait(pause)
                while endless and not over.is_set():
                    connection.sendall(parts[-1])
                    over.wait(pause)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(2)
                while connection.recv(1 << 16):
                    pass
            except OSError:
                pass

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        over.set()
        listener.close()


def reply(body: bytes, *headers: str, status="200 OK", length=None) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(baselines_run, "INITIAL_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(baselines_run, "REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(baselines_run, "ATTEMPTS", 1)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def open_client(url):
    return ChatClient("setting", f"{url.replace('http', 'openai')}/tiny", "DLM_RAG_TEST_KEY")


def ask(url, **body):
    begin = time.monotonic()
    with pytest.raises(ChatError) as failed:
        open_client(url).ask({"messages": []} | body)
    assert time.monotonic() - begin < 3
    said = str(failed.value)
    assert "\n" not in said and "\x1b" not in said and len(said) < 600
    return said


def search(url):
    begin = time.monotonic()
    with pytest.raises(ConfigError) as failed:
        HttpRetriever(RetrievalConfig(url=url, timeout=3.0))
    assert time.monotonic() - begin < 3
    return str(failed.value)


@pytest.mark.parametrize("head", [b"", reply(b"", length=10**6)], ids=["headers", "body"])
def test_what_drips_ends_at_the_deadline(head):
    with serve(head, b"X", pause=0.2, endless=True) as url:
        assert "no answer within" in ask(url)
        assert "no answer within" in search(url)


def test_blanks_without_end_are_cut(monkeypatch):
    monkeypatch.setattr(http, "MAX_RESPONSE_BYTES", 2**20)
    with serve(reply(b"", length=2**40), b" " * 2**16, endless=True) as url:
        assert "its answer has more than 1 MiB" in ask(url)
        assert "its answer has more than 1 MiB" in search(url)


@pytest.mark.parametrize("coding", ["gzip", "br"])
def test_nothing_is_unpacked(coding):
    bomb = gzip.compress(gzip.compress(bytes(10**7)))
    with serve(reply(bomb, f"Content-Encoding: {coding}")) as url:
        assert "compressed, which was not asked for" in ask(url)
        assert "compressed, which was not asked for" in search(url)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"\xff\xfe", b'{"a":' * 10**5, b"9" * 5000, b"{}", b'{"choices": [7]}',
        b'{"choices": [{"message": {"content": "\\ud800"}}]}', b'{"choices": [], "choices": []}',
        b'{"choices": [{"message": {"content": 7}}]}',
    ],
)  # fmt: skip
def test_an_answer_of_another_form_is_a_sentence(body):
    with serve(reply(body)) as url:
        assert "an answer of another form" in ask(url)
        assert "it answers no search" in search(url)
        with pytest.raises(ConfigError, match="does not list its models"):
            open_client(url).check_model()


@pytest.mark.parametrize("count", [10**400, -1, "7", True])
def test_a_count_of_tokens_that_is_none_is_not_known(count):
    answer = REPLY | {"usage": {"prompt_tokens": count, "completion_tokens": 3}, "odd": {"": [None]}}
    with serve(reply(json.dumps(answer).encode())) as url:
        found = open_client(url).ask({"messages": [{"role": "user", "content": "\ud800"}]})
    assert (found.prompt_tokens, found.response_tokens) == (None, 3)


@pytest.mark.parametrize("status", ["400 Bad", "301 Moved", "204 No"])
@pytest.mark.parametrize("body", [b"\x1b[31m" * 10**5, b"\xff"])
def test_a_refusal_is_shown_without_control_characters(status, body):
    with serve(reply(body, status=status)) as url:
        assert "HTTP status" in ask(url) or status.startswith("204")
        said = search(url)
        assert "\x1b" not in said and len(said) < 600


@pytest.mark.parametrize("proxy", ["http://[::1", "ftp://a", "x y", "http://a:99999"])
def test_odd_proxies_are_a_sentence(monkeypatch, proxy):
    monkeypatch.delenv("no_proxy")
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, proxy)
    with pytest.raises((ConfigError, ChatError)) as failed:
        open_client("http://127.0.0.1:1/v1").ask({"messages": []})
    assert "\n" not in str(failed.value) and len(str(failed.value)) < 600


@pytest.mark.parametrize("url", ["http://" + "a" * 300 + "/v1", "http://xn--/v1"])
def test_odd_hosts_are_a_sentence(url):
    ask(url)
