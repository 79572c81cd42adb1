"""Sparse retrieval: BM25 by bm25s, its index built once and mapped from disk."""

import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # bm25s starts JAX, which reserves most of a GPU's memory
import bm25s
import numba
import numpy as np
from bm25s.numba import retrieve_utils
from bm25s.stopwords import STOPWORDS_EN

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError
from dlm_rag.files.paths import get_cache_folder
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.progress import show_status, track_progress
from dlm_rag.retrieval.base import CorpusRetriever, Ranking
from dlm_rag.retrieval.build_once import build_once, make_folder_name
from dlm_rag.retrieval.composite import MultiQueryRetriever
from dlm_rag.retrieval.corpus import Corpus
from dlm_rag.retrieval.query import Query

log = logging.getLogger(__name__)

INDEX_ARRAYS = ("data", "indices", "indptr")
INDEX_FORM = "columns.json"  # a part of the folder's name; another text makes every index be built again
# The rule of bm25s: lower case, runs of two or more word characters, English stop words left out.
_find_words = re.compile(r"(?u)\b\w\w+\b").findall
_STOP_WORDS = frozenset(STOPWORDS_EN)


def extract_terms(text: str) -> list[str]:
    """The BM25 terms of a text, in order, repeated ones kept."""
    return [word for word in _find_words(text.lower()) if word not in _STOP_WORDS]


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

    Ties are broken by bm25s's heap, a fixed function of the scores in corpus order, as in the
    published traces. A passage that shares no term with the query has score 0 and is not ranked.
    """

    def __init__(self, corpus: Corpus, top_k: int) -> None:
        super().__init__(corpus, top_k)
        folder = build_once(
            corpus.folder / make_folder_name("bm25", bm25s.__version__, INDEX_FORM),
            lambda scratch: _build_bm25_index(corpus, scratch),
        )
        self._index = bm25s.BM25.load(folder, mmap=True, show_progress=False, backend="numba")
        # As plain arrays: a memmap is slow at single numbers.
        self._index.scores |= {name: np.asarray(self._index.scores[name]) for name in INDEX_ARRAYS}
        self._search_ids([[0]], 1)  # loads the compiled search, so that the first question need not wait

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        return [list(scores) for scores in self.rank_scored(queries, depth)]

    def rank_scored(self, queries: Sequence[Query], depth: int) -> list[dict[int, float]]:
        with profile_stage("retrieve/search"):
            asked = [self._index.get_tokens_ids(extract_terms(query.text)) for query in queries]
            found = iter(self._search_ids([ids for ids in asked if ids], min(depth, len(self.corpus))))
            return [next(found) if ids else {} for ids in asked]

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


def _build_bm25_index(corpus: Corpus, scratch: Path) -> None:
    vocabulary: dict[str, int] = {}
    documents = [
        [vocabulary.setdefault(term, len(vocabulary)) for term in extract_terms(passage.text)]
        for passage in track_progress(corpus, "finding terms")
    ]
    show_status("computing the scores of terms")
    if not vocabulary:  # a corpus of stop words alone; bm25s wants a term, which no query has
        vocabulary, documents = {"": 0}, [[0] for _ in documents]
    index = bm25s.BM25()
    index.index((documents, vocabulary), create_empty_token=False, show_progress=False)
    index.save(scratch, show_progress=False)
    show_status()
