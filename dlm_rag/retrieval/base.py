"""What every retriever does: a batch of queries in, ranked passages out."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

from dlm_rag.retrieval.corpus import Corpus, Passage
from dlm_rag.retrieval.query import Query

Ranking = list[int]  # rows of the corpus, best first, each once


class Retriever(ABC):
    """Finds the `top_k` passages of a corpus for each query.

    A query that finds nothing gets an empty list; a search that fails raises. Subclasses rank rows.
    """

    def __init__(self, corpus: Corpus, top_k: int) -> None:
        self.corpus, self.top_k = corpus, min(top_k, len(corpus))

    @abstractmethod
    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        """For each query the best `depth` rows or fewer, best first; ties in corpus order."""

    @abstractmethod
    def key(self, query: Query) -> Hashable:
        """What the result depends on, not None: queries with equal keys find the same."""

    def remember(self, memory: int) -> None:  # noqa: B027 - most keep nothing
        """Lets up to `memory` bytes be kept between the queries of one asker; no result changes."""

    def forget(self, asker: str) -> None:  # noqa: B027
        """Drops what is kept for an asker who will not ask again."""

    def search(self, queries: Sequence[Query]) -> list[list[Passage]]:
        """The evidence for each query, in rank order, each passage once.

        Where the whole corpus fits into `top_k` there is nothing to choose: once a query finds
        anything, the passages it did not find follow in corpus order.
        """
        rankings = self.rank(queries, self.top_k)
        if self.top_k == len(self.corpus):
            everything = range(len(self.corpus))
            rankings = [list(dict.fromkeys((*rows, *everything))) if rows else [] for rows in rankings]
        return [[self.corpus[row] for row in rows] for rows in rankings]


def fuse(rankings: Sequence[Ranking], depth: int, constant: int = 60) -> Ranking:
    """Reciprocal rank fusion (Cormack et al. 2009): each ranking gives 1 / (constant + rank).

    Rank counts from 1. Ties go to the row that came first in the earliest ranking.
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, row in enumerate(ranking, start=1):
            scores[row] = scores.get(row, 0.0) + 1.0 / (constant + rank)
    return sorted(scores, key=lambda row: -scores[row])[:depth]


def take_turns(rankings: Sequence[Ranking], depth: int) -> Ranking:
    """The best of each ranking in turn, then the second of each, and so on; each row once."""
    longest = max(map(len, rankings), default=0)
    turns = [ranking[rank] for rank in range(longest) for ranking in rankings if rank < len(ranking)]
    return list(dict.fromkeys(turns))[:depth]
