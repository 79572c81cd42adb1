"""Query policies: what becomes a search query, as pure functions of texts.

`QUERIES` names them; a function of one's own, `decode.query_policy=module:function`, takes what those of
the table take, and may return a text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from dlm_rag.config.fields import resolve_or_import
from dlm_rag.text import drop_repeated_words, extract_sentences, normalize_whitespace


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
    return [join_query(each, "") if isinstance(each, str) else each for each in queries]


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


_REFRESHED = ("retrieval_interval", "retrieval_threshold")
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


def is_retrieval_due(step: int, every: int, below: float | None, lowest_confidence: float | None) -> bool:
    """Whether the evidence is refreshed after step `step` (from 1).

    Every `every` steps; with `below`, only when the lowest confidence among the masked positions
    of that step was under it (as FLARE, Jiang et al. 2023, asks only when unsure). None for the
    lowest confidence means that nothing is masked any more. A query that equals the last one is
    never searched for again, whatever this says.
    """
    if step % every:
        return False
    return below is None or (lowest_confidence is not None and lowest_confidence < below)
