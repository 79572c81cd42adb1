"""Search over HTTP: what a local search finds, and what becomes of answers that are none."""

import pytest

from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER
from dlm_rag.config import DecodeConfig, RetrievalConfig
from dlm_rag.questions import read_questions
from dlm_rag.retrieval.base import Query
from dlm_rag.retrieval.composite import HybridRetriever
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.http import parse_document
from dlm_rag.serving.search_app import SearchService
from tests.support.decoding import rollout_records
from tests.support.passages import write_jsonl_file
from tests.support.retrievers import list_passage_ids, make_letter_retriever, make_query
from tests.support.search_server import CannedService, serve_search


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


QUERIES = [
    make_query("Where was Jane Austen born?"),
    make_query("a novel", "a novel", "Frank Herbert"),
    make_query("the of"),
    make_query(""),
]


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
