"""BM25 scores as sparse vectors: those of bm25s to the bit, whatever is in the text, in little memory."""

import weakref
from collections import Counter
from pathlib import Path

import bm25s
import numpy as np
import pytest
from conftest import PASSAGES, ROOT, SHARED, examples
from hypothesis import given
from hypothesis import strategies as st

from dlm_rag.retrieval import scores
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.retrieval.scores import NO_WORD, count_words, terms, word_counts, word_id

WORLD = ROOT / "dlm_rag" / "shipped" / "world" / "corpus.jsonl"
REAL = [SHARED / "real" / name / "corpus.jsonl" for name in ("hotpotqa", "2wikimultihopqa")]
TEXTS = [f"{title}\n{text}" for _, title, text in PASSAGES]


def by_bm25s(texts: list[str]) -> list[dict[str, float]]:
    """word -> score of every passage, as bm25s computes them."""
    vocabulary: dict[str, int] = {}
    tokens = [[vocabulary.setdefault(word, len(vocabulary)) for word in terms(text)] for text in texts]
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
    words = {word for text in texts for word in terms(text)}
    owners = Counter(map(word_id, words))
    shared = {word for word in words if owners[word_id(word)] > 1}
    assert len(shared) <= 2 * max(1, len(words) ** 2 / 2**32), "more words with one id than chance gives"
    statistics = count_words(texts)
    for text, ours in zip(texts, expected, strict=True):
        vector = statistics.vector(text)
        assert set(vector) == {word_id(word) for word in ours} or (not ours and vector == {NO_WORD: 1.0})
        wrong = {word for word, score in ours.items() if vector[word_id(word)] != score}
        assert wrong <= shared


@pytest.mark.parametrize(
    "path",
    [WORLD, pytest.param(REAL[0], marks=pytest.mark.slow), pytest.param(REAL[1], marks=pytest.mark.slow)],
)
def test_scores_are_those_of_bm25s_to_the_bit(path: Path):
    if not path.is_file():
        pytest.skip("the reference data is not here (set DLM_RAG_SHARED)")
    check([passage.text for passage in open_corpus(path)])


@examples(60)
@given(st.lists(st.text(st.sampled_from("ab c\ndé1_ 'the ").map(str), max_size=60), min_size=1, max_size=8))
def test_scores_of_any_texts(texts):
    if any(map(terms, texts)):
        check(texts)


def test_a_passage_of_stop_words_has_a_word_that_no_query_holds():
    statistics = count_words([*TEXTS, "it is as it was"])
    assert statistics.vector("it is as it was") == {NO_WORD: 1.0}
    assert statistics.passages == len(TEXTS) + 1, "it counts in the average length"
    assert word_counts("it is as it was") == {}
    everything = count_words(["the", "is it"])
    assert (everything.words, len(everything.ids)) == (0, 0)
    assert everything.vector("the") == {NO_WORD: 1.0}


def test_a_query_has_counts():
    assert word_counts("Emma, emma and the Dune") == {word_id("emma"): 2.0, word_id("dune"): 1.0}


def test_ids_are_the_same_everywhere_and_such_as_engines_take():
    assert [word_id("emma"), word_id("\ud800")] == [683174123, 552637667], "a stored collection holds them"
    assert all(0 < word_id(f"w{n}") < NO_WORD for n in range(2000))


def test_two_words_of_one_id_count_as_one(monkeypatch):
    """As if 'emma' and 'dune' were one word in all passages and queries; nothing else changes."""
    plain = word_id.__wrapped__
    monkeypatch.setattr(scores, "word_id", lambda word: plain("emma" if word == "dune" else word))
    merged = count_words(TEXTS)
    written = [text.replace("Dune", "Emma").replace("dune", "emma") for text in TEXTS]
    vectors = [merged.vector(text) for text in TEXTS]
    assert word_counts("Dune by Emma") == {plain("emma"): 2.0}
    monkeypatch.undo()
    other = count_words(written)
    assert vectors == [other.vector(text) for text in written]


@pytest.mark.parametrize("size", [1, 7, 40])
def test_counting_in_small_parts_changes_nothing(size, monkeypatch):
    """A buffer that is smaller than a passage has words, too."""
    whole = count_words(TEXTS)
    monkeypatch.setattr(scores, "_BUFFER", size)
    parts = count_words(TEXTS)
    assert np.array_equal(parts.ids, whole.ids) and np.array_equal(parts.weights, whole.weights)
    assert (np.diff(parts.ids.astype(np.int64)) > 0).all()


def test_passages_are_read_one_by_one():
    """The pass keeps no text but the one it is at."""

    class Text(str):
        pass

    earlier: list[weakref.ref] = []

    def texts():
        for number in range(5):
            assert not any(text() for text in earlier[:-1])
            text = Text(f"passage number{number}")
            earlier.append(weakref.ref(text))
            yield text
            del text

    assert count_words(texts()).passages == 5
