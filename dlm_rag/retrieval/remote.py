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
from dlm_rag.retrieval.base import (
    DIGITS,
    Hits,
    Ranking,
    Remembered,
    best,
    fuse,
    search_each,
    take_turns,
    with_the_rest,
)
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.facts import FIELDS_OF
from dlm_rag.retrieval.link import SearchUnavailableError
from dlm_rag.retrieval.milvus import MOST_HITS, Collection
from dlm_rag.retrieval.query import Query
from dlm_rag.retrieval.scores import NO_WORD, word_counts
from dlm_rag.stages import stage

if TYPE_CHECKING:
    from torch import Tensor

    from dlm_rag.retrieval.dense import TextEncoder

Embed = Callable[[list[str]], "Iterable[Tensor]"]  # texts -> a unit vector (width) each

SPARE = 25  # hits beyond those that are wanted: most often the last equals end there
MORE = 4  # times as many where they do not
MOST_KEPT = 100_000  # passages that recur
COUNT_EVERY = 10.0  # seconds for which a collection that was whole is taken to be so
SAMPLE = 8  # queries that check an engine's scores
RELATIVE, ABSOLUTE = 1e-5, 1e-4  # how far these may be from ours


def ends_among_equals(hits: Hits, depth: int, digits: int) -> bool:
    """Whether the last hit may have an equal behind it that is among the `depth` best."""
    return len(hits) >= depth and round(hits[-1][0], digits) == round(hits[depth - 1][0], digits)


class MilvusRetriever:
    """A `Retriever` of the best passages of a collection, equal ones in corpus order.

    A search that fails raises `SearchUnavailableError`, for all of its queries; `CorpusError` says that the
    collection is another than it was. Any number of threads may search.
    """

    def __init__(self, collection: Collection, config: RetrievalConfig, embed: Embed | None = None) -> None:
        """embed: of parts of queries, where dense vectors are searched."""
        self._collection, self._embed = collection, embed
        self._kind, self._fusion_depth = config.kind, config.fusion_depth
        self._passages = collection.facts.passages
        self.top_k = min(config.top_k, self._passages)
        self._known: dict[int, Passage] = {}
        self._count_due = 0.0

    @property
    def fingerprint(self) -> str:
        """Of the corpus, and that equals stand in its order: the same wherever the collection is."""
        return f"milvus-{self._collection.facts.form}-{self._collection.facts.fingerprint}"

    def key(self, query: Query) -> Hashable:
        return {"bm25": query.text, "dense": query.parts}.get(self._kind, (query.text, query.parts))

    def forget(self, asker: str) -> None:
        """Nothing is kept for an asker."""

    def search(self, queries: Sequence[Query]) -> list[list[Passage]]:
        """As in `Retriever`; where all passages are wanted, those not found follow in corpus order."""
        return search_each(self._search, queries)

    def _search(self, queries: Sequence[Query]) -> list[list[Passage]]:
        rankings = [
            with_the_rest(rows, self.top_k, self._passages) for rows in self.rank(queries, self.top_k)
        ]
        with stage("retrieve/search"):
            passages = self._fetch({row for rows in rankings for row in rows})
        return [[passages[row] for row in rows] for rows in rankings]

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        """For each query the best `depth` rows or fewer, best first; equals in corpus order."""
        deep = max(depth, self._fusion_depth) if self._kind == "hybrid" else depth
        fields = FIELDS_OF[self._kind]
        words = [word_counts(query.text) if "sparse" in fields else {} for query in queries]
        parts = list(dict.fromkeys(part for query in queries for part in query.parts))
        asked: dict[str, Sequence[Any]] = {"sparse": [counts for counts in words if counts]}
        if "dense" in fields and parts:
            assert self._embed is not None
            with stage("retrieve/embed"):
                asked["dense"] = [vector.tolist() for vector in self._embed(parts)]
        with stage("retrieve/search"):
            found = self._rank_all(asked, deep)
        sparse, dense = iter(found["sparse"]), dict(zip(parts, found.get("dense", ()), strict=False))
        by_words = [next(sparse) if counts else [] for counts in words]
        if self._kind == "bm25":
            return by_words
        by_parts = [take_turns([dense[part] for part in query.parts], deep) for query in queries]
        if self._kind == "dense":
            return by_parts
        return [fuse(both, depth, self._fusion_depth) for both in zip(by_words, by_parts, strict=True)]

    def _rank_all(self, asked: Mapping[str, Sequence[Any]], depth: int) -> dict[str, list[Ranking]]:
        """Field of vectors -> the best rows for each vector; raises `RunError` where equals have no end."""
        found: dict[str, list[Ranking]] = {field: [[]] * len(vectors) for field, vectors in asked.items()}
        open_, limit = {field: list(range(len(vectors))) for field, vectors in asked.items()}, depth + SPARE
        while open_ := {field: numbers for field, numbers in open_.items() if numbers}:
            limit = min(limit, MOST_HITS)
            answers = self._collection.search(
                [(field, [asked[field][n] for n in numbers], limit) for field, numbers in open_.items()]
            )
            for (field, numbers), answer in zip(list(open_.items()), answers, strict=True):
                again = []
                for number, hits in zip(numbers, answer, strict=True):
                    if self._may_go_on(field, hits, limit, depth):
                        again.append(number)
                    else:
                        found[field][number] = [row for _, row in best(hits, depth, DIGITS[field])]
                open_[field] = again
            if limit == MOST_HITS and any(open_.values()):
                raise RunError(
                    f"more than {MOST_HITS:,} passages have the same score, and Milvus gives no more: "
                    "their order cannot be told"
                )
            limit *= MORE
        return found

    def _may_go_on(self, field: str, hits: Hits, limit: int, depth: int) -> bool:
        """Whether equals of the last hit that is wanted may be left; checks what can be checked."""
        whole = min(limit, self._passages)
        if field == "dense" and len(hits) != whole:  # every passage has a similarity
            raise SearchUnavailableError(
                f"{self._collection.url} gives {len(hits)} of {whole} hits: a part of it may be down"
            )
        if not hits and time.monotonic() >= self._count_due:  # nothing found, or nothing there?
            self._collection.check_count()
            self._count_due = time.monotonic() + COUNT_EVERY
        return len(hits) == limit and ends_among_equals(hits, depth, DIGITS[field])

    def _fetch(self, rows: set[int]) -> dict[int, Passage]:
        known = self._known
        found = {row: known[row] for row in rows if row in known}
        if new := sorted(rows - found.keys()):
            fetched = {row: passage for row, (passage, _) in self._collection.fetch(new).items()}
            kept = known if len(known) + len(fetched) <= MOST_KEPT else {}
            kept.update(fetched)
            self._known = kept
            found |= fetched
        return found


def open_milvus(config: RetrievalConfig) -> MilvusRetriever:
    """The collection of `config.url`, after everything about it has been checked; loads it where it has to.

    Raises `UserError` for what is wrong, with the remedy.
    """
    url = config.url or ""
    try:
        collection = Collection(url, config.url_seconds)
        facts = collection.describe()
        if facts is None:
            raise ConfigError(f"{url}: there is no such collection{collection.nearest_name()}")
        _check(collection, config)
        collection.check_indexes()
        collection.load()
        collection.check_count()
        check_scores(collection, FIELDS_OF[config.kind])
    except (SearchUnavailableError, RunError) as error:
        reason = str(error).removeprefix(f"{url}: ")
        raise ConfigError(f"{url} cannot be searched: {reason}") from None
    if config.kind == "bm25":
        return MilvusRetriever(collection, config)
    from dlm_rag.retrieval.dense import open_encoder

    encoder = open_encoder(config)
    check_encoder(collection, config.dense_model, encoder)
    return MilvusRetriever(collection, config, Remembered(encoder.queries))


def _check(collection: Collection, config: RetrievalConfig) -> None:
    """Raises `ConfigError` where what is wanted and what the collection says do not go together."""
    facts, url = collection.facts, collection.url
    if not facts.finished:
        raise ConfigError(
            f"{url} is half-built: go on with `dlm-rag index --corpus FILE --to {url} "
            f"retrieval.kind={facts.kind}`"
        )
    if not set(FIELDS_OF.get(config.kind, ("any",))) <= set(FIELDS_OF[facts.kind]):
        raise ConfigError(
            f"{url} was built with retrieval.kind={facts.kind}, and cannot be searched with {config.kind}"
        )
    depth = max(config.top_k, config.fusion_depth if config.kind == "hybrid" else 0)
    if depth > MOST_HITS - SPARE:
        raise ConfigError(f"Milvus gives at most {MOST_HITS:,} passages: set top_k and fusion_depth lower")


def check_encoder(collection: Collection, model: str, encoder: "TextEncoder") -> None:
    """Raises `ConfigError` where the vectors of a collection are of another model or prompt."""
    facts = collection.facts
    if encoder.folder != facts.encoder:
        raise ConfigError(
            f"{collection.url} holds vectors of dense_model '{facts.model}', and not of '{model}' as it is "
            "here, with this passage_prompt"
        )


def check_scores(collection: Collection, fields: Sequence[str]) -> None:
    """Asks for some of the passages by their own words and vectors, and computes the scores of what comes.

    An index that is not exact, words of another rule, or an engine that leaves out small numbers is found
    here. Raises `CorpusError`.
    """
    count = collection.facts.passages
    sample = collection.fetch(sorted({n * count // SAMPLE for n in range(min(SAMPLE, count))}), fields)
    asked: dict[str, list[Any]] = {field: [] for field in fields}
    rows: dict[str, list[int]] = {field: [] for field in fields}
    for row, (passage, vectors) in sample.items():
        words = word_counts(passage.text)
        if "sparse" in fields and vectors["sparse"].keys() != (words.keys() or {NO_WORD}):
            raise CorpusError(
                f"{collection.url} has other words for its row {row} than that passage: build it anew"
            )
        for field, vector in (("sparse", words), ("dense", vectors.get("dense"))):
            if field in fields and vector:
                asked[field].append(vector)
                rows[field].append(row)
    limit = min(SPARE, count)
    answers = collection.search([(field, asked[field], limit) for field in fields])
    found = collection.fetch(sorted({row for hits in answers for each in hits for _, row in each}), fields)
    for field, each in zip(fields, answers, strict=True):
        for row, vector, hits in zip(rows[field], asked[field], each, strict=True):
            ours = {other: product(vector, found[other][1][field]) for _, other in hits}
            itself = product(vector, sample[row][1][field])
            close = [math.isclose(s, ours[r], rel_tol=RELATIVE, abs_tol=ABSOLUTE) for s, r in hits]
            if not (hits and all(close) and (row in ours or itself <= hits[-1][0] + ABSOLUTE)):
                raise CorpusError(
                    f"{collection.url} does not give the scores of its vectors ({field}, row {row}): is "
                    "its index exact, and drop_ratio_search 0?"
                )


def product(one: Any, other: Any) -> float:
    """The inner product of two vectors, both sparse or both dense."""
    if isinstance(one, dict):
        return sum(value * other.get(word, 0.0) for word, value in one.items())
    return sum(a * b for a, b in zip(one, other, strict=True))
