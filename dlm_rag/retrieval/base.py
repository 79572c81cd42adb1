"""Queries, the retrievers that answer them with ranked passages, and retrievers made of others.

Query policies say what becomes a search query, as pure functions of texts. `QUERIES` names them; a function
of one's own, `decode.query_policy=module:function`, takes the same arguments, and may return a text.
"""

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest
from typing import Any, Generic, Protocol, TypeVar, overload

from dlm_rag.config import RetrievalConfig
from dlm_rag.config.fields import resolve_or_import
from dlm_rag.errors import ConfigError, NamesRemedy, QuestionError
from dlm_rag.files.record_readers import normalize_title
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import Corpus, Passage, get_row_id
from dlm_rag.text import MAX_TITLE_WORDS, extract_sentences, normalize_whitespace

Ranking = list[int]  # rows of the corpus, best first, each once
Hits = list[tuple[float, int]]  # score and row
Support = tuple[str, str]  # what a supporting passage is known by: id or title, and which
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
# Digits after the point in which equal similarities agree, in whatever order an engine adds them up.
TIE_DECIMALS = 6
MAX_CACHED_RESULTS = 65536  # vectors and rankings of query parts: a sentence recurs from step to step
_ROW_END = re.compile("; |###|\n")  # of a title
FUSION_DEPTH = 50  # results of each retriever that hybrid search fuses


@dataclass(frozen=True)
class Query:
    """One information need in two forms.

    - text: a bag of words for sparse retrieval.
    - parts: short texts of one topic for dense retrieval: the vector of a long text matches no topic well.
    """

    text: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class QueryPolicy:
    """What becomes the query of a step.

    - write: maps question, response and the best passage of the first search, to a `Query` or a text.
    - reads_guesses: whether the response has guesses of at least `decode.query_threshold`.
    - merges_rounds: whether the passages of the first search stay, in turn with those of this query.
    - settings: the settings of `decode` that affect it.
    """

    write: Callable[[str, str, str], Query | str]
    reads_guesses: bool = False
    merges_rounds: bool = False
    settings: tuple[str, ...] = ()


def as_queries(queries: Iterable[Query | str] | Query) -> list[Query]:
    """Queries, made of those that are plain texts."""
    given: Any = queries
    if isinstance(queries, Mapping | bytes) or not isinstance(queries, Iterable):
        given = [queries]
    found = [join_query(each, "") if isinstance(each, str) else each for each in given]
    if wrong := [each for each in found if not isinstance(each, Query)]:
        raise QuestionError(f"a query is {type(wrong[0]).__name__}: give a text, or a list of texts")
    return found


def join_query(question: str, added: str, lists_titles: bool = False) -> Query:
    """The question, then what is added: white space folded, repeated words dropped, as SARDI does.

    lists_titles: whether titles in a row ("Emma; Jane Austen") are parts each; the one under way is looked
    for with the question, for the beginning of a name alone finds others.
    """
    asked = normalize_whitespace(question)
    text = " ".join((asked, *dict.fromkeys(added.split()))).strip()
    in_row = lists_titles and "; " in added
    clauses = _split_row(added) if in_row else extract_sentences(added)
    if in_row and clauses and added.rstrip()[-1] not in ";#":
        clauses[-1] = f"{asked} {clauses[-1]}"
    parts = (asked, *map(normalize_whitespace, clauses))
    return Query(text, tuple(dict.fromkeys(filter(None, parts))))


def _split_row(added: str) -> list[str]:
    """Titles in a row, with all their stops ("J. R. R. Tolkien"); what is longer than one, by sentences."""
    parts = [part.strip() for part in _ROW_END.split(added) if part.strip()]
    long = (len(part.split()) > MAX_TITLE_WORDS for part in parts)
    split = (extract_sentences(part) if cut else [part] for part, cut in zip(parts, long, strict=True))
    return [clause for clauses in split for clause in clauses]


def ask_with_response(question: str, response: str, top_passage: str) -> Query:
    return join_query(question, response, lists_titles=True)


def ask_with_passage(question: str, response: str, top_passage: str) -> Query:
    return join_query(question, top_passage)


_REFRESHED = ("retrieval_interval",)
_GUESSED = ("query_threshold", "query_window", *_REFRESHED)
QUERIES = {
    "proxy": QueryPolicy(ask_with_response, reads_guesses=True, settings=_GUESSED),
    "committed": QueryPolicy(ask_with_response, settings=_REFRESHED),
    "question": QueryPolicy(lambda question, *_: join_query(question, "")),  # static retrieval
    "two_rounds": QueryPolicy(ask_with_passage, merges_rounds=True, settings=_REFRESHED),
    "feedback": QueryPolicy(ask_with_passage, settings=_REFRESHED),
}


@cache
def find_query_policy(name: str) -> QueryPolicy:
    """The policy called so in `QUERIES`, or a `QueryPolicy` or its `write` at `module:name`."""
    found = resolve_or_import(QUERIES, name, "decode.query_policy", 3)
    return found if isinstance(found, QueryPolicy) else QueryPolicy(found, reads_guesses=True)


def build_query(policy: str, question: str, response: str = "", top_passage: str = "") -> Query:
    """The query of a step; question, response, top_passage: texts as decoded."""
    query = find_query_policy(policy).write(question, response, top_passage)
    if not isinstance(query, (str, Query)):
        raise ConfigError(f"decode.query_policy={policy} returned {type(query).__name__}, not a text")
    return query if isinstance(query, Query) else join_query(query, "")


def resolve_query_threshold(policy: str, query_threshold: float) -> float:
    """The confidence from which a guess enters the query; above 1 for committed tokens only."""
    committed_only = not find_query_policy(policy).reads_guesses or query_threshold >= 1.0
    return 2.0 if committed_only else query_threshold


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
        `UserError` where no answer of the run can be right, `SearchUnavailableError` where no search is
        possible now. After any other error each query is searched alone: one costs no other its own.
        """


class SearchUnavailableError(RuntimeError):
    """A service gave no answer, or none that can be used; one sentence that names it."""


class TextRetriever(NamesRemedy, ABC):
    """A `Retriever` that takes plain texts, too. Subclasses need `search_queries` and a fingerprint.

    query_fields: the fields of `Query` that a result depends on.
    """

    query_fields: tuple[str, ...] = ("text",)
    _instead = dict.fromkeys(
        ("retrieve", "query", "invoke", "get_relevant_documents", "similarity_search", "get"),
        "search(text)",
    ) | {"batch_search": "search(texts)", "documents": "corpus", "passages": "corpus"}

    def key(self, query: Query) -> Hashable:
        return tuple(getattr(query, name) for name in self.query_fields)

    @overload
    def search(self, queries: str, **unknown: Any) -> list[Passage]: ...
    @overload
    def search(self, queries: Sequence[Query | str], **unknown: Any) -> list[list[Passage]]: ...
    def search(
        self, queries: str | Sequence[Query | str], **unknown: Any
    ) -> list[Passage] | list[list[Passage]]:
        """As in `Retriever`, also for plain texts; a single text gets its passages alone."""
        for name in unknown:
            raise ConfigError(f"search has no setting '{name}': write load_retriever(corpus, top_k=...)")
        if isinstance(queries, str):
            return self.search_queries(as_queries([queries]))[0]
        return self.search_queries(as_queries(queries))

    @abstractmethod
    def search_queries(self, queries: list[Query]) -> list[list[Passage]]:
        """As in `Retriever.search`."""


class CorpusRetriever(TextRetriever):
    """A `Retriever` for the `top_k` best passages of a corpus. Subclasses only need `rank`.

    leaves_out: whether what is not found is not wanted, also where the whole corpus fits.
    """

    leaves_out = False
    weights = ""  # digest of those that rank, if any do

    def __init__(self, corpus: Corpus, top_k: int) -> None:
        self.corpus, self.top_k = corpus, min(top_k, len(corpus))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.corpus):,} passages, top_k={self.top_k})"

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint + self.weights

    @abstractmethod
    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        """For each query at most `depth` rows, best first; equal ones always in the same order."""

    def rank_scored(self, queries: Sequence[Query], depth: int) -> list[dict[int, float]]:
        """The rows of `rank` in the same order with scores; 1 / rank if there are no others."""
        return [{row: 1 / n for n, row in enumerate(rows, start=1)} for rows in self.rank(queries, depth)]

    def search_queries(self, queries: list[Query]) -> list[list[Passage]]:
        found = self.search_scored(queries, self.top_k)
        return [[passage for passage, _ in scored] for scored in found]

    def search_scored(self, queries: Sequence[Query], depth: int) -> list[list[tuple[Passage, float]]]:
        """As `search` with `depth` for `top_k`, each passage with its score, 0 where it was not found.

        Where the whole corpus fits there is nothing to choose: once a query finds anything, the passages
        it did not find follow in corpus order.
        """
        depth = min(depth, len(self.corpus))
        ranked = self.rank_scored(queries, depth)
        for scores in ranked:
            if scores and depth == len(self.corpus) and not self.leaves_out:
                scores |= {row: 0.0 for row in range(depth) if row not in scores}
        rows = sorted({row for scores in ranked for row in scores})
        passages = dict(zip(rows, self.corpus.read_passages(rows), strict=True))
        return [[(passages[row], score) for row, score in scores.items()] for scores in ranked]


def count_passages(retriever: Retriever) -> int | None:
    """How many passages are searched; None where a service does it."""
    return len(retriever.corpus) if isinstance(retriever, CorpusRetriever) else None


def select_top_hits(hits: Hits, depth: int) -> Hits:
    """The `depth` best hits, best first; those whose scores agree in `TIE_DECIMALS` in corpus order."""
    return sorted(hits, key=lambda hit: (-round(hit[0], TIE_DECIMALS), hit[1]))[:depth]


def interleave_rankings(rankings: Sequence[Sequence[K]], depth: int) -> list[K]:
    """The best of each ranking in turn, then the second of each, and so on; each row once."""
    turns = dict.fromkeys(chain.from_iterable(zip_longest(*rankings)))
    return [row for row in turns if row is not None][:depth]


class MemoizedBatchFunction(Generic[K, V]):
    """Computes a value for each key, and remembers some `most` of them; any number of threads may ask.
    `compute` gets several keys at once, and is never called by two threads at a time."""

    def __init__(self, compute: Callable[[list[K]], Iterable[V]], most: int = MAX_CACHED_RESULTS) -> None:
        self._compute, self._most = compute, most
        self._known: dict[K, V] = {}
        self._lock = threading.Lock()

    def __call__(self, keys: Iterable[K]) -> list[V]:
        keys = list(keys)
        with self._lock:
            if len(self._known) > self._most:
                self._known.clear()
            if new := [key for key in dict.fromkeys(keys) if key not in self._known]:
                self._known.update(zip(new, self._compute(new), strict=True))
            return [self._known[key] for key in keys]


def fuse_rankings(rankings: Sequence[Ranking], depth: int, fusion_depth: int) -> Ranking:
    """Reciprocal rank fusion (Cormack et al. 2009): the first ranks each give 1 / (60 + rank).

    Rank counts from 1. Ties go to the row that came first in the earliest ranking. The rows of the last
    ranking beyond every first `fusion_depth` follow in its order: deeper results begin with shallower ones.
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, row in enumerate(ranking[:fusion_depth], start=1):
            scores[row] = scores.get(row, 0.0) + 1.0 / (60 + rank)
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


def open_no_retriever(config: RetrievalConfig, corpus: Corpus) -> NoRetriever:
    return NoRetriever(corpus, config.top_k)


class OracleRetriever(CorpusRetriever):
    """First the passages that support a question, then what another retriever finds for it.

    Of several passages with a supporting title, or of a supporting row that was cut, the first of each come
    first, then the second of each. `questions`: by the first part of their queries. Raises `ConfigError`
    for one whose supporting passages are not all in the corpus.
    """

    query_fields = ("parts",)

    def __init__(self, inner: CorpusRetriever, questions: Mapping[str, Question]) -> None:
        super().__init__(inner.corpus, inner.top_k)
        self._inner, self._rows, self.weights = inner, dict[str, Ranking](), inner.weights
        rows = _find_supports(questions.values(), inner.corpus)
        for part, question in questions.items():
            keys, place = _list_supports(question), question.place or question.id
            for _, name in (key for key in keys if not rows[key]):
                raise ConfigError(f"{place}: the supporting passage '{name}' is not in {inner.corpus.path}")
            self._rows[part] = interleave_rankings([rows[key] for key in keys], len(inner.corpus))
        self.leaves_out = inner.leaves_out

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        found = self._inner.rank(queries, depth)
        return [
            list(dict.fromkeys((*self._rows[query.parts[0]], *rows)))[:depth]
            for query, rows in zip(queries, found, strict=True)
        ]


def _list_supports(question: Question) -> list[Support]:
    """What the supporting passages of a question are known by: their ids, else their titles."""
    if question.supporting_ids:
        return [("id", name) for name in question.supporting_ids]
    return [("title", normalize_title(title)) for title in question.supporting_titles]


def _find_supports(questions: Iterable[Question], corpus: Sequence[Passage]) -> dict[Support, Ranking]:
    """The rows of all passages that support questions; an empty list for one that is not there."""
    found: dict[Support, Ranking] = {key: [] for question in questions for key in _list_supports(question)}
    titled = any(kind == "title" for kind, _ in found)
    for row, passage in enumerate(corpus if found else ()):
        keys = [("id", passage.id), ("id", get_row_id(passage.id))]
        if titled:
            keys.append(("title", normalize_title(passage.text.partition("\n")[0])))
        for key in dict.fromkeys(keys):
            if key in found:
                found[key].append(row)
    return found


def describe_missing_support(questions: Sequence[Question], corpus: Sequence[Passage]) -> str:
    """A sentence on the supporting passages that a corpus lacks; "" where it has all."""
    wanted = _find_supports(questions, corpus)
    missing = [name for name, rows in wanted.items() if not rows]
    if not missing:
        return ""
    lacking = sum(not all(wanted[key] for key in _list_supports(question)) for question in questions)
    table = ' (a list in a table is JSON: ["a", "b"])' * ("," in missing[0][1])
    return (
        f"{len(missing):,} of {len(wanted):,} supporting passages are not in the corpus, so that evidence "
        f"recall of {lacking:,} of {len(questions):,} questions cannot be whole: '{missing[0][1]}'{table}"
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
        raise ConfigError("retrieval.oracle=true needs decode.query_policy=question: its evidence is fixed")
    check_oracle_support(questions)
    asked = dict[str, Question]()
    for each in questions:
        same = asked.setdefault(build_query(query, each.question).parts[0], each)
        if {*_list_supports(same)} != {*_list_supports(each)}:
            both = f"'{same.id}' and '{each.id}' ask the same"
            raise ConfigError(f"retrieval.oracle=true: {both}, but their supporting passages differ")
    return OracleRetriever(inner, asked)
