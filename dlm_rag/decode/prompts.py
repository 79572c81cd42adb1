"""From a question and what was found to the prompt: one definition for decoding and for its traces."""

from collections.abc import Mapping
from dataclasses import dataclass

from dlm_rag.evidence.layout import Cut, fit
from dlm_rag.tokenizer import Prompt, Tokenizer


@dataclass(frozen=True)
class Room:
    """How evidence is laid out and what must hold it beside the canvas; lengths in tokens."""

    layout: str
    context_length: int
    canvas_length: int
    passage_length: int


@dataclass(frozen=True)
class FittedPrompt:
    """A prompt that fits, and what became of each passage."""

    prompt: Prompt
    texts: dict[str, str]  # by id, in rank order: what of each passage is in the prompt
    dropped: tuple[str, ...]  # ids of the passages without a place, which rank behind all others
    cut: Cut


def fit_passages(
    tokenizer: Tokenizer, question: str, passages: Mapping[str, str], room: Room
) -> FittedPrompt:
    """The prompt for a question and its passages (id -> text as found, in rank order).

    A passage without a place still shapes the prompt: the one before it is not the last fact, which
    alone has no line break behind it where facts are numbered. Raises `QuestionError` when the
    question alone does not fit.
    """
    whole = tokenizer.prompt(question, list(passages.values()))
    prompt, cut = fit(whole, room.layout, room.context_length, room.canvas_length, room.passage_length)
    kept = dict(zip(passages, zip(whole.facts, prompt.facts, strict=True), strict=True))
    return FittedPrompt(
        prompt=prompt,
        texts={
            name: passages[name] if fact == all_of_it else tokenizer.spans(list(fact))[0]
            for name, (all_of_it, fact) in kept.items()
            if fact
        },
        dropped=tuple(name for name, (_, fact) in kept.items() if not fact),
        cut=cut,
    )


def keep_shorter(texts: dict[str, str], more: Mapping[str, str]) -> None:
    """Takes texts up; of a passage cut twice the shorter stays, which makes for a safe citation."""
    for name, text in more.items():
        texts[name] = min(texts.get(name, text), text, key=len)
