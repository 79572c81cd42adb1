"""Sparse retrieval: BM25 by bm25s, its index built once and mapped from disk."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import bm25s
import numba
import numpy as np
from bm25s.numba import retrieve_utils

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError
from dlm_rag.files.build_once import build_once, make_folder_name
from dlm_rag.files.paths import get_cache_folder
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.retrieval.base import CorpusRetriever, Ranking
from dlm_rag.retrieval.bm25_build import (
    BM25_B,
    BM25_K1,
    ROWS,
    SCORES,
    STARTS,
    WORDS,
    build_bm25_index,
    extract_terms,
    hash_words,
)
from dlm_rag.retrieval.composite import MultiQueryRetriever
from dlm_rag.retrieval.corpus import Corpus
from dlm_rag.retrieval.query import Query

log = logging.getLogger(__name__)

# A part of the folder's name; another text makes every index be built again.
INDEX_FORM = "hashed words, pairs of letters"


def _enable_numba_cache(function: Any) -> None:
    """Lets numba keep the machine code of a jitted function: the next process starts 5 seconds sooner.

    numba's own places come first (beside the source, the user's cache folder), then the folder of our
    indexes. Raises `ConfigError` where compiling is switched off: numba and numpy sort equal scores
    differently.
    """
    config: Any = numba.config  # its settings are made when it is imported
    if config.DISABLE_JIT:
        raise ConfigError("unset NUMBA_DISABLE_JIT: uncompiled search orders equal scores differently")
    for folder in (config.CACHE_DIR, config.CACHE_DIR or str(get_cache_folder() / "numba")):
        config.CACHE_DIR = folder
        with suppress(RuntimeError):  # no place can be written
            function.enable_caching()
            return
    log.warning("every start takes seconds longer: set NUMBA_CACHE_DIR to a folder that can be written")


_enable_numba_cache(retrieve_utils._retrieve_internal_jitted_serial)


class BM25Retriever(CorpusRetriever):
    """BM25 in Lucene's form (k1 1.5, b 0.75); all scores are computed when the index is built.

    Ties are broken by bm25s's heap, a fixed function of the scores and the depth, as in the published
    traces: equal scores are not in corpus order, and the best 7 need not begin with the best 3. A passage
    that shares no term with the query has score 0 and is not ranked.
    """

    def __init__(self, corpus: Corpus, top_k: int) -> None:
        super().__init__(corpus, top_k)
        folder = build_once(
            corpus.folder / make_folder_name("bm25", bm25s.__version__, INDEX_FORM),
            lambda scratch: build_bm25_index(corpus, scratch),
            resumable=True,
        )
        # Mapped, but as plain arrays: a memmap is slow at single numbers.
        names = (WORDS, STARTS, ROWS, SCORES)
        arrays = (np.asarray(np.load(folder / name, mmap_mode="r")) for name in names)
        self._words, starts, rows, scores = arrays
        self._index = bm25s.BM25(BM25_K1, BM25_B, method="lucene", backend="numba")
        self._index.scores = {"data": scores, "indices": rows, "indptr": starts, "num_docs": len(corpus)}
        self._index.nonoccurrence_array = None
        self._index.unique_token_ids_set = range(len(self._words))
        self._search_ids([[0]], 1)  # loads the compiled search, so that the first question need not wait

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        return [list(scores) for scores in self.rank_scored(queries, depth)]

    def rank_scored(self, queries: Sequence[Query], depth: int) -> list[dict[int, float]]:
        with profile_stage("retrieve/search"):
            asked = [self.find_word_ids(extract_terms(query.text)) for query in queries]
            found = iter(self._search_ids([ids for ids in asked if ids], min(depth, len(self.corpus))))
            return [next(found) if ids else {} for ids in asked]

    def find_word_ids(self, terms: Sequence[str]) -> list[int]:
        """The ids of those terms that the corpus has, in order, repeated ones kept."""
        hashes = hash_words(terms)
        ids = np.searchsorted(self._words, hashes).clip(max=len(self._words) - 1)
        return ids[self._words[ids] == hashes].tolist()

    def _search_ids(self, asked: list[list[int]], depth: int) -> list[dict[int, float]]:
        if not asked:
            return []
        results = self._index.retrieve(
            asked, k=depth, n_threads=1, show_progress=False, backend_selection="numba"
        )
        return [
            {row: score for row, score in zip(rows, scores, strict=True) if score > 0}
            for rows, scores in zip(results.documents.tolist(), results.scores.tolist(), strict=True)
        ]


def open_bm25_retriever(config: RetrievalConfig, corpus: Corpus) -> CorpusRetriever:
    """BM25 by whole queries, or by `Query.parts` in turn."""
    retriever = BM25Retriever(corpus, config.top_k)
    return MultiQueryRetriever(retriever) if config.bm25_query == "sentences" else retriever
