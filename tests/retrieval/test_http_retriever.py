"""Search over HTTP: the same trajectories as with a local search, and what becomes of a run without."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from types import SimpleNamespace

import httpx
import pytest

from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.cli import run_program
from dlm_rag.commands import sample
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER
from dlm_rag.commands.serve import get_socket_url
from dlm_rag.config import DecodeConfig, RetrievalConfig, ServingConfig
from dlm_rag.errors import ConfigError, CorpusError
from dlm_rag.questions import read_questions
from dlm_rag.retrieval import http_retriever, retry
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.hybrid import HybridRetriever
from dlm_rag.retrieval.query import Query
from dlm_rag.retrieval.retry import SearchUnavailableError
from dlm_rag.serving import http_server
from dlm_rag.serving.middleware import ApiError
from dlm_rag.serving.search_app import MAX_SEARCH_REQUEST_BYTES, SEARCH_PATH, SearchService
from tests.support.decoding import rollout_records
from tests.support.passages import write_jsonl_file
from tests.support.paths import ROOT
from tests.support.retrievers import list_passage_ids, make_letter_retriever, make_query
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser


@contextmanager
def serving(service, port=0):
    """A server in a thread of this process; gives its URL."""
    with socket.create_server(("127.0.0.1", port)) as sock:
        served = http_server.create_server(service)
        service.served = served
        thread = threading.Thread(target=lambda: asyncio.run(served.serve([sock])))
        thread.start()
        try:
            yield f"{get_socket_url(sock)}{SEARCH_PATH}"
        finally:
            served.should_exit = True
            thread.join()
            service.close()


@pytest.fixture
def local(corpus_file):
    return load_retriever(corpus_file, top_k=3)


@pytest.fixture
def url(local):
    with serving(SearchService(local, RetrievalConfig(top_k=3))) as found:
        yield found


def post(url, body, path="/retrieve", **headers):
    """Status and answer of one request."""
    host, port = url.split("/")[2].split(":")
    connection = HTTPConnection(host, int(port), timeout=60)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, data, headers)
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


# The same as a local search.


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["none", "pipeline"])
def test_the_shipped_model_takes_the_same_steps_over_http_as_over_a_local_search(overlap):
    local = load_retriever(SHIPPED_FOLDER / "world" / "corpus.jsonl", top_k=7)
    questions = read_questions(str(SHIPPED_FOLDER / "world" / "questions.jsonl"))[::25]
    denoiser = Denoiser.from_pretrained(SHIPPED_FOLDER / "model")
    tokenizer = Tokenizer.from_pretrained(SHIPPED_FOLDER / "model")
    settings = DecodeConfig(batch_size=8, overlap=overlap)
    with serving(SearchService(local, RetrievalConfig())) as url:
        there = Decoder(denoiser, load_retriever(url=url, top_k=7), tokenizer, settings).decode(questions)
    here = Decoder(denoiser, local, tokenizer, settings).decode(questions)
    assert len(here) == 16 and not any(rollout.error for rollout in there)
    assert rollout_records(there) == rollout_records(here)


QUERIES = [
    make_query("Where was Jane Austen born?"),
    make_query("a novel", "a novel", "Frank Herbert"),
    make_query("the of"),
    make_query(""),
]


@pytest.mark.parametrize("kind", ["bm25", "dense", "hybrid"])
@pytest.mark.parametrize("top_k", [1, 3, 5, 9])
def test_every_kind_finds_the_same_passages_in_the_same_order(corpus_file, kind, top_k):
    sparse = load_retriever(corpus_file, top_k=top_k)
    dense = make_letter_retriever(sparse.corpus, top_k)
    both = HybridRetriever([sparse, dense], top_k, fusion_depth=4)
    local = {"bm25": sparse, "dense": dense, "hybrid": both}[kind]
    with serving(SearchService(local, RetrievalConfig(method=kind, top_k=2))) as url:
        remote = load_retriever(url=url, top_k=top_k)
        found, expected = remote.search(QUERIES), local.search(QUERIES)
        asked = [*QUERIES, Query("a novel", ("a", "novel")), Query("novel a", QUERIES[1].parts)]
    same = [[one.key(a) == one.key(b) for a in asked for b in asked] for one in (remote, local)]
    assert same[0] == same[1], "so nothing is asked again that a local search would not"
    assert list_passage_ids(found) == list_passage_ids(expected) and any(list_passage_ids(found))
    assert [[p.text for p in passages] for passages in found] == [
        [p.text for p in passages] for passages in expected
    ]


def test_texts_arrive_as_a_local_corpus_has_them_whatever_title_and_contents_are(tmp_path):
    forms = [
        (t, c)
        for t in ("", "T", " T ", "A\nB", '"T"')
        for c in ("T", "T\nx", '"T"\nx', " T \nx", "T\nT\nx")
    ]
    lines = [{"id": n, "title": t, "contents": f"{c} red"} for n, (t, c) in enumerate(forms)]
    local = load_retriever(write_jsonl_file(tmp_path / "c.jsonl", lines), top_k=len(forms))
    with serving(SearchService(local, RetrievalConfig())) as url:
        (found,) = load_retriever(url=url, top_k=len(forms)).search([make_query("red")])
    assert {p.id: p.text for p in found} == {p.id: p.text for p in local.corpus}


def test_a_passage_that_recurs_is_kept_once(url):
    retriever = load_retriever(url=url, top_k=3)
    (first,), (second,) = (
        retriever.search([make_query("Tacoma")]),
        retriever.search([make_query("Herbert Tacoma")]),
    )
    assert first[0] is next(p for p in second if p.id == first[0].id)


# What is no answer.


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"


def document(**fields):
    return {"result": [[{"document": {"id": "a", "contents": "x"} | fields, "score": 1.0}]]}


BAD_ANSWERS = {
    "not JSON": (b"<html>", "it answers no search: the answer is not JSON"),
    "no object": ([], "'result' is not a list of lists"),
    "no result": ({"results": []}, "'result' is not a list of lists"),
    "fewer results": ({"result": []}, "it gives 0 results for 1 queries"),
    "documents without lists": ({"result": [{"contents": "x"}]}, "'result' is not a list of lists"),
    "a number": ({"result": [[3]]}, "a document that is not an object"),
    "no contents": ({"result": [[{"document": {"id": "a"}}]]}, "the passage has no 'contents'"),
    "contents of numbers": (document(contents=3), "'contents' must be a text"),
    "an id of a list": (document(id=[]), "must be a text"),
    "a title of a list": (document(title=[]), "'title' must be a text"),
    "half a character": (b'{"result": [[{"id": "a", "contents": "\\ud800"}]]}', "a lone surrogate"),
    "one id for two": (
        {"result": [[{"id": "a", "contents": "x"}, {"id": "a", "contents": "y"}]]},
        "two passages with the id 'a'",
    ),
}


NO_PASSAGES = SimpleNamespace(query_fields=("text",), fingerprint="none", corpus=())


class Canned(SearchService):
    """Says what it is told to; `status` is that of a refusal."""

    def __init__(self, said, status=0):
        super().__init__(NO_PASSAGES, RetrievalConfig())
        self.said, self.status = said, status

    def answer(self, body):
        if self.status:
            raise ApiError(self.status, self.said)
        return self.said


@pytest.mark.parametrize("what", BAD_ANSWERS)
def test_an_answer_that_is_none_is_an_error_and_never_fewer_passages(what):
    answer, says = BAD_ANSWERS[what]
    if isinstance(answer, bytes):
        service = speaking(HEAD.replace(b"100", b"%d" % len(answer)) + answer)
    else:
        service = serving(Canned(answer))
    with service as url, pytest.raises(ConfigError, match=f"cannot be searched: .*{says}"):
        load_retriever(url=url)


@pytest.mark.parametrize("status", [301, 400, 404, 500, 503])
def test_a_status_that_is_no_success_is_told_with_its_reason(status):
    with serving(Canned("go away", status)) as url, pytest.raises(ConfigError, match=f"{status} .*go away"):
        load_retriever(url=url)


def test_the_path_must_be_that_of_a_search(url):
    with pytest.raises(ConfigError, match="HTTP status 404 .*/retrieve"):
        load_retriever(url=url.replace("/retrieve", "/search"))


def test_an_answer_may_be_too_large(url, monkeypatch):
    monkeypatch.setattr(http_retriever, "MAX_RESPONSE_BYTES", 20)
    with pytest.raises(ConfigError, match="its answer has more than 0 MiB"):
        load_retriever(url=url)


@contextmanager
def speaking(*parts, wait=0.0):
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


@pytest.mark.parametrize(
    ("parts", "wait", "says"),
    [
        ((b"SSH-2.0-OpenSSH_9.2\r\n",), 0.0, "illegal status line|disconnected"),
        ((), 0.0, "disconnected"),
        ((HEAD, b'{"result": '), 0.0, "closed connection"),
        ((HEAD, b"x"), 9.0, "no answer within 0.2 s"),
        ((HEAD, *[b"x"] * 99), 0.04, "no answer within 0.2 s"),
        ([bytes([byte]) for byte in HEAD], 0.04, "no answer within 0.2 s"),
        ((HEAD.replace(b"1.1", b"1.0"), *[b"x"] * 99), 0.04, "no answer within 0.2 s"),
    ],
    ids=[
        "another protocol",
        "closed",
        "cut off",
        "nothing",
        "a trickle",
        "a trickle of the head",
        "a trickle to its end",
    ],
)
def test_a_deadline_holds_whatever_the_service_does(parts, wait, says):
    with speaking(*parts, wait=wait) as url, pytest.raises(ConfigError, match=says):
        load_retriever(url=url, timeout=0.6)


def test_documents_come_in_the_forms_that_servers_give():
    whole = Passage("7", "", '"Emma"\nEmma is a novel.')
    assert (
        http_retriever.parse_document({"document": {"id": 7, "contents": whole.contents}, "score": 1})
        == whole
    )
    assert http_retriever.parse_document({"id": "7", "contents": whole.contents}) == whole, "without scores"
    assert (
        http_retriever.parse_document({"id": "7", "title": "Emma", "text": "A novel."}).text
        == "Emma\nA novel."
    )
    three = {"title": 'A "B', "text": "x", "contents": 'A "B"\nx'}  # as theirs are over Lucene
    assert http_retriever.parse_document(three).text == three["contents"]
    bare = [http_retriever.parse_document({"document": {"contents": text}}) for text in ("x", "y", "x")]
    assert bare[0] == bare[2] and bare[0].id != bare[1].id and bare[0].text == "x"


def test_a_service_of_others_is_known_by_its_url_and_told_no_parts():
    asked = []

    class Foreign(Canned):
        def answer(self, body):
            asked.append(json.loads(body))
            return {"result": [[{"id": "a", "contents": "x"}, {"id": "b", "contents": "y"}]]}

    with serving(Foreign(None)) as url:
        retriever = load_retriever(url=url, top_k=1)
        query = Query("q one", ("q", "one"))
        assert list_passage_ids(retriever.search([query])) == [["a"]], (
            "one that gives more than asked for is cut"
        )
        assert retriever.fingerprint == url and retriever.key(query) == ("q one",)
    assert asked[1] == {"queries": ["q one"], "topk": 1, "return_scores": True}


# The server.


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "the body is not JSON"),
        (b"\xff", "the body is not UTF-8"),
        ([], "must be a JSON object"),
        ({}, "'queries"),
        ({"queries": "Emma"}, "'queries"),
        ({"queries": [3]}, "'queries"),
        ({"queries": ["x"] * 4097}, "4096"),
        ({"queries": ["x"], "topk": 1001}, "'topk'"),
        ({"queries": ["x"], "topk": -1}, "'topk'"),
        ({"queries": ["x"], "topk": True}, "'topk'"),
        ({"queries": ["x"], "topk": "3"}, "'topk'"),
        ({"queries": ["x"], "return_scores": "yes"}, "'return_scores'"),
        ({"queries": ["x"], "parts": [["x"], ["y"]]}, "'parts' must be a list of texts for each query"),
        ({"queries": ["x"], "parts": ["x"]}, "'parts"),
    ],
)
def test_a_wrong_body_is_answered_in_a_sentence(url, body, says):
    status, answer = post(url, body)
    assert status == 400 and says in answer["error"]["message"]


def test_other_paths_other_lengths(url):
    assert post(url, {}, "/search")[0] == 404 and post(url, None, "/retrieve")[0] == 405
    assert post(url, None, "/favicon.ico")[0] == 404
    too_long = json.dumps({"queries": ["x" * MAX_SEARCH_REQUEST_BYTES]})
    assert httpx.post(url, content=too_long).status_code == 413


def test_what_is_searched_is_said(url, local):
    status, about = post(url, None, "/")
    assert status == 200 and (about["passages"], about["kind"], about["topk"]) == (5, "bm25", 3)
    assert about["dlm_rag"]["fingerprint"] == load_retriever(url=url).fingerprint != local.fingerprint


def test_scores_are_those_of_the_index_and_depth_is_that_of_the_request(url, local):
    asked = {"queries": ["Jane Austen novel", "zzz"], "topk": 2, "return_scores": True}
    _, answer = post(url, asked)
    (found, nothing), (expected, _) = (
        answer["result"],
        local.rank_scored([make_query(t) for t in asked["queries"]], 2),
    )
    assert [item["score"] for item in found] == list(expected.values()) and nothing == []
    assert found[0]["score"] > found[1]["score"] > 0
    _, plain = post(url, {"queries": asked["queries"]})
    assert [d["id"] for d in plain["result"][0]][:2] == [item["document"]["id"] for item in found]
    assert len(plain["result"][0]) == 3, "the depth of the server where none is asked for"


def test_a_ranking_without_scores_says_the_reciprocal_rank(corpus):
    assert [
        list(s.values()) for s in make_letter_retriever(corpus, 3).rank_scored([make_query("Dune")], 3)
    ] == [[1, 1 / 2, 1 / 3]]


def test_what_the_server_searches_and_how_is_its_fingerprint(local, corpus_file, tmp_path):
    other = load_retriever(write_jsonl_file(tmp_path / "o.jsonl", [{"id": 1, "contents": "x"}]), top_k=1)
    described = [
        (local, RetrievalConfig()),
        (local, RetrievalConfig(method="dense")),
        (other, RetrievalConfig()),
    ]
    said = [SearchService(*pair).describe_service()["dlm_rag"]["fingerprint"] for pair in described]
    assert len({*said}) == 3
    again = SearchService(local, RetrievalConfig(corpus="elsewhere", top_k=9))
    assert again.describe_service()["dlm_rag"]["fingerprint"] == said[0], (
        "neither its path nor a depth changes it"
    )


def test_clients_that_say_nothing_or_half_of_it_keep_nobody_waiting(url):
    host, port = url.split("/")[2].split(":")
    halves = [b"", b"POST /retr", b"POST /retrieve HTTP/1.1\r\nContent-Length: 50\r\n\r\n{"]
    open_ones = [socket.create_connection((host, int(port))) for _ in range(20) for _ in halves]
    for number, connection in enumerate(open_ones):
        connection.sendall(halves[number % 3])
    assert list_passage_ids(load_retriever(url=url, top_k=1).search([make_query("Tacoma")])) == [
        ["herbert"]
    ]
    for connection in open_ones:
        connection.close()


def test_pages_of_other_sites_may_not_search(url):
    """As `serve` has it: a name that leads here later, or a page of another origin."""
    asked = {"queries": ["Tacoma"]}
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        assert post(url, asked, **headers)[0] == 403 and post(url, None, "/", **headers)[0] == 403
    host = url.split("/")[2]
    assert post(url, asked, Origin=f"http://{host}")[0] == 200


def test_connections_are_bounded_and_cost_no_thread(local):
    before = threading.active_count()
    service = SearchService(local, RetrievalConfig(), ServingConfig(max_connections=30))
    with serving(service) as url:
        host, port = url.split("/")[2].split(":")
        held = [socket.create_connection((host, int(port)), timeout=20) for _ in range(60)]
        assert [b" 503 " in one.recv(2**12) for one in held[30:]] == [True] * 30
        assert threading.active_count() <= before + 1, "that of the server"
        for one in held[:30]:
            one.close()
        while service.connections():  # until it has seen that they are gone
            time.sleep(0.01)
        assert post(url, {"queries": ["Tacoma"]})[0] == 200


def test_a_corpus_that_has_changed_ends_the_server(local, corpus_file):
    """No search of it can be right any more; new times alone end nothing."""
    service, asked = SearchService(local, RetrievalConfig()), {"queries": ["Tacoma"]}
    with serving(service) as url:
        os.utime(corpus_file, ns=(0, 1))
        assert post(url, asked)[0] == 200 and service.error is None
        corpus_file.write_text(corpus_file.read_text() + "\n")
        assert post(url, asked)[0] == 500 and isinstance(service.error, CorpusError)
        assert post(url, asked)[0] == 503


def test_a_search_that_fails_in_the_server_is_an_error_of_the_client(url, corpus_file):
    retriever = load_retriever(url=url, top_k=1)
    corpus_file.write_text(corpus_file.read_text() + "\n")
    with pytest.raises(SearchUnavailableError, match="500 .*has changed while it was in use"):
        retriever.search([make_query("Tacoma")])


# A run.


@pytest.fixture
def model(tmp_path):
    tiny_denoiser().save_pretrained(tmp_path / "model", eos_token_id=257)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def answer(monkeypatch, capsys, model, tmp_path):
    """Answers six questions into a file: exit code, what is said, the records without their times."""
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


class Troubled(SearchService):
    """A server that answers some searches, and does to all others what `trouble` does."""

    def __init__(self, retriever, config, healthy, trouble):
        super().__init__(retriever, config)
        self.healthy, self.trouble, self.over = healthy, trouble, threading.Event()

    def answer(self, body):
        self.healthy -= 1
        found = super().answer(body)
        return found if self.healthy >= 0 else self.trouble(self, found)


def dies(searches, found):
    for connection in [*searches.served.server_state.connections]:
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


@pytest.mark.parametrize("overlap", ["none", "pipeline"])
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
def test_trouble_in_mid_run_is_an_error_of_rows_and_the_run_goes_on_from_there(
    answer, local, corpus_file, trouble, overlap, caplog, monkeypatch
):
    monkeypatch.setattr(retry, "INITIAL_BACKOFF_SECONDS", 1000.0)  # nothing is tried again
    expected = answer("--corpus", str(corpus_file), out="local.jsonl")[2]
    config = RetrievalConfig(top_k=3)
    troubled = Troubled(local, config, 8, trouble)
    settings = [f"decode.overlap={overlap}", f"retrieval.timeout={0.6 if trouble is hangs else 60}"]
    with serving(troubled) as url:
        port = int(url.split(":")[2].split("/")[0])
        code, err, found = answer(f"retrieval.url={url}", *settings)
        troubled.over.set()
    failed = {name: line["error"] for name, line in found.items() if line.get("error")}
    assert code == 1 and failed and all(re.search(TROUBLES[trouble], error) for error in failed.values())
    assert trouble is breaks or not any(record.exc_info for record in caplog.records), "no tracebacks"
    with serving(SearchService(local, config), port) as url:
        settings[1] = "retrieval.timeout=60"
        code, err, found = answer(f"retrieval.url={url}", *settings)
    assert code == 0 and f"{6 - len(failed)} of 6 questions are answered already" in err
    assert found == expected


def test_a_passing_trouble_costs_nothing(answer, local, corpus_file):
    expected = answer("--corpus", str(corpus_file), out="local.jsonl")[2]

    def once(searches, found):
        searches.healthy = 5
        raise ApiError(503, "come back later")

    with serving(Troubled(local, RetrievalConfig(top_k=3), 3, once)) as url:
        code, _, found = answer(f"retrieval.url={url}")
    assert code == 0 and found == expected


def test_answers_of_another_service_are_not_gone_on_with(answer, local, url, corpus_file, tmp_path):
    assert answer(f"retrieval.url={url}")[0] == 0
    with serving(SearchService(local, RetrievalConfig())) as same:
        assert answer(f"retrieval.url={same}")[0] == 0, "at another port, the same"
    other = load_retriever(write_jsonl_file(tmp_path / "o.jsonl", [{"id": 1, "contents": "Emma"}]), top_k=1)
    with serving(SearchService(other, RetrievalConfig())) as elsewhere:
        code, err, _ = answer(f"retrieval.url={elsewhere}")
    assert code == 2 and "holds answers with corpus=" in err
    code, err, _ = answer("--corpus", str(corpus_file))
    assert code == 2 and "holds answers with corpus=" in err


def test_a_service_that_becomes_another_in_mid_run_ends_the_run(answer, local, tmp_path):
    other = load_retriever(write_jsonl_file(tmp_path / "o.jsonl", [{"id": 1, "contents": "Emma"}]), top_k=1)
    new = SearchService(other, RetrievalConfig())

    def becomes_another(searches, found):
        return found | {"dlm_rag": new.describe_service()["dlm_rag"]}

    with serving(Troubled(local, RetrievalConfig(top_k=3), 5, becomes_another)) as url:
        code, err, _ = answer(f"retrieval.url={url}")
    assert code == 2 and "searches other passages than when this run began" in err


@pytest.mark.parametrize("out", [[], ["--out", "answers.jsonl"]], ids=["on the screen", "into a file"])
def test_a_dead_service_is_found_before_torch_is_imported(tmp_path, out):
    """In a fresh process, for what is not known there is not imported; `evaluate` plans as `--out` does."""
    words = ["dlm-rag", "sample", "Who?", "retrieval.url=http://127.0.0.1:1/retrieve", *out]
    script = f"""
import sys
sys.argv = {words!r}
from dlm_rag.__main__ import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "cannot be searched: Connection refused" in done.stderr and not list(tmp_path.iterdir())


# The program.


@pytest.fixture
def program(corpus_file):
    """Starts the program at a port of its own, again and again; gives the process once it serves."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "dlm_rag", "retrieve-server", "--corpus", str(corpus_file)]
    command += ["--port", port, "retrieval.top_k=3"]
    begun = []

    def begin():
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True,
            # Ctrl-C is ignored where the tests themselves run in the background of a shell.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        begun.append(process)
        line = begun[-1].stderr.readline()
        assert f"5 passages, by bm25, are searched at {begin.url}" in line
        return begun[-1]

    begin.url, begin.command = f"http://127.0.0.1:{port}/retrieve", command
    yield begin
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_the_program_serves_until_it_is_told_to_end(program, sent):
    begun = program()
    retriever = load_retriever(url=program.url, top_k=1)
    assert list_passage_ids(retriever.search([make_query("Tacoma")])) == [["herbert"]]
    second = subprocess.run(program.command, cwd=ROOT, capture_output=True, text=True)
    assert second.returncode == 2
    assert "cannot be listened at (Address already in use)" in second.stderr
    begun.send_signal(sent)
    assert begun.communicate(timeout=120)[1].splitlines()[-1] == "ended" and begun.returncode == 0


@pytest.mark.slow
def test_the_program_ends_when_its_corpus_has_changed(program, corpus_file):
    begun = program()
    corpus_file.write_text(corpus_file.read_text().replace("Tacoma", "Seattle"))
    assert post(program.url, {"queries": ["Tacoma"]})[0] == 500
    said = begun.communicate(timeout=120)[1].splitlines()
    assert begun.returncode == 2 and len(said) == 1 and str(corpus_file) in said[0]


@pytest.mark.slow
def test_a_server_that_is_killed_or_stopped_again_and_again_costs_no_answer(
    program, answer, corpus_file, tmp_path
):
    """Each time once at least two questions more are answered; `EXAMPLES` says how often."""
    times = int(os.environ.get("EXAMPLES", 4))
    asked = [{"id": f"n{n}", "question": f"Who wrote book {n} of {n % 7}?"} for n in range(40 + 8 * times)]
    path, out = write_jsonl_file(tmp_path / "many.jsonl", asked), tmp_path / "answers.jsonl"
    expected = answer("--corpus", str(corpus_file), out="local.jsonl", questions=path)[2]

    def answered():
        lines = out.read_text().splitlines() if out.is_file() else []
        return sum('"error"' not in line for line in lines)

    def harm(process, sent, count):
        while answered() < count and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(sent)

    failures = 0
    for number in range(times):
        process, sent = program(), (signal.SIGKILL, signal.SIGSTOP)[number % 2]
        watch = threading.Thread(target=harm, args=(process, sent, answered() + 2))
        watch.start()
        code, err, found = answer(f"retrieval.url={program.url}", "retrieval.timeout=3", questions=path)
        failures += sum("error" in line for line in found.values())
        process.kill()
        watch.join()
        assert code == 1 and "Traceback" not in err and len(found) == len(asked)
    assert failures >= times
    program()
    code, _, found = answer(f"retrieval.url={program.url}", questions=path)
    assert code == 0 and found == expected
