"""The server of a corpus: its protocol, its limits, the program, and runs whose server is in trouble."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from dlm_rag import load_retriever
from dlm_rag.cli import run_program
from dlm_rag.commands import sample
from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import CorpusError
from dlm_rag.retrieval import http
from dlm_rag.retrieval.base import SearchUnavailableError
from dlm_rag.serving import http_server
from dlm_rag.serving.http_server import ApiError, SearchService
from tests.support.passages import write_jsonl_file
from tests.support.paths import ROOT
from tests.support.retrievers import list_passage_ids, make_letter_retriever, make_query
from tests.support.search_server import post, serve_search
from tests.support.serving import find_free_port, start_server_process
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser


@pytest.fixture
def local(corpus_file):
    return load_retriever(corpus_file, top_k=3)


@pytest.fixture
def url(local):
    with serve_search(SearchService(local, RetrievalConfig(top_k=3))) as found:
        yield found


@pytest.fixture
def other(tmp_path):
    """A search in other passages."""
    return load_retriever(write_jsonl_file(tmp_path / "o.jsonl", [{"id": 1, "contents": "Emma"}]), top_k=1)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "the body is not JSON"),
        ({}, "'queries"),
        ({"queries": ["x"] * 4097}, "4096"),
        ({"queries": ["x"], "topk": 1001}, "'topk'"),
        ({"queries": ["x"], "parts": [["x"], ["y"]]}, "'parts' must be a list of texts for each query"),
    ],
)
def test_a_wrong_body_is_answered_in_a_sentence(url, body, says):
    status, answer = post(url, body)
    assert status == 400 and says in answer["error"]["message"]


def test_what_is_searched_is_said_and_whatever_else_is_asked_for_is_refused(url, local):
    status, about = post(url, None, "/")
    assert status == 200 and (about["passages"], about["kind"], about["topk"]) == (5, "bm25", 3)
    assert about["dlm_rag"]["fingerprint"] == load_retriever(url=url).fingerprint != local.fingerprint
    assert post(url, {}, "/search")[0] == 404 and post(url, None, "/retrieve")[0] == 405
    assert post(url, {"queries": ["Tacoma"]}, Host="evil.example")[0] == 403


def test_scores_are_those_of_the_index_and_depth_is_that_of_the_request(url, local, corpus):
    asked = {"queries": ["Jane Austen novel", "zzz"], "top_k": 2, "return_scores": True}
    found, nothing = post(url, asked)[1]["result"]
    expected, _ = local.rank_scored([make_query(text) for text in asked["queries"]], 2)
    assert [item["score"] for item in found] == list(expected.values()) and nothing == []
    assert found[0]["score"] > found[1]["score"] > 0
    plain = post(url, {"queries": asked["queries"]})[1]["result"][0]
    assert [document["id"] for document in plain][:2] == [item["document"]["id"] for item in found]
    assert len(plain) == 3, "the depth of the server where none is asked for"
    (unscored,) = make_letter_retriever(corpus, 3).rank_scored([make_query("Dune")], 3)
    assert [*unscored.values()] == [1, 1 / 2, 1 / 3], "the reciprocal rank"


def test_connections_are_bounded_and_those_that_say_half_of_it_keep_nobody_waiting(local, monkeypatch):
    before, halves = threading.active_count(), [b"", b"POST /retr", b"POST /retrieve HTTP/1.1\r\n\r\n{"]
    service = SearchService(local, RetrievalConfig())
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 30)
    with serve_search(service) as url:
        host, port = url.split("/")[2].split(":")
        held = [socket.create_connection((host, int(port)), timeout=20) for _ in range(30)]
        time.sleep(0.5)  # until they have been looked at: who comes later is one too many
        held += [socket.create_connection((host, int(port)), timeout=20) for _ in range(30)]
        assert [b" 503 " in one.recv(2**12) for one in held[30:]] == [True] * 30
        assert threading.active_count() <= before + 1, "that of the server"
        held[0].close()
        for number, one in enumerate(held[1:30]):
            one.sendall(halves[number % 3])
        while len(service.connections) > 29:  # until it has seen that one is gone
            time.sleep(0.01)
        assert post(url, {"queries": ["Tacoma"]})[0] == 200
        for one in held[1:30]:
            one.close()


def test_a_corpus_that_has_changed_ends_the_server(local, corpus_file):
    """No search of it can be right any more; new times alone end nothing."""
    service, asked = SearchService(local, RetrievalConfig()), {"queries": ["Tacoma"]}
    with serve_search(service) as url:
        retriever = load_retriever(url=url, top_k=1)
        os.utime(corpus_file, ns=(0, 1))
        assert post(url, asked)[0] == 200 and service.error is None
        corpus_file.write_text(corpus_file.read_text() + "\n")
        with pytest.raises(SearchUnavailableError, match="500 .*has changed while it was in use"):
            retriever.search([make_query("Tacoma")])
        assert isinstance(service.error, CorpusError)
        with suppress(ConnectionError):  # of a server that has ended already
            assert post(url, asked)[0] == 503


# A run.


@pytest.fixture
def answer(monkeypatch, capsys, tmp_path):
    """Answers six questions into a file: exit code, what is said, the records without their times."""
    model = tmp_path / "model"
    tiny_denoiser().save_pretrained(model, eos_token_id=257)
    byte_tokenizer().save_pretrained(model)
    asked = [
        {"id": f"n{n}", "question": f"Who wrote {w}?"} for n, w in enumerate("Emma Dune a b c d".split())
    ]
    six = write_jsonl_file(tmp_path / "questions.jsonl", asked)

    def invoke(*words, out="answers.jsonl", questions=six):
        given = ["--questions", questions, "--out", tmp_path / out, "--model", model]
        given += ["decode.max_new_tokens=8", "decode.batch_size=2", "retrieval.top_k=3"]
        monkeypatch.setattr(sys, "argv", ["sample.py", *map(str, given), *words])
        with pytest.raises(SystemExit) as stop:
            run_program(sample.main)
        lines = (tmp_path / out).read_text().splitlines() if (tmp_path / out).is_file() else []
        found = {line["id"]: line for line in map(json.loads, lines)}
        assert len(found) == len(lines), "nothing twice"
        for line in found.values():
            line.pop("seconds", None)
        return stop.value.code, capsys.readouterr().err, found

    return invoke


class TroubledService(SearchService):
    """A server that answers some searches, and does to all others what `trouble` does."""

    def __init__(self, retriever, config, healthy, trouble):
        super().__init__(retriever, config)
        self.healthy, self.trouble, self.over = healthy, trouble, threading.Event()

    def answer(self, body):
        self.healthy -= 1
        found = super().answer(body)
        return found if self.healthy >= 0 else self.trouble(self, found)


def dies(searches, found):
    for connection in [*searches.connections]:
        connection.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    return found


def hangs(searches, found):
    searches.over.wait(60)
    return found


def is_busy(searches, found):
    raise ApiError(503, "come back later")


def talks_nonsense(searches, found):
    return {"result": [[] for _ in found["result"]][1:]}


def breaks(searches, found):
    raise RuntimeError("the disk is gone")


TROUBLES = {  # with what the error of a question says
    dies: "disconnected",
    hangs: "no answer within",
    is_busy: "503 .*come back later",
    talks_nonsense: "results for",
    breaks: "500 .*the disk is gone",
}


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
def test_trouble_in_mid_run_is_an_error_of_rows_and_the_run_is_resumed_from_there(
    answer, local, corpus_file, trouble, caplog, monkeypatch
):
    monkeypatch.setattr(http, "INITIAL_BACKOFF_SECONDS", 1000.0)  # nothing is tried again
    expected = answer("--corpus", str(corpus_file), out="local.jsonl")[2]
    config = RetrievalConfig(top_k=3)
    troubled = TroubledService(local, config, 8, trouble)
    settings = ["decode.overlap=pipeline", f"retrieval.timeout={0.6 if trouble is hangs else 60}"]
    with serve_search(troubled) as url:
        port = int(url.split(":")[2].split("/")[0])
        code, err, found = answer(f"retrieval.url={url}", *settings)
        troubled.over.set()
    failed = {name: line["error"] for name, line in found.items() if line.get("error")}
    assert code == 1 and failed and all(re.search(TROUBLES[trouble], error) for error in failed.values())
    assert trouble is breaks or not any(record.exc_info for record in caplog.records), "no tracebacks"
    with serve_search(SearchService(local, config), port) as url:
        settings[1] = "retrieval.timeout=60"
        code, err, found = answer(f"retrieval.url={url}", *settings)
    assert code == 0 and f"{6 - len(failed)} of 6 questions are answered already" in err
    assert found == expected


def test_answers_of_another_service_are_not_mixed(answer, local, url, other, corpus_file):
    assert answer(f"retrieval.url={url}")[0] == 0
    with serve_search(SearchService(local, RetrievalConfig())) as same:
        assert answer(f"retrieval.url={same}")[0] == 0, "at another port, the same"
    for searched, config in (other, RetrievalConfig()), (local, RetrievalConfig(min_score_ratio=0.9)):
        with serve_search(SearchService(searched, config)) as elsewhere:
            code, err, _ = answer(f"retrieval.url={elsewhere}")
        assert code == 2 and "holds answers with corpus=" in err
    code, err, _ = answer("--corpus", str(corpus_file))
    assert code == 2 and "holds answers with corpus=" in err


@pytest.mark.slow
def test_the_program_serves_until_a_signal_ends_it(corpus_file):
    words = ("--corpus", str(corpus_file), "retrieval.top_k=3")
    with start_server_process(ROOT, find_free_port(), *words, command="retrieve-server") as process:
        said = "5 passages, by bm25, are searched at (http://127.0.0.1:[0-9]+/retrieve);"
        url = re.search(said, process.ready)[1]
        retriever = load_retriever(url=url, top_k=1)
        assert list_passage_ids(retriever.search([make_query("Tacoma")])) == [["herbert"]]
        second = subprocess.run(process.args, cwd=ROOT, capture_output=True, text=True)
        assert second.returncode == 2
        assert "(Address already in use)" in second.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        process.reading.join()
        assert process.said[-1] == "ended\n"
