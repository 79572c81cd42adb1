"""BM25 scores of passages as sparse vectors: an engine with inner products needs no BM25 of its own.

Engines count words by shard: their rankings depend on how passages were spread. These scores are those of
`bm25.py`, to the bit, of the whole corpus: asked with the words of a query and their counts, any engine
gives the same ones whatever its shards. Two passes over the passages, in the order of the file:

    statistics = compute_corpus_statistics(texts)  # how many passages have each word: 8 bytes a word
    vectors = map(statistics.encode_passage, texts)
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from blake3 import blake3
from bm25s.stopwords import STOPWORDS_EN

# The rule of bm25s: lower case, runs of two or more word characters, English stop words left out.
_TERMS = re.compile(r"(?u)\b\w\w+\b").findall
_STOP_WORDS = frozenset(STOPWORDS_EN)
BM25_K1, BM25_B = 1.5, 0.75
SPARSE_VECTOR_VERSION = 1  # raise it when words, their ids or scores become others

SparseVector = dict[int, float]  # word id -> a float32

# Engines take ids from 0 to 2^32 - 2, some of them not 0, and no vector that is empty.
EMPTY_PASSAGE_WORD_ID = 2**32 - 2  # the one word of a passage that has none; no query holds it
_MAX_WORD_ID = 2**32 - 3  # 1 to this
_COUNT_BUFFER_WORDS = 1 << 22  # word ids that are counted at once
_MAX_CACHED_WORD_IDS = 1 << 17  # words whose ids are kept: 50 MB, and nearly every word of a text


def extract_terms(text: str) -> list[str]:
    """The BM25 terms of a text, in order, repeated ones kept."""
    return [word for word in _TERMS(text.lower()) if word not in _STOP_WORDS]


@lru_cache(_MAX_CACHED_WORD_IDS)
def hash_word(word: str) -> int:
    """The id of a word, its hash: an engine needs no vocabulary.

    Two words may have one id, as does about one pair of 100,000 words: they count as one word, in passages
    and in queries.
    """
    return 1 + int.from_bytes(blake3(word.encode(errors="surrogatepass")).digest(8)) % _MAX_WORD_ID


def count_query_words(text: str) -> SparseVector:
    """What a query is asked with: how often it has each word. Empty where it has none."""
    counts = Counter(map(hash_word, extract_terms(text)))
    return {word: float(count) for word, count in counts.items()}


@dataclass(frozen=True)
class CorpusStatistics:
    """What scores depend on besides the passage: the passages of a corpus, their words, who has which."""

    passages: int
    words: int  # of all passages together, repeated ones counted
    ids: np.ndarray  # uint32, ascending: of every word that occurs
    idf: np.ndarray  # float32, for each of `ids`: the inverse document frequency in Lucene's form

    def encode_passage(self, text: str) -> SparseVector:
        """The scores of the words of a passage; of `EMPTY_PASSAGE_WORD_ID` alone where it has none.

        The text has to be one of those that were counted.
        """
        found = [hash_word(word) for word in extract_terms(text)]
        if not found:
            return {EMPTY_PASSAGE_WORD_ID: 1.0}
        counts = Counter(found)
        ids = np.fromiter(counts, np.uint32, len(counts))
        count = np.fromiter(counts.values(), np.float32, len(counts))
        # In 64 bits, as bm25s has it: its average length is a float64 of numpy, which float32 yields to.
        length = len(found) / (np.float64(self.words) / self.passages)
        saturated = count / (BM25_K1 * ((1 - BM25_B) + BM25_B * length) + count)
        scores = self.idf[np.searchsorted(self.ids, ids)] * saturated
        return dict(zip(counts, scores.astype(np.float32).tolist(), strict=True))


def compute_corpus_statistics(texts: Iterable[str]) -> CorpusStatistics:
    """The first pass. Memory: 8 bytes a different word, twice that as it merges, and some 100 MB."""
    ids, frequencies = np.empty(0, np.uint32), np.empty(0, np.uint32)
    buffer, filled = np.empty(_COUNT_BUFFER_WORDS, np.uint32), 0
    passages = words = 0

    def merge() -> tuple[np.ndarray, np.ndarray]:
        new, counts = np.unique(buffer[:filled], return_counts=True)
        at = np.searchsorted(ids, new)
        known = np.zeros(len(new), bool)
        inside = at < len(ids)
        known[inside] = ids[at[inside]] == new[inside]
        frequencies[at[known]] += counts[known].astype(np.uint32)
        at, new, counts = at[~known], new[~known], counts[~known]
        return np.insert(ids, at, new), np.insert(frequencies, at, counts)

    for text in texts:
        found = [hash_word(word) for word in extract_terms(text)]
        passages, words = passages + 1, words + len(found)
        different = set(found)
        if filled + len(different) > len(buffer):
            ids, frequencies = merge()
            filled = 0
            if len(different) > len(buffer):
                buffer = np.empty(len(different), np.uint32)
        buffer[filled : filled + len(different)] = list(different)
        filled += len(different)
    ids, frequencies = merge()
    weights = np.empty(len(ids), np.float32)
    for start in range(
        0, len(ids), _COUNT_BUFFER_WORDS
    ):  # a logarithm for each number that occurs in so many
        distinct, which = np.unique(frequencies[start : start + _COUNT_BUFFER_WORDS], return_inverse=True)
        weights[start : start + _COUNT_BUFFER_WORDS] = np.array(
            [_compute_idf(int(n), passages) for n in distinct]
        )[which]
    return CorpusStatistics(passages, words, ids, weights)


def _compute_idf(frequency: int, passages: int) -> float:
    """By math.log, as bm25s: numpy's logarithm may differ in the last bit."""
    return math.log(1 + (passages - frequency + 0.5) / (frequency + 0.5))
