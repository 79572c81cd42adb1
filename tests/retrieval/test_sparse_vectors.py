"""BM25 scores as sparse vectors: those of bm25s to the bit, whatever is in the text, in little memory."""

from collections import Counter
from pathlib import Path

import bm25s
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.retrieval.sparse_vectors import (
    EMPTY_PASSAGE_WORD_ID,
    compute_corpus_statistics,
    count_query_words,
    extract_terms,
    hash_word,
)
from tests.support.passages import PASSAGES
from tests.support.paths import ROOT, SHARED
from tests.support.properties import hypothesis_settings

WORLD = ROOT / "dlm_rag" / "shipped" / "world" / "corpus.jsonl"
REAL = SHARED / "real" / "2wikimultihopqa" / "corpus.jsonl"
TEXTS = [f"{title}\n{text}" for _, title, text in PASSAGES]


def by_bm25s(texts: list[str]) -> list[dict[str, float]]:
    """word -> score of every passage, as bm25s computes them."""
    vocabulary: dict[str, int] = {}
    tokens = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in extract_terms(text)] for text in texts
    ]
    index = bm25s.BM25()
    index.index((tokens, vocabulary), create_empty_token=False, show_progress=False)
    found: list[dict[str, float]] = [{} for _ in texts]
    data, rows, starts = (index.scores[name] for name in ("data", "indices", "indptr"))
    for word, column in vocabulary.items():
        for at in range(starts[column], starts[column + 1]):
            found[rows[at]][word] = float(data[at])
    return found


def check(texts: list[str]) -> None:
    """All scores but those of words that share an id are bm25s's, and nothing else is in the vectors."""
    expected = by_bm25s(texts)
    words = {word for text in texts for word in extract_terms(text)}
    owners = Counter(map(hash_word, words))
    shared = {word for word in words if owners[hash_word(word)] > 1}
    assert len(shared) <= 2 * max(1, len(words) ** 2 / 2**32), "more words with one id than chance gives"
    statistics = compute_corpus_statistics(texts)
    for text, ours in zip(texts, expected, strict=True):
        vector = statistics.encode_passage(text)
        assert set(vector) == {hash_word(word) for word in ours} or (
            not ours and vector == {EMPTY_PASSAGE_WORD_ID: 1.0}
        )
        wrong = {word for word, score in ours.items() if vector[hash_word(word)] != score}
        assert wrong <= shared


@pytest.mark.parametrize("path", [WORLD, pytest.param(REAL, marks=pytest.mark.slow)])
def test_scores_are_those_of_bm25s_to_the_bit(path: Path):
    if not path.is_file():
        pytest.skip("the reference data is not here (set DLM_RAG_SHARED)")
    check([passage.text for passage in open_corpus(path)])


@hypothesis_settings(60)
@given(st.lists(st.text(st.sampled_from("ab c\ndé1_ 'the ").map(str), max_size=60), min_size=1, max_size=8))
def test_scores_of_any_texts(texts):
    if any(map(extract_terms, texts)):
        check(texts)


def test_a_passage_of_stop_words_has_a_word_that_no_query_holds():
    statistics = compute_corpus_statistics([*TEXTS, "it is as it was"])
    assert statistics.encode_passage("it is as it was") == {EMPTY_PASSAGE_WORD_ID: 1.0}
    assert statistics.passages == len(TEXTS) + 1, "it counts in the average length"
    assert count_query_words("it is as it was") == {}
    everything = compute_corpus_statistics(["the", "is it"])
    assert (everything.words, len(everything.ids)) == (0, 0)
    assert everything.encode_passage("the") == {EMPTY_PASSAGE_WORD_ID: 1.0}


def test_ids_are_the_same_everywhere_and_such_as_engines_take():
    assert [hash_word("emma"), hash_word("\ud800")] == [683174123, 552637667], (
        "a stored collection holds them"
    )
    emma, dune = hash_word("emma"), hash_word("dune")
    assert count_query_words("Emma, emma and the Dune") == {emma: 2.0, dune: 1.0}
    assert all(0 < hash_word(f"w{n}") < EMPTY_PASSAGE_WORD_ID for n in range(2000))
