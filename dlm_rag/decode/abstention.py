"""When no answer is given: the model says that it knows none, or its words are in no passage."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from typing_extensions import TypedDict

from dlm_rag.text import (
    content_words,
    extract_names,
    extract_sentences,
    find_named_passages,
    normalize_whitespace,
    replace_control_chars,
    split_words,
)

# What a model that was trained to abstain writes for an answer: none is in the passages; none can be.
UNKNOWN, UNCLEAR = "unknown", "unclear"
ABSTAIN_REASONS = {
    "no_passage": "the model read no answer in the passages found",
    "unknown_form": "this is not a form of question that the model knows",
    "no_answer": "what was written has no answer",
    "unsupported_words": "what was written has words that no passage has",
    "not_named": "the passages that were named before the answer do not have it",
}
MAX_SENTENCE_CHARS = 300  # of a sentence that is shown where no answer is given
_OWN_WORDS = {UNKNOWN, UNCLEAR, "yes"}  # of answers: these need no passage; nor do function words
_REASON_BY_WORD = {UNKNOWN: "no_passage", UNCLEAR: "unknown_form"}


class ClosestPassage(TypedDict):
    """A passage that has words of the question, its title, and its sentence that has most of them."""

    id: str
    title: str
    sentence: str


def find_closest(question: str, passages: Mapping[str, str], most: int = 2) -> list[ClosestPassage]:
    """Returns the passages whose best sentence, with the title, has most content words of the question.

    Of equals those whose whole text has more of them, then the first; none that has no word of it.
    """
    asked = {word for word, _ in content_words(question, 0, len(question))} or {*split_words(question)}
    ranked = []
    for name, text in passages.items():
        head, _, rest = text.strip().partition("\n")
        title, body = (head.strip('"'), rest) if rest.strip() else ("", head)
        titled = asked & {*split_words(title)}
        sentences = extract_sentences(body) or [body]
        held = [asked & {*split_words(sentence)} for sentence in sentences]
        scores = [(len(titled | own), len(own)) for own in held]
        best = max(scores)
        if best[0]:
            words = len(titled.union(*held))
            ranked.append(((best[0], words), name, title or name, sentences[scores.index(best)]))
    ranked.sort(key=lambda found: found[0], reverse=True)  # stable: of equals the first found stays first
    return [
        {"id": name, "title": title, "sentence": _clip(sentence)}
        for _, name, title, sentence in ranked[:most]
    ]


def describe_abstention(reason: str, closest: Collection[ClosestPassage]) -> str:
    """Returns in a sentence that no answer is given, and why; it leads over to what is closest, if any."""
    if not closest:
        return f"I do not know: {ABSTAIN_REASONS[reason]}."
    why = "" if reason == "no_passage" else f" ({ABSTAIN_REASONS[reason]})"
    return f"I could not read an answer in these{why}; closest:"


def _clip(sentence: str) -> str:
    """The sentence on one line, of a very long one the beginning."""
    line = normalize_whitespace(replace_control_chars(sentence))
    return line if len(line) <= MAX_SENTENCE_CHARS else f"{line[: MAX_SENTENCE_CHARS - 1]}…"


def find_unsupported_words(
    units: Iterable[Mapping[str, Any]], question: str, passages: Iterable[str]
) -> dict[str, str]:
    """Words that neither a passage nor the question has, each with the kind of the last unit that has it.

    Of the answer all but function words, of the sentences before it names and numbers: these have words of
    their own ("lies in"). units: as `cite_passages` gives them. passages: the texts of all that were found.
    """
    found = {
        word: unit["kind"]
        for unit in units
        for word in unit["unsupported"]
        if word not in _OWN_WORDS and (unit["kind"] == "answer" or word in extract_names(unit["text"]))
    }
    if not found:
        return found
    known = {*split_words(question)}.union(*map(split_words, passages))
    return {word: kind for word, kind in found.items() if word not in known}


def find_abstain_reason(
    mode: str,
    answer: str,
    unsupported_kinds: Collection[str],
    titles: str | None,
    passages: Mapping[str, str],
) -> str:
    """Returns a key of `ABSTAIN_REASONS`, or "" where the answer is given.

    mode: as `decode.abstain`. answer: as it is written. unsupported_kinds: of units with unsupported words.
    titles: what stands before the answer where a model names its passages there, else None. passages: the
    texts of all that were found, by id.
    """
    if mode == "never":
        return ""
    if not answer:
        return "" if titles is None else "no_answer"  # of others the response is shown as it is
    if reason := _REASON_BY_WORD.get(answer.casefold()):
        return reason
    if {"answer"} & {*unsupported_kinds} if mode == "answer" else unsupported_kinds:
        return "unsupported_words"
    return "" if titles is None or _named_have_answer(answer, titles, passages) else "not_named"


def _named_have_answer(answer: str, titles: str, passages: Mapping[str, str]) -> bool:
    """Whether a passage is named, and every content word of the answer is in one of those named."""
    named = find_named_passages(titles, passages)
    known = _OWN_WORDS.union(*(split_words(passages[name]) for name in named))
    return bool(named) and all(word in known for word, _ in content_words(answer, 0, len(answer)))
