"""Query policies: what becomes a search query, as pure functions of texts."""

from dataclasses import dataclass

from dlm_rag.text import drop_repeated_words, extract_sentences, normalize_whitespace


@dataclass(frozen=True)
class Query:
    """One information need in two forms.

    text: a bag of words for sparse retrieval. parts: short texts, each with one topic, for dense
    retrieval (a vector of one long fused text points at none of its topics).
    """

    text: str
    parts: tuple[str, ...]
    asker: str = ""  # whose successive queries differ in a few words


def build_query(
    policy: str, question: str, response: str = "", top_passage: str = "", asker: str = ""
) -> Query:
    """The query of a step.

    policy: `proxy` and `committed` put the question before the response (they differ in which
    guesses `response` holds); `question` ignores the response (static retrieval); `response`
    leaves the question out once there is a response; `feedback` and `two_rounds` put the question
    before `top_passage`, the best passage of the first search (they differ in whether that search's
    results count too).
    question, response, top_passage: texts as decoded. In the part after the question white space is
    folded and repeated words are dropped, as SARDI does.
    """
    added = {"question": "", "feedback": top_passage, "two_rounds": top_passage}.get(policy, response)
    asked = "" if policy == "response" and normalize_whitespace(added) else normalize_whitespace(question)
    text = normalize_whitespace(f"{asked} {drop_repeated_words(added)}")
    parts = [normalize_whitespace(part) for part in (asked, *extract_sentences(added)) if part]
    return Query(text, tuple(dict.fromkeys(parts)), asker)


def resolve_query_threshold(policy: str, query_threshold: float) -> float:
    """The confidence from which a guess enters the query; above 1 for committed tokens only."""
    committed_only = policy == "committed" or query_threshold >= 1.0
    return 2.0 if committed_only else query_threshold


def query_uses_provisional_tokens(policy: str, query_threshold: float) -> bool:
    """Whether a query may hold what is not committed yet."""
    return policy in ("proxy", "response") and resolve_query_threshold(policy, query_threshold) <= 1


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
