"""Search in a collection of a Milvus, by our own scores: its rankings are the same on any shards.

A refresh takes two round trips: one for all searches, one for the passages that were not seen before. Equal
scores are taken in corpus order, so more hits are asked for where they end among equals.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError, CorpusError, RunError
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.retrieval.base import (
    SCORE_TIE_DECIMALS,
    Hits,
    MemoizedBatchFunction,
    Ranking,
    append_unranked_rows,
    interleave_rankings,
    search_with_fallback,
    select_top_hits,
)
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.hybrid import fuse_rankings
from dlm_rag.retrieval.milvus_collection import MAX_SEARCH_HITS, VECTOR_FIELDS, MilvusCollection
from dlm_rag.retrieval.query import Query
from dlm_rag.retrieval.retry import SearchUnavailableError
from dlm_rag.retrieval.sparse_vectors import EMPTY_PASSAGE_WORD_ID, count_query_words

EXTRA_HITS = 25  # hits beyond those that are wanted: most often the last equals end there
EXTRA_HITS_GROWTH = 4  # times as many where they do not
MAX_CACHED_PASSAGES = 100_000  # passages that recur
COUNT_CHECK_SECONDS = 10.0  # seconds for which a collection that was whole is taken to be so
SCORE_CHECK_QUERIES = 8  # queries that check an engine's scores
SCORE_RELATIVE_TOLERANCE, SCORE_ABSOLUTE_TOLERANCE = 1e-5, 1e-4  # how far these may be from ours


class MilvusRetriever:
    """A `Retriever` of the best passages of a collection, equal ones in corpus order.

    A search that fails raises `SearchUnavailableError`, for all of its queries; `CorpusError` says that the
    collection is another than it was. Any number of threads may search.
    """

    def __init__(
        self, collection: MilvusCollection, config: RetrievalConfig,
        embed: Callable[[list[str]], Iterable[Any]] | None = None,
    ) -> None:  # fmt: skip
        """embed: parts of queries to a unit vector each, where dense vectors are searched."""
        self._collection, self._embed = collection, embed
        self._kind, self._fusion_depth = config.method, config.fusion_depth
        self._passages = collection.info.passages
        self.top_k = min(config.top_k, self._passages)
        self._known: dict[int, Passage] = {}
        self._count_due = 0.0

    @property
    def fingerprint(self) -> str:
        """The corpus and the order of equals: the same wherever the collection is."""
        return f"milvus-{self._collection.info.form}-{self._collection.info.fingerprint}"

    def key(self, query: Query) -> Hashable:
        return {"bm25": query.text, "dense": query.parts}.get(self._kind, (query.text, query.parts))

    def forget(self, asker: str) -> None:
        """Nothing is kept for an asker."""

    def search(self, queries: Sequence[Query]) -> list[list[Passage]]:
        """As in `Retriever`; where all passages are wanted, those not found follow in corpus order."""
        return search_with_fallback(self._search, queries)

    def _search(self, queries: Sequence[Query]) -> list[list[Passage]]:
        rankings = [
            append_unranked_rows(rows, self.top_k, self._passages)
            for rows in self.rank(queries, self.top_k)
        ]
        known = self._known
        with profile_stage("retrieve/search"):
            new = sorted({row for rows in rankings for row in rows} - known.keys())
            found = {row: got["passage"] for row, got in self._collection.fetch_passages(new).items()}
        passages = known | found
        self._known = passages if len(passages) <= MAX_CACHED_PASSAGES else found
        return [[passages[row] for row in rows] for rows in rankings]

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        """For each query the best `depth` rows or fewer, best first; equals in corpus order."""
        deep = max(depth, self._fusion_depth) if self._kind == "hybrid" else depth
        asked: dict[str, dict[str, Any]] = {}  # field -> what is asked -> its vector
        if "sparse" in VECTOR_FIELDS[self._kind]:
            words = {query.text: count_query_words(query.text) for query in queries}
            asked["sparse"] = {text: counts for text, counts in words.items() if counts}
        if self._embed is not None:
            parts = list(dict.fromkeys(part for query in queries for part in query.parts))
            with profile_stage("retrieve/embed"):
                vectors = self._embed(parts) if parts else []
            asked["dense"] = {part: v.tolist() for part, v in zip(parts, vectors, strict=True)}
        with profile_stage("retrieve/search"):
            found = self._rank_vectors(asked, deep)
        sparse, dense = found.get("sparse", {}), found.get("dense", {})
        by_words = [sparse.get(query.text, []) for query in queries]
        by_parts = [
            interleave_rankings([dense.get(part, []) for part in query.parts], deep) for query in queries
        ]
        if self._kind != "hybrid":
            return by_words if self._kind == "bm25" else by_parts
        return [
            fuse_rankings(both, depth, self._fusion_depth) for both in zip(by_words, by_parts, strict=True)
        ]

    def _rank_vectors(self, asked: dict[str, dict[str, Any]], depth: int) -> dict[str, dict[str, Ranking]]:
        """The best rows for each vector; raises `RunError` where equals have no end."""
        found: dict[str, dict[str, Ranking]] = {field: {} for field in asked}
        limit = depth + EXTRA_HITS
        while any(asked.values()):
            limit = min(limit, MAX_SEARCH_HITS)
            sent: dict[str, Sequence[Any]] = {
                field: list(vectors.values()) for field, vectors in asked.items() if vectors
            }
            for field, answers in self._collection.search(sent, limit).items():
                digits = SCORE_TIE_DECIMALS[field]
                for text, hits in zip(list(asked[field]), answers, strict=True):
                    self._check_hits(field, hits, limit)
                    if len(hits) < limit or not ends_in_tie(hits, depth, digits):
                        found[field][text] = [row for _, row in select_top_hits(hits, depth, digits)]
                        del asked[field][text]
            if limit == MAX_SEARCH_HITS and any(asked.values()):
                raise RunError(
                    f"more than {MAX_SEARCH_HITS:,} passages have the same score, and Milvus gives no "
                    "more: their order is unknown"
                )
            limit *= EXTRA_HITS_GROWTH
        return found

    def _check_hits(self, field: str, hits: Hits, limit: int) -> None:
        """Raises `SearchUnavailableError` where hits are missing."""
        whole = min(limit, self._passages)
        if field == "dense" and len(hits) != whole:  # every passage has a similarity
            raise SearchUnavailableError(
                f"{self._collection.url} gives {len(hits)} of {whole} hits: a part of it may be down"
            )
        if not hits and time.monotonic() >= self._count_due:  # nothing found, or nothing there?
            self._collection.check_row_count()
            self._count_due = time.monotonic() + COUNT_CHECK_SECONDS


def ends_in_tie(hits: Hits, depth: int, digits: int) -> bool:
    """Whether a hit after the last one may have an equal score and be among the `depth` best."""
    return len(hits) >= depth and round(hits[-1][0], digits) == round(hits[depth - 1][0], digits)


def open_milvus_retriever(config: RetrievalConfig) -> MilvusRetriever:
    """The collection of `config.url`, after everything about it has been checked; loads it where it has to.

    Raises `UserError` for what is wrong, with the remedy.
    """
    url = config.url or ""
    try:
        collection = MilvusCollection(url, config.timeout)
        if collection.describe() is None:
            raise ConfigError(f"{url}: there is no such collection{collection.suggest_name()}")
        _check_settings(collection, config)
        collection.check_indexes()
        collection.load()
        collection.check_row_count()
        check_engine_scores(collection, VECTOR_FIELDS[config.method])
    except (SearchUnavailableError, RunError) as error:
        reason = str(error).removeprefix(f"{url}: ")
        raise ConfigError(f"{url} cannot be searched: {reason}") from None
    if config.method == "bm25":
        return MilvusRetriever(collection, config)
    from dlm_rag.retrieval.encoder import load_text_encoder

    encoder = load_text_encoder(config)
    check_collection_encoder(collection, config.embedding_model, encoder.index_folder_name)
    return MilvusRetriever(collection, config, MemoizedBatchFunction(encoder.encode_queries))


def _check_settings(collection: MilvusCollection, config: RetrievalConfig) -> None:
    """Raises `ConfigError` where what is wanted and what the collection says do not go together."""
    info, url = collection.info, collection.url
    if not info.finished:
        raise ConfigError(
            f"{url} is half-built: finish it with `dlm-rag index --corpus FILE --to {url} "
            f"retrieval.method={info.kind}`"
        )
    if not set(VECTOR_FIELDS.get(config.method, ("any",))) <= set(VECTOR_FIELDS[info.kind]):
        raise ConfigError(
            f"{url} was built with retrieval.method={info.kind}, and cannot be searched with "
            f"{config.method}"
        )
    depth = max(config.top_k, config.fusion_depth if config.method == "hybrid" else 0)
    if depth > MAX_SEARCH_HITS - EXTRA_HITS:
        raise ConfigError(
            f"Milvus gives at most {MAX_SEARCH_HITS:,} passages: set top_k and fusion_depth lower"
        )


def check_collection_encoder(collection: MilvusCollection, model: str, encoder: str) -> None:
    """Raises `ConfigError` where the vectors of a collection are of another model or prompt.

    encoder: `TextEncoder.index_folder_name`.
    """
    if encoder != collection.info.encoder:
        raise ConfigError(
            f"{collection.url} holds vectors of embedding_model '{collection.info.model}', not of "
            f"'{model}' as it is here, with this passage_prompt"
        )


def check_engine_scores(collection: MilvusCollection, vector_fields: Sequence[str]) -> None:
    """Searches for some passages by their own words and vectors, and recomputes the scores of the hits.

    Finds an index that is not exact, words of another rule, and an engine that drops small numbers. Raises
    `CorpusError`.
    """
    count = collection.info.passages
    rows = sorted({n * count // SCORE_CHECK_QUERIES for n in range(min(SCORE_CHECK_QUERIES, count))})
    sample = collection.fetch_passages(rows, vector_fields)
    for field in vector_fields:
        queries: dict[int, Any] = {row: got[field] for row, got in sample.items()}
        if field == "sparse":
            queries = {row: count_query_words(got["passage"].text) for row, got in sample.items()}
        for row, query in queries.items():
            if field == "sparse" and sample[row][field].keys() != (query.keys() or {EMPTY_PASSAGE_WORD_ID}):
                raise CorpusError(
                    f"{collection.url}: the sparse vector of row {row} does not match its passage: "
                    "build it again"
                )
        queries = {row: query for row, query in queries.items() if query}
        answers = collection.search({field: list(queries.values())}, min(EXTRA_HITS, count))[field]
        found = collection.fetch_passages(sorted({row for hits in answers for _, row in hits}), [field])
        for (row, query), hits in zip(queries.items(), answers, strict=True):
            itself = compute_inner_product(query, sample[row][field])
            exact = hits and all(
                math.isclose(
                    score, compute_inner_product(query, found[other][field]),
                    rel_tol=SCORE_RELATIVE_TOLERANCE, abs_tol=SCORE_ABSOLUTE_TOLERANCE,
                )
                for score, other in hits
            )  # fmt: skip
            left_out = row not in (other for _, other in hits)
            if not exact or (left_out and itself > hits[-1][0] + SCORE_ABSOLUTE_TOLERANCE):
                raise CorpusError(
                    f"{collection.url} does not give the scores of its vectors ({field}, row {row}): is "
                    "its index exact, and drop_ratio_search 0?"
                )


def compute_inner_product(one: Any, other: Any) -> float:
    """The inner product of two vectors, both sparse or both dense."""
    if isinstance(one, dict):
        return sum(value * other.get(word, 0.0) for word, value in one.items())
    return sum(a * b for a, b in zip(one, other, strict=True))
