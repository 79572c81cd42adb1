"""Search in a collection of a Milvus, by our own scores: its rankings are the same on any shards.

A refresh takes two round trips: one for all searches, one for the passages that were not seen before. Equal
scores are taken in corpus order, so more hits are asked for where they end among equals.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError, CorpusError, RunError
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.retrieval.base import (
    SCORE_TIE_DECIMALS,
    Hits,
    MemoizedBatchFunction,
    Ranking,
    append_unranked_rows,
    fuse_rankings,
    interleave_rankings,
    search_with_fallback,
    select_top_hits,
)
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.milvus_collection import MAX_SEARCH_HITS, MilvusCollection
from dlm_rag.retrieval.milvus_collection_info import VECTOR_FIELDS
from dlm_rag.retrieval.query import Query
from dlm_rag.retrieval.retry import SearchUnavailableError
from dlm_rag.retrieval.sparse_vectors import EMPTY_PASSAGE_WORD_ID, count_query_words

if TYPE_CHECKING:
    from torch import Tensor

    from dlm_rag.retrieval.dense import TextEncoder

QueryEmbedFunction = Callable[[list[str]], "Iterable[Tensor]"]  # texts -> a unit vector (width) each

EXTRA_HITS = 25  # hits beyond those that are wanted: most often the last equals end there
EXTRA_HITS_GROWTH = 4  # times as many where they do not
MAX_CACHED_PASSAGES = 100_000  # passages that recur
COUNT_CHECK_SECONDS = 10.0  # seconds for which a collection that was whole is taken to be so
SCORE_CHECK_QUERIES = 8  # queries that check an engine's scores
SCORE_RELATIVE_TOLERANCE, SCORE_ABSOLUTE_TOLERANCE = 1e-5, 1e-4  # how far these may be from ours


def ends_in_tie(hits: Hits, depth: int, digits: int) -> bool:
    """Whether a hit after the last one may have an equal score and be among the `depth` best."""
    return len(hits) >= depth and round(hits[-1][0], digits) == round(hits[depth - 1][0], digits)


class MilvusRetriever:
    """A `Retriever` of the best passages of a collection, equal ones in corpus order.

    A search that fails raises `SearchUnavailableError`, for all of its queries; `CorpusError` says that the
    collection is another than it was. Any number of threads may search.
    """

    def __init__(
        self, collection: MilvusCollection, config: RetrievalConfig, embed: QueryEmbedFunction | None = None
    ) -> None:
        """embed: of parts of queries, where dense vectors are searched."""
        self._collection, self._embed = collection, embed
        self._kind, self._fusion_depth = config.method, config.fusion_depth
        self._passages = collection.facts.passages
        self.top_k = min(config.top_k, self._passages)
        self._known: dict[int, Passage] = {}
        self._count_due = 0.0

    @property
    def fingerprint(self) -> str:
        """The corpus and the order of equals: the same wherever the collection is."""
        return f"milvus-{self._collection.facts.form}-{self._collection.facts.fingerprint}"

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
        with profile_stage("retrieve/search"):
            passages = self._fetch({row for rows in rankings for row in rows})
        return [[passages[row] for row in rows] for rows in rankings]

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        """For each query the best `depth` rows or fewer, best first; equals in corpus order."""
        deep = max(depth, self._fusion_depth) if self._kind == "hybrid" else depth
        fields = VECTOR_FIELDS[self._kind]
        words = [count_query_words(query.text) if "sparse" in fields else {} for query in queries]
        parts = list(dict.fromkeys(part for query in queries for part in query.parts))
        asked: dict[str, Sequence[Any]] = {"sparse": [counts for counts in words if counts]}
        if "dense" in fields and parts:
            assert self._embed is not None
            with profile_stage("retrieve/embed"):
                asked["dense"] = [vector.tolist() for vector in self._embed(parts)]
        with profile_stage("retrieve/search"):
            found = self._rank_all(asked, deep)
        sparse, dense = iter(found["sparse"]), dict(zip(parts, found.get("dense", ()), strict=False))
        by_words = [next(sparse) if counts else [] for counts in words]
        if self._kind == "bm25":
            return by_words
        by_parts = [interleave_rankings([dense[part] for part in query.parts], deep) for query in queries]
        if self._kind == "dense":
            return by_parts
        return [
            fuse_rankings(both, depth, self._fusion_depth) for both in zip(by_words, by_parts, strict=True)
        ]

    def _rank_all(self, asked: Mapping[str, Sequence[Any]], depth: int) -> dict[str, list[Ranking]]:
        """Field of vectors -> the best rows for each vector; raises `RunError` where equals have no end."""
        found: dict[str, list[Ranking]] = {field: [[]] * len(vectors) for field, vectors in asked.items()}
        open_, limit = (
            {field: list(range(len(vectors))) for field, vectors in asked.items()},
            depth + EXTRA_HITS,
        )
        while open_ := {field: numbers for field, numbers in open_.items() if numbers}:
            limit = min(limit, MAX_SEARCH_HITS)
            answers = self._collection.search(
                [(field, [asked[field][n] for n in numbers], limit) for field, numbers in open_.items()]
            )
            for (field, numbers), answer in zip(list(open_.items()), answers, strict=True):
                again = []
                for number, hits in zip(numbers, answer, strict=True):
                    if self._may_go_on(field, hits, limit, depth):
                        again.append(number)
                    else:
                        found[field][number] = [
                            row for _, row in select_top_hits(hits, depth, SCORE_TIE_DECIMALS[field])
                        ]
                open_[field] = again
            if limit == MAX_SEARCH_HITS and any(open_.values()):
                raise RunError(
                    f"more than {MAX_SEARCH_HITS:,} passages have the same score, and Milvus gives no "
                    "more: their order is unknown"
                )
            limit *= EXTRA_HITS_GROWTH
        return found

    def _may_go_on(self, field: str, hits: Hits, limit: int, depth: int) -> bool:
        """Whether equals of the last hit that is wanted may be left; checks what can be checked."""
        whole = min(limit, self._passages)
        if field == "dense" and len(hits) != whole:  # every passage has a similarity
            raise SearchUnavailableError(
                f"{self._collection.url} gives {len(hits)} of {whole} hits: a part of it may be down"
            )
        if not hits and time.monotonic() >= self._count_due:  # nothing found, or nothing there?
            self._collection.check_row_count()
            self._count_due = time.monotonic() + COUNT_CHECK_SECONDS
        return len(hits) == limit and ends_in_tie(hits, depth, SCORE_TIE_DECIMALS[field])

    def _fetch(self, rows: set[int]) -> dict[int, Passage]:
        known = self._known
        found = {row: known[row] for row in rows if row in known}
        if new := sorted(rows - found.keys()):
            fetched = {row: passage for row, (passage, _) in self._collection.fetch_passages(new).items()}
            kept = known if len(known) + len(fetched) <= MAX_CACHED_PASSAGES else {}
            kept.update(fetched)
            self._known = kept
            found |= fetched
        return found


def open_milvus_retriever(config: RetrievalConfig) -> MilvusRetriever:
    """The collection of `config.url`, after everything about it has been checked; loads it where it has to.

    Raises `UserError` for what is wrong, with the remedy.
    """
    url = config.url or ""
    try:
        collection = MilvusCollection(url, config.timeout)
        facts = collection.describe()
        if facts is None:
            raise ConfigError(f"{url}: there is no such collection{collection.suggest_name()}")
        _check_collection(collection, config)
        collection.check_indexes()
        collection.load()
        collection.check_row_count()
        check_engine_scores(collection, VECTOR_FIELDS[config.method])
    except (SearchUnavailableError, RunError) as error:
        reason = str(error).removeprefix(f"{url}: ")
        raise ConfigError(f"{url} cannot be searched: {reason}") from None
    if config.method == "bm25":
        return MilvusRetriever(collection, config)
    from dlm_rag.retrieval.dense import load_text_encoder

    encoder = load_text_encoder(config)
    check_collection_encoder(collection, config.embedding_model, encoder)
    return MilvusRetriever(collection, config, MemoizedBatchFunction(encoder.encode_queries))


def _check_collection(collection: MilvusCollection, config: RetrievalConfig) -> None:
    """Raises `ConfigError` where what is wanted and what the collection says do not go together."""
    facts, url = collection.facts, collection.url
    if not facts.finished:
        raise ConfigError(
            f"{url} is half-built: finish it with `dlm-rag index --corpus FILE --to {url} "
            f"retrieval.method={facts.kind}`"
        )
    if not set(VECTOR_FIELDS.get(config.method, ("any",))) <= set(VECTOR_FIELDS[facts.kind]):
        raise ConfigError(
            f"{url} was built with retrieval.method={facts.kind}, and cannot be searched with "
            f"{config.method}"
        )
    depth = max(config.top_k, config.fusion_depth if config.method == "hybrid" else 0)
    if depth > MAX_SEARCH_HITS - EXTRA_HITS:
        raise ConfigError(
            f"Milvus gives at most {MAX_SEARCH_HITS:,} passages: set top_k and fusion_depth lower"
        )


def check_collection_encoder(collection: MilvusCollection, model: str, encoder: "TextEncoder") -> None:
    """Raises `ConfigError` where the vectors of a collection are of another model or prompt."""
    facts = collection.facts
    if encoder.index_folder_name != facts.encoder:
        raise ConfigError(
            f"{collection.url} holds vectors of embedding_model '{facts.model}', and not of '{model}' as "
            "it is "
            "here, with this passage_prompt"
        )


def check_engine_scores(collection: MilvusCollection, fields: Sequence[str]) -> None:
    """Searches for some passages by their own words and vectors, and recomputes the scores of the hits.

    Finds an index that is not exact, words of another rule, and an engine that drops small numbers. Raises
    `CorpusError`.
    """
    count = collection.facts.passages
    rows = sorted({n * count // SCORE_CHECK_QUERIES for n in range(min(SCORE_CHECK_QUERIES, count))})
    sample = collection.fetch_passages(rows, fields)
    for field in fields:
        queries: dict[int, Any] = {}
        for row, (passage, vectors) in sample.items():
            queries[row] = vectors[field]
            if field == "sparse":
                queries[row] = count_query_words(passage.text)
                if vectors[field].keys() != (queries[row].keys() or {EMPTY_PASSAGE_WORD_ID}):
                    raise CorpusError(
                        f"{collection.url}: the sparse vector of row {row} does not match its passage: "
                        "build it again"
                    )
        queries = {row: query for row, query in queries.items() if query}
        (answers,) = collection.search([(field, list(queries.values()), min(EXTRA_HITS, count))])
        found = collection.fetch_passages(sorted({row for hits in answers for _, row in hits}), [field])
        for (row, query), hits in zip(queries.items(), answers, strict=True):
            ours = {other: compute_inner_product(query, found[other][1][field]) for _, other in hits}
            itself = compute_inner_product(query, sample[row][1][field])
            exact = hits and all(
                math.isclose(s, ours[r], rel_tol=SCORE_RELATIVE_TOLERANCE, abs_tol=SCORE_ABSOLUTE_TOLERANCE)
                for s, r in hits
            )
            if not exact or (row not in ours and itself > hits[-1][0] + SCORE_ABSOLUTE_TOLERANCE):
                raise CorpusError(
                    f"{collection.url} does not give the scores of its vectors ({field}, row {row}): is "
                    "its index exact, and drop_ratio_search 0?"
                )


def compute_inner_product(one: Any, other: Any) -> float:
    """The inner product of two vectors, both sparse or both dense."""
    if isinstance(one, dict):
        return sum(value * other.get(word, 0.0) for word, value in one.items())
    return sum(a * b for a, b in zip(one, other, strict=True))
