"""Evidence that no search decides: none at all, or what a question is known to need."""

from collections.abc import Hashable, Mapping, Sequence

from dlm_rag.errors import ConfigError
from dlm_rag.questions import Question
from dlm_rag.retrieval.base import CorpusRetriever, Ranking
from dlm_rag.retrieval.query import Query


class NoRetriever(CorpusRetriever):
    """Finds nothing: what the denoiser knows by itself."""

    query_fields = ()

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        return [[] for _ in queries]


class OracleRetriever(CorpusRetriever):
    """First the passages that support a question, then what another retriever finds for it.

    `questions`: by the first part of their queries. Raises `ConfigError` for one whose supporting passages
    are not all in the corpus.
    """

    def __init__(self, inner: CorpusRetriever, questions: Mapping[str, Question]) -> None:
        super().__init__(inner.corpus, inner.top_k)
        wanted = {name for question in questions.values() for name in question.supporting_ids}
        rows = {passage.id: row for row, passage in enumerate(inner.corpus) if passage.id in wanted}
        for question in questions.values():
            for missing in {*question.supporting_ids} - {*rows}:
                raise ConfigError(
                    f"{question.place or question.id}: the supporting passage '{missing}' is not in "
                    f"{inner.corpus.path}"
                )
        self._inner = inner
        self._rows = {part: [rows[i] for i in asked.supporting_ids] for part, asked in questions.items()}

    def key(self, query: Query) -> Hashable:
        return query.parts[0]

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        found = self._inner.rank(queries, depth)
        return [
            list(dict.fromkeys((*self._rows[query.parts[0]], *rows)))[:depth]
            for query, rows in zip(queries, found, strict=True)
        ]
