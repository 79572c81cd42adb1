"""BM25 scores of passages as sparse vectors: an engine with inner products needs no BM25 of its own.

Engines count words by shard or segment (milvus-lite's BM25 function, too): their rankings depend on how
passages were spread. These scores are those of `bm25.py`, to the bit, of the whole corpus: asked with the
words of a query and their counts, any engine gives the same ones.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from blake3 import blake3

from dlm_rag.retrieval.bm25_build import BM25_B, BM25_K1, extract_terms

SPARSE_VECTOR_VERSION = 1  # raise it when words, their ids or scores become others

SparseVector = dict[int, float]  # word id -> a float32

# Engines take ids from 0 to 2^32 - 2, some of them not 0, and no vector that is empty.
EMPTY_PASSAGE_WORD_ID = 2**32 - 2  # the one word of a passage that has none; no query holds it
_MAX_WORD_ID = 2**32 - 3  # 1 to this
_MAX_CACHED_WORD_IDS = 1 << 17  # words whose ids are kept: 50 MB, and nearly every word of a text


@lru_cache(_MAX_CACHED_WORD_IDS)
def hash_word(word: str) -> int:
    """The id of a word, its hash: an engine needs no vocabulary.

    Two words with one id, about one pair of 100,000 words, count as one word in passages and queries.
    """
    return 1 + int.from_bytes(blake3(word.encode(errors="surrogatepass")).digest(8)) % _MAX_WORD_ID


def count_query_words(text: str) -> SparseVector:
    """How often a query has each word; empty where it has none."""
    return {word: float(count) for word, count in Counter(map(hash_word, extract_terms(text))).items()}


@dataclass(frozen=True)
class CorpusStatistics:
    """What scores depend on besides the passage: the passages of a corpus, their words, who has which."""

    passages: int
    words: int  # of all passages together, repeated ones counted
    ids: np.ndarray  # uint32, ascending: of every word that occurs
    idf: np.ndarray  # float32, for each of `ids`: the inverse document frequency in Lucene's form

    def encode_passage(self, text: str) -> SparseVector:
        """The scores of the words of a passage, which must be one of those that were counted.

        Of `EMPTY_PASSAGE_WORD_ID` alone where it has none.
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
    """Counts words, the first pass over a corpus. Memory: some 100 bytes a different word."""
    frequencies: Counter[int] = Counter()
    passages = words = 0
    for text in texts:
        found = [hash_word(word) for word in extract_terms(text)]
        passages, words = passages + 1, words + len(found)
        frequencies.update({*found})
    ids = np.fromiter(frequencies, np.uint32, len(frequencies))
    order = ids.argsort()
    # By math.log, as bm25s: numpy's logarithm may differ in the last bit.
    idf = (math.log(1 + (passages - n + 0.5) / (n + 0.5)) for n in map(float, frequencies.values()))
    return CorpusStatistics(passages, words, ids[order], np.fromiter(idf, np.float32, len(ids))[order])
