"""Retrievers made of others: hybrid fusion, a search for each sentence, known evidence first, none."""

from collections.abc import Hashable, Mapping, Sequence

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import ConfigError
from dlm_rag.files.record_readers import get_first_line_title, normalize_title
from dlm_rag.questions import Question
from dlm_rag.retrieval import RETRIEVERS
from dlm_rag.retrieval.base import (
    CorpusRetriever,
    MemoizedBatchFunction,
    Query,
    Ranking,
    Retriever,
    build_query,
    interleave_rankings,
)
from dlm_rag.retrieval.corpus import Corpus, Passage, get_row_id

FUSION_DEPTH = 50  # results of each retriever that hybrid search fuses


def fuse_rankings(
    rankings: Sequence[Ranking], depth: int, fusion_depth: int, constant: int = 60
) -> Ranking:
    """Reciprocal rank fusion (Cormack et al. 2009): the first ranks each give 1 / (constant + rank).

    Rank counts from 1. Ties go to the row that came first in the earliest ranking. The rows of the last
    ranking that are not among the first `fusion_depth` of any follow in its order: a deeper result begins
    with the shallower one.
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, row in enumerate(ranking[:fusion_depth], start=1):
            scores[row] = scores.get(row, 0.0) + 1.0 / (constant + rank)
    fused = sorted(scores, key=lambda row: -scores[row])
    return list(dict.fromkeys((*fused, *rankings[-1])))[:depth]


class HybridRetriever(CorpusRetriever):
    """Reciprocal rank fusion of the first `fusion_depth` ranks of each; the last ranks what follows."""

    def __init__(
        self, retrievers: Sequence[CorpusRetriever], top_k: int, fusion_depth: int = FUSION_DEPTH
    ) -> None:
        super().__init__(retrievers[0].corpus, top_k)
        self._retrievers, self._fusion_depth = retrievers, fusion_depth
        self.query_fields = tuple(dict.fromkeys(name for r in retrievers for name in r.query_fields))

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        *others, last = self._retrievers
        found = [retriever.rank(queries, self._fusion_depth) for retriever in others]
        found.append(last.rank(queries, max(depth, self._fusion_depth)))
        return [fuse_rankings(rankings, depth, self._fusion_depth) for rankings in zip(*found, strict=True)]


def open_hybrid_retriever(config: RetrievalConfig, corpus: Corpus) -> HybridRetriever:
    """BM25 and dense search, fused."""
    parts = [RETRIEVERS[method](config, corpus) for method in ("bm25", "dense")]
    return HybridRetriever(parts, config.top_k)


def open_no_retriever(config: RetrievalConfig, corpus: Corpus) -> "NoRetriever":
    return NoRetriever(corpus, config.top_k)


class MultiQueryRetriever(CorpusRetriever):
    """Each of `Query.parts` is a search of its own: the best of each, then the second of each, and so on.

    One long sparse query counts the words of the question in every search, so that a name just begun at
    its end weighs little; alone it is nearly all of a query. What a part finds is remembered by its text.
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


class NoRetriever(CorpusRetriever):
    """Finds nothing: what the denoiser knows by itself."""

    query_fields = ()

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        return [[] for _ in queries]


class OracleRetriever(CorpusRetriever):
    """First the passages that support a question, then what another retriever finds for it.

    Of several passages with a supporting title, or of a supporting row that was cut, the first of each come
    first, then the second of each.
    `questions`: by the first part of their queries. Raises `ConfigError` for one whose supporting passages
    are not all in the corpus.
    """

    def __init__(self, inner: CorpusRetriever, questions: Mapping[str, Question]) -> None:
        super().__init__(inner.corpus, inner.top_k)
        needed = {part: _list_supports(question) for part, question in questions.items()}
        rows: dict[tuple[str, str], Ranking] = {key: [] for keys in needed.values() for key in keys}
        titled = any(kind == "title" for kind, _ in rows)
        for row, passage in enumerate(inner.corpus):
            title = get_first_line_title(passage.text) if titled else ""
            ids = dict.fromkeys((passage.id, get_row_id(passage.id)))
            for key in (*(("id", name) for name in ids), ("title", title)):
                if key in rows:
                    rows[key].append(row)
        for part, question in questions.items():
            for _, missing in (key for key in needed[part] if not rows[key]):
                raise ConfigError(
                    f"{question.place or question.id}: the supporting passage '{missing}' is not in "
                    f"{inner.corpus.path}"
                )
        self._inner = inner
        self._rows = {
            part: interleave_rankings([rows[key] for key in keys], len(inner.corpus))
            for part, keys in needed.items()
        }

    def key(self, query: Query) -> Hashable:
        return query.parts[0]

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        found = self._inner.rank(queries, depth)
        return [
            list(dict.fromkeys((*self._rows[query.parts[0]], *rows)))[:depth]
            for query, rows in zip(queries, found, strict=True)
        ]


def _list_supports(question: Question) -> list[tuple[str, str]]:
    """What the supporting passages of a question are known by: their ids, else their titles."""
    if question.supporting_ids:
        return [("id", name) for name in question.supporting_ids]
    return [("title", normalize_title(title)) for title in question.supporting_titles]


def describe_missing_support(questions: Sequence[Question], corpus: Sequence[Passage]) -> str:
    """A sentence on the supporting passages that a corpus lacks; "" where it has all."""
    wanted = {key for question in questions for key in _list_supports(question)}
    titled = any(kind == "title" for kind, _ in wanted)
    missing = set(wanted)
    for passage in corpus if wanted else ():
        missing.discard(("id", passage.id))
        if titled:
            missing.discard(("title", get_first_line_title(passage.text)))
    if not missing:
        return ""
    without = [q for q in questions if missing.intersection(_list_supports(q))]
    name = next(key for key in _list_supports(without[0]) if key in missing)[1]
    table = ' (a list in a table is JSON: ["a", "b"])' * ("," in name)
    return (
        f"{len(missing):,} of {len(wanted):,} supporting passages are not in the corpus, so that evidence "
        f"recall of {len(without):,} of {len(questions):,} questions cannot be whole: '{name}'{table}"
    )


def check_oracle_support(questions: Sequence[Question]) -> None:
    """Raises `ConfigError` where no passage is known that supports a question."""
    for question in questions:
        if not _list_supports(question):
            raise ConfigError(
                f"retrieval.oracle=true: question '{question.id}' has no supporting_ids, and no titles of "
                "supporting passages"
            )


def wrap_oracle(inner: Retriever, questions: Sequence[Question], query: str) -> Retriever:
    """`inner` with the supporting passages of questions first; query: the policy. Raises `ConfigError`."""
    if not isinstance(inner, CorpusRetriever) or not isinstance(inner.corpus, Corpus):
        raise ConfigError("retrieval.oracle=true needs --corpus FILE, not retrieval.url")
    if query != "question":
        raise ConfigError(
            "retrieval.oracle=true needs decode.query_policy=question: its evidence never changes"
        )
    check_oracle_support(questions)
    return OracleRetriever(inner, {build_query(query, q.question).parts[0]: q for q in questions})
