"""When no answer is given: the model says that it knows none, or it names what no passage has."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dlm_rag.text import extract_names, split_words

# What a model that was trained to abstain writes for an answer: none is in the passages; none can be.
UNKNOWN, UNCLEAR = "unknown", "unclear"
ABSTAIN_REASONS = {
    "no_passage": "no passage that was found tells it",
    "unknown_form": "this is not a form of question that the model knows",
    "unsupported_words": "it would take names or numbers that are in no passage",
    "not_copied": "no passage that was found has the answer as it was written",
    "unknown_words": "no passage that was found has the names of the question",
    "unsure": "the model was not sure enough of what it wrote",
}
_REASON_BY_WORD = {UNKNOWN: "no_passage", UNCLEAR: "unknown_form"}


def find_unsupported_names(
    units: Iterable[Mapping[str, Any]], question: str, passages: Iterable[str]
) -> dict[str, str]:
    """Names and numbers that neither a passage nor the question has, each with the kind of the last unit.

    units: as `cite_passages` gives them. passages: the texts of all that were found.
    """
    found = {
        word: unit["kind"]
        for unit in units
        for word in unit["unsupported"]
        if word in extract_names(unit["text"]) - {"yes"}
    }
    if not found:
        return found
    known = {*split_words(question)}.union(*map(split_words, passages))
    return {word: kind for word, kind in found.items() if word not in known}


def find_abstain_reason(
    mode: str,
    answer: str,
    unsupported_kinds: Collection[str],
    said: str,
    question: str,
    passages: Iterable[str],
) -> str:
    """A key of `ABSTAIN_REASONS`, or "" where the answer is given.

    mode: as `decode.abstain`. answer: as it is written, said: what stands before it. unsupported_kinds: of
    units with unsupported names. passages: the texts of all that were found.
    """
    if mode == "never" or not answer:
        return ""
    if reason := _REASON_BY_WORD.get(answer.casefold()):
        return reason
    if {"answer"} & {*unsupported_kinds} if mode == "answer" else unsupported_kinds:
        return "unsupported_words"
    if mode != "copied":
        return ""
    texts = [_fold(text) for text in passages]
    if _fold(answer) not in _fold(said) or not any(_fold(answer) in text for text in texts):
        return "not_copied"
    names = extract_names(question.partition(" ")[2])  # without the word that begins it
    return "unknown_words" if any(not any(f" {name} " in text for text in texts) for name in names) else ""


def _fold(text: str) -> str:
    """The words of a text between single blanks, to look for words in a row."""
    return f" {' '.join(split_words(text))} "
