"""Sparse retrieval part by part, as dense retrieval has it: the parts of a query take turns."""

from collections.abc import Sequence

from dlm_rag.retrieval.base import CorpusRetriever, MemoizedBatchFunction, Ranking, interleave_rankings
from dlm_rag.retrieval.query import Query


class MultiQueryRetriever(CorpusRetriever):
    """Each of `Query.parts` is a search of its own: the best of each, then the second of each, and so on.

    One long query counts the words of the question in every search, so that a name begun at its end weighs
    little; alone it is nearly all of a query. What a part finds depends on its text only and is remembered
    by it: nothing belongs to one asker.
    """

    query_fields = ("parts",)

    def __init__(self, inner: CorpusRetriever) -> None:
        super().__init__(inner.corpus, inner.top_k)

        def rank(asked: Sequence[tuple[str, int]]) -> list[Ranking]:
            return inner.rank([Query(part, (part,)) for part, _ in asked], asked[0][1])

        self._rankings = MemoizedBatchFunction(rank)

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        parts = list(dict.fromkeys(part for query in queries for part in query.parts))
        found = dict(zip(parts, self._rankings((part, depth) for part in parts), strict=True))
        return [interleave_rankings([found[part] for part in query.parts], depth) for query in queries]
