"""Sparse retrieval: BM25 by bm25s, its index built once and mapped from disk."""

import logging
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import bm25s
import numpy as np
from bm25s.numba import retrieve_utils

from dlm_rag.errors import CorpusError
from dlm_rag.files.checked_json import parse_json_object
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
from dlm_rag.retrieval.build_once import (
    build_once,
    is_ascending,
    load_array,
    make_folder_name,
    make_foreign_file_error,
)
from dlm_rag.retrieval.corpus import Corpus
from dlm_rag.retrieval.numba_cache import enable_numba_cache
from dlm_rag.retrieval.query import Query
from dlm_rag.retrieval.sparse_vectors import extract_terms

log = logging.getLogger(__name__)

BUILD_ESTIMATE_PASSAGES = 10_000  # passages after which the cost of a build is estimated
# Peak memory and disk per term of a passage, and the time of a build relative to that of finding the terms,
# as measured by `profiling/bench_retrieval.py index`.
BUILD_MEMORY_BYTES_PER_TERM, INDEX_DISK_BYTES_PER_TERM, BUILD_TO_TOKENIZE_RATIO = 45, 8, 2
INDEX_FORM = "columns.json"  # a part of the folder's name; another text makes every index be built again
VOCABULARY_FILE = "vocab.index.json"
# scores, their rows, and where each word's scores begin, as bm25s names them
BM25S_ARRAY_NAMES = ("data", "indices", "indptr")

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
        """As in `CorpusRetriever`."""
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
    """The index in a folder. Raises `CorpusError` for one that somebody else made, and not of this corpus.

    Every number is checked: the compiled search would follow it out of its own memory.
    """
    data_path, rows_path, starts_path = (folder / f"{name}.csc.index.npy" for name in BM25S_ARRAY_NAMES)
    data = load_array(data_path, np.float32, (None,))
    rows = load_array(rows_path, np.int32, data.shape)
    starts = load_array(starts_path, np.int64, (None,))
    if not len(starts) or not is_ascending(starts, 0) or starts[-1] > len(rows):
        raise make_foreign_file_error(starts_path)
    if rows.view(np.uint32).max(initial=0) >= passages:  # which rows below 0 are too, without their sign
        raise make_foreign_file_error(rows_path)
    try:
        words = parse_json_object((folder / VOCABULARY_FILE).read_bytes(), VOCABULARY_FILE, CorpusError)
    except CorpusError:
        raise make_foreign_file_error(folder / VOCABULARY_FILE) from None
    if {*map(type, words.values())} != {int} or sorted(words.values()) != [*range(len(starts) - 1)]:
        raise make_foreign_file_error(folder / VOCABULARY_FILE)
    # Not by its own loader, which takes settings from the folder as well.
    index = bm25s.BM25(backend="numba")
    index.scores = dict(zip(BM25S_ARRAY_NAMES, (data, rows, starts), strict=True)) | {"num_docs": passages}
    index.vocab_dict, index.unique_token_ids_set = words, {*words.values()}
    index.nonoccurrence_array = None
    return index


def _build_bm25_index(corpus: Corpus, scratch: Path) -> None:
    vocabulary: dict[str, int] = {}
    documents: list[list[int]] = []
    start = perf_counter()
    with report_progress("finding terms", len(corpus)) as advance:
        for passage in corpus:
            documents.append(
                [vocabulary.setdefault(term, len(vocabulary)) for term in extract_terms(passage.text)]
            )
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


def _log_build_estimate(tokenising: float, found: float) -> None:
    """Logs the cost of a long build; tokenising: seconds, found: terms, both of all passages."""
    if BUILD_TO_TOKENIZE_RATIO * tokenising < ANNOUNCE_FROM_SECONDS:
        return
    wanted, free = BUILD_MEMORY_BYTES_PER_TERM * found, read_host_memory().get("available", 0)
    log.info(
        "building this BM25 index takes about %s, %s of memory and %s on disk",
        format_duration(BUILD_TO_TOKENIZE_RATIO * tokenising), format_bytes(wanted),
        format_bytes(INDEX_DISK_BYTES_PER_TERM * found),
    )  # fmt: skip
    if 0 < free < wanted:
        log.warning("only %s of memory are free here", format_bytes(free))
