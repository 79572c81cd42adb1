"""Search over HTTP: what a local search finds, what becomes of the token, deadlines and repetitions."""

import json
import logging
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER
from dlm_rag.config import DecodeConfig, RetrievalConfig
from dlm_rag.errors import ConfigError
from dlm_rag.questions import read_questions
from dlm_rag.retrieval import http
from dlm_rag.retrieval.base import HybridRetriever, Query, SearchUnavailableError
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.http import RetryableFailure, call_with_retries, parse_document
from dlm_rag.serving.http_server import SearchService
from tests.support.decoding import rollout_records
from tests.support.passages import write_jsonl_file
from tests.support.retrievers import list_passage_ids, make_letter_retriever, make_query
from tests.support.search_server import CannedService, serve_search

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


def test_a_token_goes_to_the_service_and_nowhere_else(monkeypatch, caplog):
    """Not into errors, even where the service repeats it, nor into logs, nor to where it is sent on."""
    caplog.set_level(logging.DEBUG)
    with running() as service, running() as elsewhere:
        service.token, url = SECRET, f"http://127.0.0.1:{service.port}/retrieve"
        with pytest.raises(ConfigError, match="HTTP status 401 .*DLM_RAG_RETRIEVAL_TOKEN .* not set"):
            load_retriever(url=url)
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
    with pytest.raises(ConfigError, match="DLM_RAG_RETRIEVAL_TOKEN must be a bearer token") as error:
        load_retriever(url="http://127.0.0.1:1/retrieve")
    assert token not in str(error.value)


@pytest.mark.slow
def test_the_shipped_model_takes_the_same_steps_over_http_as_over_a_local_search():
    local = load_retriever(SHIPPED_FOLDER / "world" / "corpus.jsonl", top_k=7)
    questions = read_questions(str(SHIPPED_FOLDER / "world" / "questions.jsonl"))[::25]
    denoiser = Denoiser.from_pretrained(SHIPPED_FOLDER / "model")
    tokenizer = Tokenizer.from_pretrained(SHIPPED_FOLDER / "model")
    settings = DecodeConfig(batch_size=8, overlap="pipeline")
    with serve_search(SearchService(local, RetrievalConfig())) as url:
        there = Decoder(denoiser, load_retriever(url=url, top_k=7), tokenizer, settings).decode(questions)
    here = Decoder(denoiser, local, tokenizer, settings).decode(questions)
    assert len(here) == 16 and not any(rollout.error for rollout in there)
    assert rollout_records(there) == rollout_records(here)


QUERIES = [make_query("Where was Jane Austen born?"), make_query("a novel", "a novel", "Frank Herbert")]
QUERIES += [make_query("the of"), make_query("")]


@pytest.mark.parametrize("kind", ["bm25", "dense", "hybrid"])
@pytest.mark.parametrize("top_k", [1, 5, 9])
def test_every_kind_finds_the_same_passages_in_the_same_order(corpus_file, kind, top_k):
    sparse = load_retriever(corpus_file, top_k=top_k)
    dense = make_letter_retriever(sparse.corpus, top_k)
    both = HybridRetriever([sparse, dense], top_k, fusion_depth=4)
    local = {"bm25": sparse, "dense": dense, "hybrid": both}[kind]
    with serve_search(SearchService(local, RetrievalConfig(method=kind, top_k=2))) as url:
        remote = load_retriever(url=url, top_k=top_k)
        found, expected = remote.search(QUERIES), local.search(QUERIES)
        asked = [*QUERIES, Query("a novel", ("a", "novel")), Query("novel a", QUERIES[1].parts)]
    same = [[one.key(a) == one.key(b) for a in asked for b in asked] for one in (remote, local)]
    assert same[0] == same[1], "so nothing is asked again that a local search would not"
    texts = [[[(p.id, p.text) for p in passages] for passages in each] for each in (found, expected)]
    assert texts[0] == texts[1] and any(texts[0])


def test_texts_arrive_as_a_local_corpus_has_them_whatever_title_and_contents_are(tmp_path):
    titles = ("", "T", " T ", "A\nB", '"T"')
    forms = [(t, c) for t in titles for c in ("T", "T\nx", '"T"\nx', " T \nx", "T\nT\nx")]
    lines = [{"id": n, "title": t, "contents": f"{c} red"} for n, (t, c) in enumerate(forms)]
    local = load_retriever(write_jsonl_file(tmp_path / "c.jsonl", lines), top_k=len(forms))
    with serve_search(SearchService(local, RetrievalConfig())) as url:
        (found,) = load_retriever(url=url, top_k=len(forms)).search([make_query("red")])
    assert {p.id: p.text for p in found} == {p.id: p.text for p in local.corpus}


def document(**fields):
    return {"result": [[{"document": {"id": "a", "contents": "x"} | fields, "score": 1.0}]]}


def test_documents_come_in_the_forms_that_servers_give():
    parse = parse_document
    whole = Passage("7", "", '"Emma"\nEmma is a novel.')
    assert parse({"document": {"id": 7, "contents": whole.contents}, "score": 1}) == whole
    assert parse({"id": "7", "contents": whole.contents}) == whole, "without scores"
    assert parse({"id": "7", "title": "Emma", "text": "A novel."}).text == "Emma\nA novel."
    three = {"title": 'A "B', "text": "x", "contents": 'A "B"\nx'}  # as theirs are over Lucene
    assert parse(three).text == three["contents"]
    bare = [parse({"document": {"contents": text}}) for text in ("x", "y", "x")]
    assert bare[0] == bare[2] and bare[0].id != bare[1].id and bare[0].text == "x"


def test_a_service_of_others_is_known_by_its_url_and_is_sent_no_parts():
    foreign = CannedService({"result": [[{"id": "a", "contents": "x"}, {"id": "b", "contents": "y"}]]})
    with serve_search(foreign) as url:
        retriever = load_retriever(url=url, top_k=1)
        query = Query("q one", ("q", "one"))
        found = list_passage_ids(retriever.search([query]))
        assert found == [["a"]], "one that gives more than asked for is cut"
        assert retriever.fingerprint == url and retriever.key(query) == ("q one",)
    assert foreign.asked[1] == {"queries": ["q one"], "topk": 1, "return_scores": True}


class TimedService:
    """A service and the clock: it gives `replies`, none before `back`, and every attempt takes `takes`."""

    def __init__(self):
        self.replies, self.back, self.takes = [], 0.0, 0.0
        self.given, self.waited, self.now = [], [], 0.0

    def ask(self, seconds):
        self.given.append(seconds)
        self.now += min(self.takes, seconds)
        reply = (
            self.replies.pop(0) if self.replies and self.now >= self.back else RetryableFailure("refused")
        )
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def sleep(self, seconds):
        self.waited.append(seconds)
        self.now += seconds

    def monotonic(self):
        return self.now


@pytest.fixture
def service(monkeypatch):
    found = TimedService()
    monkeypatch.setattr(http, "time", found)
    monkeypatch.setattr(http, "_draw_jitter", lambda: 0.5)
    return found


def call(service):
    return call_with_retries("http://x", 15.0, service.ask)


def test_a_service_that_is_back_before_the_deadline_answers(service):
    service.replies, service.back = ["found"], 12.0
    assert call(service) == "found"
    assert len(service.given) > 3 and 12.0 <= service.now <= 15.0


@pytest.mark.parametrize("takes", [0.0, 2.0, 60.0])
@pytest.mark.parametrize("chance", [0.0, 0.99])
def test_a_call_ends_by_its_deadline_and_waits_double(service, monkeypatch, takes, chance):
    monkeypatch.setattr(http, "_draw_jitter", lambda: chance)
    service.takes = takes
    with pytest.raises(SearchUnavailableError, match="^http://x: refused$"):
        call(service)
    assert 10.0 <= service.now <= 15.0 + 1e-9
    assert max(service.given) == 5.0 and min(service.given) >= 2.5, "none is over before it can be answered"
    jitter, longest = 0.5 + chance, http.MAX_BACKOFF_SECONDS
    expected = [min(0.1 * 2**n, longest) * jitter for n in range(len(service.waited))]
    assert service.waited == pytest.approx(expected)


def test_other_errors_are_raised_at_once(service):
    service.replies = [KeyError("no such field")]
    with pytest.raises(KeyError):
        call(service)
    assert len(service.given) == 1 and not service.waited
