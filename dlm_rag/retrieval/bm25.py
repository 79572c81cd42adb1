"""Sparse retrieval: BM25 by bm25s, its index built once and mapped from disk."""

import json
import logging
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import bm25s
import numpy as np
from bm25s.numba import retrieve_utils

from dlm_rag.errors import CorpusError
from dlm_rag.files.jsonl import parse_json_object, read_json_or_empty
from dlm_rag.files.untrusted import validate_json_value
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
from dlm_rag.retrieval.incremental_bm25 import IncrementalSearch
from dlm_rag.retrieval.numba_cache import enable_numba_cache
from dlm_rag.retrieval.query import Query
from dlm_rag.retrieval.sparse_vectors import extract_terms

log = logging.getLogger(__name__)

MIN_INCREMENTAL_PASSAGES = 50_000  # passages
BUILD_ESTIMATE_PASSAGES = 10_000  # passages, from which the costs of a build are told
# Of a build, measured as in `profiling/bench_bm25.py`: peak of memory and disk for each term of a passage,
# and the time of all by that of finding the terms.
BUILD_MEMORY_BYTES_PER_TERM, INDEX_DISK_BYTES_PER_TERM, BUILD_TO_TOKENIZE_RATIO = 45, 8, 2  # bytes, bytes
COLUMN_INFO_FILE, VOCABULARY_FILE = "columns.json", "vocab.index.json"
# scores, their rows, where each word's begin; as bm25s has them
BM25S_ARRAY_NAMES = ("data", "indices", "indptr")

enable_numba_cache(retrieve_utils._retrieve_internal_jitted_serial)


@dataclass(frozen=True)
class ScoreColumnInfo:
    """What `IncrementalSearch` needs to know about the columns: their largest score, whether rows
    ascend.
    """

    largest: float
    ascending: bool


class BM25Retriever(CorpusRetriever):
    """BM25 in Lucene's form (k1 1.5, b 0.75); all scores are computed when the index is built.

    Ties are broken by bm25s's heap, a fixed function of the scores in corpus order, as in the
    published traces. A passage that shares no term with the query has score 0 and is not ranked.
    """

    def __init__(self, corpus: Corpus, top_k: int, memory: int = 0) -> None:
        """memory: bytes of scores that may be kept between the queries of one asker; no result changes."""
        super().__init__(corpus, top_k)
        folder = build_once(
            corpus.folder / make_folder_name("bm25", bm25s.__version__, COLUMN_INFO_FILE),
            lambda scratch: _build_bm25_index(corpus, scratch),
        )
        self._index, self._facts = _open_bm25_index(folder, len(corpus))
        self._successive = (
            self._create_incremental_search(memory) if len(corpus) >= MIN_INCREMENTAL_PASSAGES else None
        )
        self._search_ids([[0]], 1)  # loads the compiled search, so that the first question need not wait

    def key(self, query: Query) -> Hashable:
        return query.text

    def _create_incremental_search(self, memory: int) -> IncrementalSearch | None:
        """For a corpus of fewer than `MIN_INCREMENTAL_PASSAGES` passages a fresh search is cheaper."""
        if not memory:
            return None
        if not self._facts.ascending:
            log.warning("the columns of this BM25 index are not in order: every search is a fresh one")
            return None
        found = self._index.scores
        kept = IncrementalSearch(
            found["data"], found["indices"], found["indptr"], len(self.corpus),
            self._facts.largest, memory,
        )  # fmt: skip
        kept.rank("", [0], 1)  # loads its compiled parts
        kept.forget("")
        return kept

    def forget(self, asker: str) -> None:
        if self._successive is not None:
            self._successive.forget(asker)

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        depth = min(depth, len(self.corpus))
        with profile_stage("retrieve/search"):
            asked = [self._index.get_tokens_ids(extract_terms(query.text)) for query in queries]
            found: list[Ranking | None] = [[] if not ids else None for ids in asked]
            successive = self._successive
            if successive is not None:
                for number, (query, ids) in enumerate(zip(queries, asked, strict=True)):
                    if ids and query.asker:
                        found[number] = successive.rank(query.asker, ids, depth)
            fresh = [ids for ids, ranking in zip(asked, found, strict=True) if ranking is None]
            rest = iter(self._search_ids(fresh, depth))
            return [list(next(rest)) if ranking is None else ranking for ranking in found]

    def rank_scored(self, queries: Sequence[Query], depth: int) -> list[dict[int, float]]:
        """As in `CorpusRetriever`; every search is a fresh one."""
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


def _open_bm25_index(folder: Path, passages: int) -> tuple[bm25s.BM25, ScoreColumnInfo]:
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
        facts = validate_json_value(
            ScoreColumnInfo, read_json_or_empty(folder / COLUMN_INFO_FILE), COLUMN_INFO_FILE, CorpusError
        )
    except CorpusError:
        raise make_foreign_file_error(folder / VOCABULARY_FILE) from None
    if {*map(type, words.values())} != {int} or sorted(words.values()) != [*range(len(starts) - 1)]:
        raise make_foreign_file_error(folder / VOCABULARY_FILE)
    # Not by its own loader, which takes settings from the folder as well.
    index = bm25s.BM25(backend="numba")
    index.scores = dict(zip(BM25S_ARRAY_NAMES, (data, rows, starts), strict=True)) | {"num_docs": passages}
    index.vocab_dict, index.unique_token_ids_set = words, {*words.values()}
    index.nonoccurrence_array = None
    return index, facts


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
    data, indices, indptr = (index.scores[name] for name in BM25S_ARRAY_NAMES)
    rising = np.diff(indices, prepend=-1) > 0
    rising[indptr[:-1][indptr[:-1] < len(indices)]] = True  # where a column begins
    facts = ScoreColumnInfo(float(data.max(initial=0.0)), bool(rising.all() and (data > 0).all()))
    (scratch / COLUMN_INFO_FILE).write_text(json.dumps(asdict(facts)), encoding="utf-8")
    show_status()


def _log_build_estimate(tokenising: float, found: float) -> None:
    """Says what a long build takes; `tokenising`: its seconds, found: terms of all passages."""
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
