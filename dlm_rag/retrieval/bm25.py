"""Sparse retrieval: BM25 by bm25s, its index built once and mapped from disk."""

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import bm25s
import numba
import numpy as np
from bm25s.numba import retrieve_utils
from bm25s.stopwords import STOPWORDS_EN

from dlm_rag.errors import ConfigError
from dlm_rag.files.checked_json import read_json_or_empty
from dlm_rag.files.paths import get_cache_folder
from dlm_rag.machine import read_host_memory
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.progress import (
    ANNOUNCE_FROM_SECONDS,
    format_bytes,
    format_duration,
    report_progress,
    show_status,
)
from dlm_rag.retrieval.base import CorpusRetriever, Ranking
from dlm_rag.retrieval.build_once import build_once, load_array, make_folder_name, make_foreign_file_error
from dlm_rag.retrieval.corpus import Corpus
from dlm_rag.retrieval.query import Query

log = logging.getLogger(__name__)

BUILD_ESTIMATE_PASSAGES = 10_000  # passages after which the cost of a build is estimated
# Peak memory and disk per term of a passage, and the time of a build relative to that of finding the terms,
# as measured by `profiling/bench_retrieval.py index`.
BUILD_MEMORY_BYTES_PER_TERM, INDEX_DISK_BYTES_PER_TERM, BUILD_TO_TOKENIZE_RATIO = 45, 8, 2
VOCABULARY_FILE = "vocab.index.json"
INDEX_FORM = "columns.json"  # a part of the folder's name; another text makes every index be built again
# The rule of bm25s: lower case, runs of two or more word characters, English stop words left out.
_find_words = re.compile(r"(?u)\b\w\w+\b").findall
_STOP_WORDS = frozenset(STOPWORDS_EN)


def extract_terms(text: str) -> list[str]:
    """The BM25 terms of a text, in order, repeated ones kept."""
    return [word for word in _find_words(text.lower()) if word not in _STOP_WORDS]


def enable_numba_cache(function: Any) -> None:
    """Lets numba keep the machine code of a jitted function: the next process starts 5 seconds sooner.

    numba's own places come first (beside the source, the user's cache folder), then the folder of our
    indexes. Raises `ConfigError` where compiling is switched off: numba and numpy sort equal scores
    differently.
    """
    config: Any = numba.config  # its settings are made when it is imported
    if config.DISABLE_JIT:
        raise ConfigError(
            "NUMBA_DISABLE_JIT is set in the environment, and uncompiled search orders equal scores "
            "differently: unset it"
        )
    for folder in (config.CACHE_DIR, config.CACHE_DIR or str(get_cache_folder() / "numba")):
        config.CACHE_DIR = folder
        with suppress(RuntimeError):  # no place can be written
            function.enable_caching()
            return
    log.warning(
        "numba has no folder to keep compiled code in, so every start takes seconds longer: set "
        "NUMBA_CACHE_DIR to one that can be written"
    )


enable_numba_cache(retrieve_utils._retrieve_internal_jitted_serial)


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
        self._index = _open_bm25_index(folder, len(corpus))
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


def _open_bm25_index(folder: Path, passages: int) -> bm25s.BM25:
    """The index in a folder. Raises `CorpusError` for one that somebody else made, and not of this corpus:
    the compiled search would follow its numbers out of its own memory.
    """
    paths = {name: folder / f"{name}.csc.index.npy" for name in ("data", "indices", "indptr")}
    scores, rows = load_array(paths["data"], np.float32), load_array(paths["indices"], np.int32)
    starts = load_array(paths["indptr"], np.int64, offsets_into=len(rows))
    # Rows below 0 are too large as well, without their sign.
    if len(rows) != len(scores) or rows.view(np.uint32).max(initial=0) >= passages:
        raise make_foreign_file_error(paths["indices"])
    words = read_json_or_empty(folder / VOCABULARY_FILE)
    if {*map(type, words.values())} != {int} or sorted(words.values()) != [*range(len(starts) - 1)]:
        raise make_foreign_file_error(folder / VOCABULARY_FILE)
    index = bm25s.BM25(backend="numba")  # its own loader takes settings from the folder as well
    index.scores = {"data": scores, "indices": rows, "indptr": starts, "num_docs": passages}
    index.vocab_dict, index.unique_token_ids_set = words, {*words.values()}
    index.nonoccurrence_array = None
    return index


def _build_bm25_index(corpus: Corpus, scratch: Path) -> None:
    vocabulary: dict[str, int] = {}
    documents: list[list[int]] = []
    start = perf_counter()
    with report_progress("finding terms", len(corpus)) as advance:
        for passage in corpus:
            terms = extract_terms(passage.text)
            documents.append([vocabulary.setdefault(term, len(vocabulary)) for term in terms])
            advance(1)
            if len(documents) == BUILD_ESTIMATE_PASSAGES:
                share = len(corpus) / BUILD_ESTIMATE_PASSAGES
                _log_build_estimate(share * (perf_counter() - start), share * sum(map(len, documents)))
    show_status("computing the scores of terms")
    if not vocabulary:  # a corpus of stop words alone; bm25s wants a term, which no query has
        vocabulary, documents = {"": 0}, [[0] for _ in documents]
    index = bm25s.BM25()
    index.index((documents, vocabulary), create_empty_token=False, show_progress=False)
    index.save(scratch, show_progress=False)
    show_status()


def _log_build_estimate(tokenizing_seconds: float, terms: float) -> None:
    """Logs the cost of a long build, of whose passages both are the totals."""
    seconds = BUILD_TO_TOKENIZE_RATIO * tokenizing_seconds
    if seconds < ANNOUNCE_FROM_SECONDS:
        return
    needed, free = BUILD_MEMORY_BYTES_PER_TERM * terms, read_host_memory().get("available", 0)
    log.info(
        "building this BM25 index takes about %s, %s of memory and %s on disk",
        format_duration(seconds), format_bytes(needed), format_bytes(INDEX_DISK_BYTES_PER_TERM * terms),
    )  # fmt: skip
    if 0 < free < needed:
        log.warning("only %s of memory are free here", format_bytes(free))
