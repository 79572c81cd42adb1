"""Sparse retrieval: BM25 by bm25s, its index built once and mapped from disk."""

import json
import logging
from collections.abc import Hashable, Sequence
from pathlib import Path
from time import perf_counter

import bm25s
import numpy as np
from bm25s.numba import retrieve_utils

from dlm_rag.errors import CorpusError, fold_message
from dlm_rag.machine import memory
from dlm_rag.progress import SAY_FROM, duration, in_bytes, progress, status
from dlm_rag.retrieval.base import CorpusRetriever, Ranking
from dlm_rag.retrieval.compiled import keep_compiled
from dlm_rag.retrieval.corpus import Corpus
from dlm_rag.retrieval.incremental import SuccessiveSearch
from dlm_rag.retrieval.index import build_once, slug
from dlm_rag.retrieval.query import Query
from dlm_rag.retrieval.scores import terms
from dlm_rag.stages import stage

log = logging.getLogger(__name__)

SUCCESSIVE_FROM = 50_000  # passages
SAMPLE = 10_000  # passages, from which the costs of a build are told
# Of a build, measured as in `profiling/bench_bm25.py`: peak of memory and disk for each term of a passage,
# and the time of all by that of finding the terms.
MEMORY_A_TERM, DISK_A_TERM, TIMES_TOKENISING = 45, 8, 2  # bytes, bytes
FACTS = "columns.json"  # what `SuccessiveSearch` needs to know about the columns

keep_compiled(retrieve_utils._retrieve_internal_jitted_serial)


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
        try:
            self._index = bm25s.BM25.load(folder, mmap=True, backend="numba")
            self._facts = json.loads(Path(folder, FACTS).read_text(encoding="utf-8"))
        except Exception as error:  # it is as it was built, but by whom?
            raise CorpusError(
                f"index {folder} cannot be read ({fold_message(error)}): remove it, and it is built anew"
            ) from None
        self._successive = self._keep_scores(memory) if len(corpus) >= SUCCESSIVE_FROM else None
        self._search_ids([[0]], 1)  # loads the compiled search, so that the first question need not wait

    def key(self, query: Query) -> Hashable:
        return query.text

    def _keep_scores(self, memory: int) -> SuccessiveSearch | None:
        """For a corpus of fewer than `SUCCESSIVE_FROM` passages a fresh search is cheaper."""
        if not memory:
            return None
        if not self._facts["ascending"]:
            log.warning("the columns of this BM25 index are not in order: every search is a fresh one")
            return None
        found = self._index.scores
        kept = SuccessiveSearch(
            found["data"], found["indices"], found["indptr"], len(self.corpus),
            self._facts["largest"], memory,
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
    data, indices, indptr = (index.scores[name] for name in ("data", "indices", "indptr"))
    rising = np.diff(indices, prepend=-1) > 0
    rising[indptr[:-1][indptr[:-1] < len(indices)]] = True  # where a column begins
    facts = {
        "largest": float(data.max(initial=0.0)),
        "ascending": bool(rising.all() and (data > 0).all()),
    }
    (scratch / FACTS).write_text(json.dumps(facts), encoding="utf-8")
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
