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
from dlm_rag.files.foreign import read_as
from dlm_rag.files.jsonl import parse_object, read_note
from dlm_rag.machine import memory
from dlm_rag.progress import SAY_FROM, duration, in_bytes, progress, status
from dlm_rag.retrieval.base import CorpusRetriever, Ranking
from dlm_rag.retrieval.compiled import keep_compiled
from dlm_rag.retrieval.corpus import Corpus
from dlm_rag.retrieval.incremental import SuccessiveSearch
from dlm_rag.retrieval.index import build_once, load_array, not_of_this, rises, slug
from dlm_rag.retrieval.query import Query
from dlm_rag.retrieval.scores import terms
from dlm_rag.stages import stage

log = logging.getLogger(__name__)

SUCCESSIVE_FROM = 50_000  # passages
SAMPLE = 10_000  # passages, from which the costs of a build are told
# Of a build, measured as in `profiling/bench_bm25.py`: peak of memory and disk for each term of a passage,
# and the time of all by that of finding the terms.
MEMORY_A_TERM, DISK_A_TERM, TIMES_TOKENISING = 45, 8, 2  # bytes, bytes
FACTS, WORDS = "columns.json", "vocab.index.json"
COLUMNS = ("data", "indices", "indptr")  # scores, their rows, where each word's begin; as bm25s has them

keep_compiled(retrieve_utils._retrieve_internal_jitted_serial)


@dataclass(frozen=True)
class Facts:
    """What `SuccessiveSearch` needs to know about the columns: their largest score, whether rows ascend."""

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
            corpus.folder / slug("bm25", bm25s.__version__, FACTS), lambda scratch: _build(corpus, scratch)
        )
        self._index, self._facts = _open(folder, len(corpus))
        self._successive = self._keep_scores(memory) if len(corpus) >= SUCCESSIVE_FROM else None
        self._search_ids([[0]], 1)  # loads the compiled search, so that the first question need not wait

    def key(self, query: Query) -> Hashable:
        return query.text

    def _keep_scores(self, memory: int) -> SuccessiveSearch | None:
        """For a corpus of fewer than `SUCCESSIVE_FROM` passages a fresh search is cheaper."""
        if not memory:
            return None
        if not self._facts.ascending:
            log.warning("the columns of this BM25 index are not in order: every search is a fresh one")
            return None
        found = self._index.scores
        kept = SuccessiveSearch(
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
        with stage("retrieve/search"):
            asked = [self._index.get_tokens_ids(terms(query.text)) for query in queries]
            found: list[Ranking | None] = [[] if not ids else None for ids in asked]
            successive = self._successive
            if successive is not None:
                for number, (query, ids) in enumerate(zip(queries, asked, strict=True)):
                    if ids and query.asker:
                        found[number] = successive.rank(query.asker, ids, depth)
            fresh = [ids for ids, ranking in zip(asked, found, strict=True) if ranking is None]
            rest = iter(self._search_ids(fresh, depth))
            return [list(next(rest)) if ranking is None else ranking for ranking in found]

    def scores(self, queries: Sequence[Query], depth: int) -> list[dict[int, float]]:
        """As in `CorpusRetriever`; every search is a fresh one."""
        asked = [self._index.get_tokens_ids(terms(query.text)) for query in queries]
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


def _open(folder: Path, passages: int) -> tuple[bm25s.BM25, Facts]:
    """The index in a folder. Raises `CorpusError` for one that somebody else made, and not of this corpus.

    Every number is checked: the compiled search would follow it out of its own memory.
    """
    data_path, rows_path, starts_path = (folder / f"{name}.csc.index.npy" for name in COLUMNS)
    data = load_array(data_path, np.float32, (None,))
    rows = load_array(rows_path, np.int32, data.shape)
    starts = load_array(starts_path, np.int64, (None,))
    if not len(starts) or not rises(starts, 0) or starts[-1] > len(rows):
        raise not_of_this(starts_path)
    if rows.view(np.uint32).max(initial=0) >= passages:  # which rows below 0 are too, without their sign
        raise not_of_this(rows_path)
    try:
        words = parse_object((folder / WORDS).read_bytes(), WORDS, CorpusError)
        facts = read_as(Facts, read_note(folder / FACTS), FACTS, CorpusError)
    except CorpusError:
        raise not_of_this(folder / WORDS) from None
    if {*map(type, words.values())} != {int} or sorted(words.values()) != [*range(len(starts) - 1)]:
        raise not_of_this(folder / WORDS)
    # Not by its own loader, which takes settings from the folder as well.
    index = bm25s.BM25(backend="numba")
    index.scores = dict(zip(COLUMNS, (data, rows, starts), strict=True)) | {"num_docs": passages}
    index.vocab_dict, index.unique_token_ids_set = words, {*words.values()}
    index.nonoccurrence_array = None
    return index, facts


def _build(corpus: Corpus, scratch: Path) -> None:
    vocabulary: dict[str, int] = {}
    documents: list[list[int]] = []
    start = perf_counter()
    with progress("finding terms", len(corpus)) as advance:
        for passage in corpus:
            documents.append([vocabulary.setdefault(term, len(vocabulary)) for term in terms(passage.text)])
            advance(1)
            if len(documents) == SAMPLE:
                share = len(corpus) / SAMPLE
                _announce(share * (perf_counter() - start), share * sum(map(len, documents)))
    status("computing the scores of terms")
    if not vocabulary:  # a corpus of stop words alone; bm25s wants a term, which no query has
        vocabulary, documents = {"": 0}, [[0] for _ in documents]
    index = bm25s.BM25()
    index.index((documents, vocabulary), create_empty_token=False, show_progress=False)
    index.save(scratch, show_progress=False)
    data, indices, indptr = (index.scores[name] for name in COLUMNS)
    rising = np.diff(indices, prepend=-1) > 0
    rising[indptr[:-1][indptr[:-1] < len(indices)]] = True  # where a column begins
    facts = Facts(float(data.max(initial=0.0)), bool(rising.all() and (data > 0).all()))
    (scratch / FACTS).write_text(json.dumps(asdict(facts)), encoding="utf-8")
    status()


def _announce(tokenising: float, found: float) -> None:
    """Says what a long build takes; `tokenising`: its seconds, found: terms of all passages."""
    if TIMES_TOKENISING * tokenising < SAY_FROM:
        return
    wanted, free = MEMORY_A_TERM * found, memory().get("available", 0)
    log.info(
        "building this BM25 index takes about %s, %s of memory and %s on disk",
        duration(TIMES_TOKENISING * tokenising), in_bytes(wanted), in_bytes(DISK_A_TERM * found),
    )  # fmt: skip
    if 0 < free < wanted:
        log.warning("only %s of memory are free here", in_bytes(free))
