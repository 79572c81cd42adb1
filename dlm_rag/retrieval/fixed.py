"""Evidence that no search decides: none at all, or what a question is known to need."""

from collections.abc import Hashable, Mapping, Sequence

from dlm_rag.errors import ConfigError
from dlm_rag.retrieval.base import CorpusRetriever, Ranking
from dlm_rag.retrieval.query import Query


class NoRetriever(CorpusRetriever):
    """Finds nothing: what the denoiser knows by itself."""

    def key(self, query: Query) -> Hashable:
        return ()

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        return [[] for _ in queries]


class OracleRetriever(CorpusRetriever):
    """First the passages that support a question, then what another retriever finds for it.

    `support`: ids by question, as the first part of a query has it. Raises `ConfigError` for an id
    that is not in the corpus.
    """

    def __init__(self, inner: CorpusRetriever, support: Mapping[str, Sequence[str]]) -> None:
        super().__init__(inner.corpus, inner.top_k)
        wanted = {passage_id for ids in support.values() for passage_id in ids}
        rows = {passage.id: row for row, passage in enumerate(inner.corpus) if passage.id in wanted}
        for missing in sorted(wanted - rows.keys()):
            raise ConfigError(f"the supporting passage '{missing}' is not in the corpus")
        self._inner = inner
        self._rows = {question: [rows[i] for i in ids] for question, ids in support.items()}

    def key(self, query: Query) -> Hashable:
        return query.parts[0]

    def forget(self, asker: str) -> None:
        self._inner.forget(asker)

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        found = self._inner.rank(queries, depth)
        return [
            list(dict.fromkeys((*self._rows[query.parts[0]], *rows)))[:depth]
            for query, rows in zip(queries, found, strict=True)
        ]
