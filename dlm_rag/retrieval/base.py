"""Queries and what a retriever does with them: ranked passages; and the kind that ranks rows of a corpus.

Query policies say what becomes a search query, as pure functions of texts. `QUERIES` names them; a function
of one's own, `decode.query_policy=module:function`, takes what those of the table take, and may return a
text.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, Protocol, TypeVar, overload

from dlm_rag.config.fields import resolve_or_import
from dlm_rag.errors import NamesRemedy, QuestionError, UserError
from dlm_rag.retrieval.corpus import Corpus, Passage
from dlm_rag.text import drop_repeated_words, extract_sentences, normalize_whitespace

log = logging.getLogger(__name__)

Ranking = list[int]  # rows of the corpus, best first, each once
Hits = list[tuple[float, int]]  # score and row
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
# Digits after the point in which equal similarities agree, in whatever order an engine adds them up.
TIE_DECIMALS = 6
MAX_CACHED_RESULTS = 65536  # vectors and rankings of query parts: a sentence recurs from step to step


@dataclass(frozen=True)
class Query:
    """One information need in two forms.

    - text: a bag of words for sparse retrieval.
    - parts: short texts with one topic each for dense retrieval: the vector of one long text matches none
      of its topics well.
    """

    text: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class QueryPolicy:
    """What becomes the query of a step.

    - write: maps question, response and the best passage of the first search, to a `Query` or a text.
    - reads_guesses: whether the response includes guesses with a confidence of at least
      `decode.query_threshold`.
    - merges_rounds: whether the passages of the first search stay in the evidence, in turn with those of
      this query.
    - settings: the settings of `decode` that affect it.
    """

    write: Callable[[str, str, str], Query | str]
    reads_guesses: bool = False
    merges_rounds: bool = False
    settings: tuple[str, ...] = ()


def as_queries(queries: Sequence[Query | str]) -> list[Query]:
    """Queries, made of those that are plain texts."""
    found = [join_query(each, "") if isinstance(each, str) else each for each in queries]
    if wrong := [each for each in found if not isinstance(each, Query)]:
        raise QuestionError(f"a query is {type(wrong[0]).__name__}: give a text, or a list of texts")
    return found


def join_query(question: str, added: str) -> Query:
    """The question, then what is added: white space folded, repeated words dropped, as SARDI does."""
    asked = normalize_whitespace(question)
    text = normalize_whitespace(f"{asked} {drop_repeated_words(added)}")
    parts = [normalize_whitespace(part) for part in (asked, *extract_sentences(added)) if part]
    return Query(text, tuple(dict.fromkeys(parts)))


def ask_with_passage(question: str, response: str, top_passage: str) -> Query:
    return join_query(question, top_passage)


def ask_with_response(question: str, response: str, top_passage: str) -> Query:
    return join_query(question, response)


_REFRESHED = ("retrieval_interval",)
QUERIES = {
    "proxy": QueryPolicy(
        ask_with_response, reads_guesses=True, settings=("query_threshold", "query_window", *_REFRESHED)
    ),
    "committed": QueryPolicy(ask_with_response, settings=_REFRESHED),
    "question": QueryPolicy(lambda question, *_: join_query(question, "")),  # static retrieval
    "two_rounds": QueryPolicy(ask_with_passage, merges_rounds=True, settings=_REFRESHED),
    "feedback": QueryPolicy(ask_with_passage, settings=_REFRESHED),
}


@cache
def find_query_policy(name: str) -> QueryPolicy:
    """The policy of that name in `QUERIES`, or at `module:name`: a `QueryPolicy`, or its `write` alone.

    Raises `ConfigError` where there is none.
    """
    found = resolve_or_import(QUERIES, name, "decode.query_policy")
    return found if isinstance(found, QueryPolicy) else QueryPolicy(found, reads_guesses=True)


def build_query(policy: str, question: str, response: str = "", top_passage: str = "") -> Query:
    """The query of a step; question, response, top_passage: texts as decoded."""
    query = find_query_policy(policy).write(question, response, top_passage)
    return query if isinstance(query, Query) else join_query(query, "")


def resolve_query_threshold(policy: str, query_threshold: float) -> float:
    """The confidence from which a guess enters the query; above 1 for committed tokens only."""
    committed_only = not find_query_policy(policy).reads_guesses or query_threshold >= 1.0
    return 2.0 if committed_only else query_threshold


def query_uses_provisional_tokens(policy: str, query_threshold: float) -> bool:
    """Whether a query may hold what is not committed yet."""
    return resolve_query_threshold(policy, query_threshold) <= 1


class Retriever(Protocol):
    """Finds evidence for queries, wherever the passages are.

    `search` may run in its own thread while `key` is called. `key` must not raise.
    """

    @property
    def fingerprint(self) -> str:
        """Identifies the passages: what results depend on besides the settings."""

    def key(self, query: Query) -> Hashable:
        """What the result depends on; not None. Queries with equal keys find the same passages."""

    def search(self, queries: Sequence[Query]) -> list[list[Passage]]:
        """The passages for each query, best first, each once; an empty list if a query finds nothing.

        Equal scores are in any order that is always the same, perhaps another for another `top_k`. Raises
        the error if the search failed for all queries, `PartialSearchError` if it failed for some.
        """


class SearchUnavailableError(RuntimeError):
    """A service gave no answer, or none that can be used; one sentence that names it."""


class PartialSearchError(RuntimeError):
    """Some queries of a batch failed. `results` has the passages or the error of each query."""

    def __init__(self, results: list[list[Passage] | Exception]) -> None:
        errors = [error for error in results if isinstance(error, Exception)]
        super().__init__(f"{len(errors)} of {len(results)} queries failed, the first with: {errors[0]}")
        self.results = results


class CorpusRetriever(NamesRemedy, ABC):
    """A `Retriever` for the `top_k` best passages of a corpus. Subclasses only need `rank`.

    query_fields: the fields of `Query` that a result depends on.
    """

    query_fields: tuple[str, ...] = ("text",)
    _instead = dict.fromkeys(
        ("retrieve", "query", "invoke", "get_relevant_documents", "similarity_search", "get"),
        "search(text)",
    ) | {"batch_search": "search(texts)", "documents": "corpus", "passages": "corpus"}

    def __init__(self, corpus: Corpus, top_k: int) -> None:
        self.corpus, self.top_k = corpus, min(top_k, len(corpus))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.corpus):,} passages, top_k={self.top_k})"

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    @abstractmethod
    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        """For each query the best rows of the corpus, at most `depth`, best first; ties in corpus order."""

    def key(self, query: Query) -> Hashable:
        return tuple(getattr(query, name) for name in self.query_fields)

    @overload
    def search(self, queries: str) -> list[Passage]: ...  # type: ignore[overload-overlap]
    @overload
    def search(self, queries: Sequence[Query | str]) -> list[list[Passage]]: ...
    def search(self, queries: str | Sequence[Query | str]) -> list[Passage] | list[list[Passage]]:
        """As in `Retriever`, also for plain texts; a single text gets its passages alone.

        A batch that fails is searched query by query, so one costs no other its own.

        What is wrong with all, a corpus that has changed or an engine that does not answer, is raised.
        Where the whole corpus fits into `top_k` there is nothing to choose: once a query finds anything,
        the passages it did not find follow in corpus order.
        """
        if isinstance(queries, str):
            return self.search([queries])[0]
        if not isinstance(queries, Iterable):
            queries = [queries]
        queries = as_queries(queries)
        try:
            return self._search(queries)
        except (UserError, SearchUnavailableError):
            raise
        except Exception:
            if len(queries) == 1:
                raise
        results: list[list[Passage] | Exception] = []
        for query in queries:
            try:
                results += self._search([query])
            except Exception as error:
                log.warning("a search failed", exc_info=error)
                results.append(error)
        found = [passages for passages in results if not isinstance(passages, Exception)]
        if len(found) < len(results):
            raise PartialSearchError(results)
        return found

    def _search(self, queries: Sequence[Query]) -> list[list[Passage]]:
        ranked = [dict.fromkeys(rows, 0.0) for rows in self.rank(queries, self.top_k)]
        found = self._read_ranked(ranked, self.top_k)
        return [[passage for passage, _ in scored] for scored in found]

    def rank_scored(self, queries: Sequence[Query], depth: int) -> list[dict[int, float]]:
        """The rows of `rank` in the same order with scores; 1 / rank if there are no others."""
        return [{row: 1 / n for n, row in enumerate(rows, start=1)} for rows in self.rank(queries, depth)]

    def search_scored(self, queries: Sequence[Query], depth: int) -> list[list[tuple[Passage, float]]]:
        """As `search` with `depth` for `top_k`, each passage with its score, 0 where it was not found."""
        depth = min(depth, len(self.corpus))
        return self._read_ranked(self.rank_scored(queries, depth), depth)

    def _read_ranked(
        self, ranked: Sequence[dict[int, float]], depth: int
    ) -> list[list[tuple[Passage, float]]]:
        """The passages of rows, followed by all others where rows were found and `depth` is the corpus."""
        for scores in ranked:
            if scores and depth == len(self.corpus):
                scores |= {row: 0.0 for row in range(depth) if row not in scores}
        rows = sorted({row for scores in ranked for row in scores})
        passages = dict(zip(rows, self.corpus.read_passages(rows), strict=True))
        return [[(passages[row], score) for row, score in scores.items()] for scores in ranked]


def select_top_hits(hits: Hits, depth: int) -> Hits:
    """The `depth` best hits, best first; those whose scores agree in `TIE_DECIMALS` in corpus order."""
    return sorted(hits, key=lambda hit: (-round(hit[0], TIE_DECIMALS), hit[1]))[:depth]


def interleave_rankings(rankings: Sequence[Sequence[K]], depth: int) -> list[K]:
    """The best of each ranking in turn, then the second of each, and so on; each row once."""
    longest = max(map(len, rankings), default=0)
    turns = [ranking[rank] for rank in range(longest) for ranking in rankings if rank < len(ranking)]
    return list(dict.fromkeys(turns))[:depth]


class MemoizedBatchFunction(Generic[K, V]):
    """Computes a value for each key, and remembers it; any number of threads may ask.

    `compute` gets several keys at once, and is never called by two threads at a time.
    """

    def __init__(self, compute: Callable[[list[K]], Iterable[V]], most: int = MAX_CACHED_RESULTS) -> None:
        """most: values that are kept from one call to the next."""
        self._compute, self._most = compute, most
        self._known: dict[K, V] = {}
        self._lock = threading.Lock()

    def __call__(self, keys: Iterable[K]) -> list[V]:
        keys = list(keys)
        with self._lock:
            new = [key for key in dict.fromkeys(keys) if key not in self._known]
            if len(self._known) + len(new) > self._most:
                self._known.clear()
                new = list(dict.fromkeys(keys))
            if new:
                self._known.update(zip(new, self._compute(new), strict=True))
            return [self._known[key] for key in keys]


def count_passages(retriever: Retriever) -> int | None:
    """How many passages are searched; None where a service does it."""
    return len(retriever.corpus) if isinstance(retriever, CorpusRetriever) else None
