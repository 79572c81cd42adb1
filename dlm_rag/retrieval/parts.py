"""Sparse retrieval part by part, as dense retrieval has it: the parts of a query take turns."""

from collections.abc import Hashable, Sequence

from dlm_rag.retrieval.base import CorpusRetriever, Ranking, take_turns
from dlm_rag.retrieval.query import Query

REMEMBERED = 65536  # rankings of parts kept: a sentence recurs from step to step


class PartsRetriever(CorpusRetriever):
    """Each of `Query.parts` is a search of its own: the best of each, then the second of each, and so on.

    One long query counts the words of the question in every search, so that a name begun at its end weighs
    little; alone it is nearly all of a query. What a part finds depends on its text only and is remembered
    by it: nothing belongs to one asker.
    """

    def __init__(self, inner: CorpusRetriever) -> None:
        super().__init__(inner.corpus, inner.top_k)
        self._inner = inner
        self._known: dict[tuple[str, int], Ranking] = {}

    def key(self, query: Query) -> Hashable:
        return query.parts

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        parts = dict.fromkeys(part for query in queries for part in query.parts)
        if len(self._known) > REMEMBERED:
            self._known.clear()
        if new := [part for part in parts if (part, depth) not in self._known]:
            found = self._inner.rank([Query(part, (part,)) for part in new], depth)
            self._known.update(zip(((part, depth) for part in new), found, strict=True))
        return [take_turns([self._known[part, depth] for part in q.parts], depth) for q in queries]
