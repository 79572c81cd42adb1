"""Hybrid retrieval: several retrievers over one corpus, their rankings fused."""

from collections.abc import Sequence

from dlm_rag.retrieval.base import CorpusRetriever, Ranking, fuse_rankings
from dlm_rag.retrieval.query import Query


class HybridRetriever(CorpusRetriever):
    """Reciprocal rank fusion of the first `fusion_depth` ranks of each; the last ranks what follows."""

    def __init__(self, retrievers: Sequence[CorpusRetriever], top_k: int, fusion_depth: int) -> None:
        super().__init__(retrievers[0].corpus, top_k)
        self._retrievers, self._fusion_depth = retrievers, fusion_depth
        self.query_fields = tuple(dict.fromkeys(name for r in retrievers for name in r.query_fields))

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        *others, last = self._retrievers
        found = [retriever.rank(queries, self._fusion_depth) for retriever in others]
        found.append(last.rank(queries, max(depth, self._fusion_depth)))
        return [fuse_rankings(rankings, depth, self._fusion_depth) for rankings in zip(*found, strict=True)]
