"""The BM25 index that is built as a stream: what bm25s has in memory, whenever a build dies."""

import multiprocessing
import os
import signal
from pathlib import Path

import bm25s
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlm_rag.errors import CorpusError
from dlm_rag.files import build_once
from dlm_rag.retrieval import bm25
from dlm_rag.retrieval.bm25 import BM25Retriever, extract_terms
from dlm_rag.retrieval.corpus import open_corpus
from tests.support.passages import write_jsonl_file
from tests.support.processes import wait_until
from tests.support.properties import hypothesis_settings
from tests.support.retrievers import make_query

FORK = multiprocessing.get_context("fork")
PASSAGES = 24
LINES = [
    {"id": n, "contents": f"word{n % 7} word{n % 3} " * (1 + n % 5) + f"own{n}"} for n in range(PASSAGES)
]


@pytest.fixture
def small_parts(monkeypatch):
    """Shards of 3 passages, buckets of 5 postings, 3 processes."""
    monkeypatch.setattr(bm25, "SHARD_PASSAGES", 3)
    monkeypatch.setattr(bm25, "BUCKET_POSTINGS", 5)
    monkeypatch.setattr(bm25, "count_workers", lambda items: min(items, 3))


@pytest.fixture
def corpus(tmp_path):
    return open_corpus(write_jsonl_file(tmp_path / "corpus.jsonl", LINES), tmp_path / "indexes")


def read_index(corpus):
    (folder,) = (path for path in corpus.folder.glob("bm25-*") if path.is_dir())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rank_by_bm25s(texts, query, depth):
    """Rows and scores by bm25s's own index, built in memory."""
    index = bm25s.BM25(backend="numba")
    documents = [extract_terms(text) for text in texts]
    vocabulary = {term: n for n, term in enumerate(dict.fromkeys(t for terms in documents for t in terms))}
    asked = [vocabulary[term] for term in extract_terms(query) if term in vocabulary]
    if not asked:
        return []
    index.index(([[vocabulary[t] for t in terms] for terms in documents], vocabulary), show_progress=False)
    rows, scores = index.retrieve([asked], k=min(depth, len(texts)), n_threads=1, show_progress=False)
    pairs = zip(rows[0].tolist(), scores[0].tolist(), strict=True)
    return [(row, score) for row, score in pairs if score > 0]


WORDS = [*"emma dune the of zoë straße ñandú x it's Istanbul a1".split(), "\ud83d\ude00"]
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map(" ".join)


# Of other scripts, points and hidden characters the terms are ours (`split_terms`).
LATIN = st.text(st.characters(max_codepoint=0x24F, exclude_characters="\xadİ"), min_size=1).filter(
    str.strip
)


@hypothesis_settings(25)
@given(
    st.lists(st.one_of(TEXTS, st.just("emma dune"), LATIN), min_size=1),
    st.lists(TEXTS, min_size=1, max_size=4),
    st.integers(1, 9),
)
def test_rankings_and_scores_are_those_of_bm25s(tmp_path_factory, texts, queries, shard):
    """Also of many equals, of passages without a term, of a corpus without one; in parts of any size."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [{"id": n, "contents": text} for n, text in enumerate(texts)]
    corpus = open_corpus(write_jsonl_file(folder / "corpus.jsonl", lines), folder / "indexes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bm25, "SHARD_PASSAGES", shard)
        patch.setattr(bm25, "BUCKET_POSTINGS", shard)
        patch.setattr(bm25, "count_workers", lambda items: 1)
        retriever = BM25Retriever(corpus, 7)
    texts = [passage.text for passage in corpus]
    for query in (*queries, texts[0]):
        for depth in (1, 3, len(texts)):
            found = retriever.rank_scored([make_query(query)], depth)[0]
            assert list(found.items()) == rank_by_bm25s(texts, query, depth), (query, depth)


def test_long_passages_and_words_that_are_often_repeated(tmp_path, small_parts, monkeypatch):
    """Counts of one, two and four bytes, in rows of a corpus that is too large for cutting."""
    monkeypatch.setattr("dlm_rag.retrieval.corpus.MAX_CUT_CORPUS_BYTES", 0)
    texts = ["emma dune", "emma " * 300 + "dune", "dune " * 70_000 + "emma", "emma"]
    lines = [{"id": n, "contents": text} for n, text in enumerate(texts)]
    retriever = BM25Retriever(open_corpus(write_jsonl_file(tmp_path / "c.jsonl", lines), tmp_path), 7)
    for query in ("emma", "dune", "emma dune"):
        found = retriever.rank_scored([make_query(query)], 4)[0]
        assert list(found.items()) == rank_by_bm25s(texts, query, 4)


def test_parts_of_any_size_and_any_number_of_processes_give_the_same_bytes(corpus, monkeypatch):
    BM25Retriever(corpus, 7)
    whole = read_index(corpus)
    for shard, bucket, workers in ((1, 9, 1), (3, 5, 3), (7, 1000, 2)):
        for path in corpus.folder.glob("bm25-*/*"):
            path.unlink()
        monkeypatch.setattr(bm25, "SHARD_PASSAGES", shard)
        monkeypatch.setattr(bm25, "BUCKET_POSTINGS", bucket)
        monkeypatch.setattr(bm25, "count_workers", lambda items, n=workers: min(items, n))
        BM25Retriever(corpus, 7)
        assert read_index(corpus) == whole


def is_running(pid):
    """A process that has ended and is not yet waited for has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def kill_in_counting(monkeypatch, kill):
    count = bm25._count_words
    monkeypatch.setattr(
        bm25, "_count_words", lambda *given: count(*given) if given[-1].start < 12 else kill()
    )


def kill_in_writing(monkeypatch, kill):
    write = bm25._write_bucket

    def write_some(*args):
        return write(*args) if args[-1][0] < 10 else kill()

    monkeypatch.setattr(bm25, "_write_bucket", write_some)


@pytest.mark.slow
@pytest.mark.parametrize(("die", "at_least"), [(kill_in_counting, 2), (kill_in_writing, 8)])
def test_a_build_that_was_killed_goes_on_and_gives_the_same_bytes(
    corpus, tmp_path, monkeypatch, small_parts, die, at_least
):
    """at_least: of the 8 shards, those that need not be counted again."""
    workers = tmp_path / "workers"
    count = bm25._count_words

    def note_and_count(corpus, *given):
        with workers.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return count(corpus, *given)

    monkeypatch.setattr(bm25, "_count_words", note_and_count)

    def build_and_die():
        builder = os.getpid()
        die(monkeypatch, lambda: os.kill(builder, signal.SIGKILL))
        BM25Retriever(corpus, 7)

    process = FORK.Process(target=build_and_die)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    pids = set(workers.read_text().split())
    assert len(pids) > 1 and str(process.pid) not in pids
    wait_until(lambda: not any(map(is_running, pids)), seconds=30)
    assert not [path for path in corpus.folder.glob("bm25-*") if path.suffix not in (".building", ".lock")]
    workers.write_text("")
    BM25Retriever(corpus, 7)
    assert len(workers.read_text().split()) <= 8 - at_least
    resumed = read_index(corpus)
    assert build_once.PARTS_FOLDER not in resumed
    for path in corpus.folder.glob("bm25-*/*"):
        path.unlink()
    BM25Retriever(corpus, 7)
    assert read_index(corpus) == resumed and len(resumed) == 6


def test_a_worker_that_is_killed_is_no_endless_wait(corpus, monkeypatch, small_parts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bm25, "_count_words", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(CorpusError, match="killed"):
            BM25Retriever(corpus, 7)
    assert list(BM25Retriever(corpus, 7).rank_scored([make_query("own17")], 3)[0]) == [17]


def test_a_corpus_that_changes_meanwhile_leaves_no_shard(corpus, small_parts):
    count = bm25._count_words

    def change_and_count(corpus, *given):
        corpus.path.write_bytes(corpus.path.read_bytes().replace(b"own", b"new"))
        return count(corpus, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bm25, "_count_words", change_and_count)
        with pytest.raises(CorpusError, match="has changed"):
            BM25Retriever(corpus, 7)
    assert not list(corpus.folder.glob(f"*.building/{build_once.PARTS_FOLDER}/*/{build_once.DIGESTS_FILE}"))
