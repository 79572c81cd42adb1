"""Evidence layouts: where the tokens of a prompt stand, and what stays valid when the evidence changes.

    joint         the prompt runs with the canvas: every token sees every other
    prefix        the prompt sees itself alone: valid until any passage of it changes
    independent   so does each passage, from position 0, and the question, from `passage_length`: a passage
                  is valid wherever it ranks and whatever the others are, and is cut to `passage_length`

In all of them the canvas sees the whole prompt.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

PlacedTokens = tuple[Sequence[int], int]  # ids, and the position of the first


class EvidenceLayout(NamedTuple):
    """A layout of evidence.

    place: a `tokenizer.Prompt` and `passage_length` to the segments that see themselves alone, in the order
    in which the canvas sees them; empty ones are left out, the last one holds the question.
    runs_with_canvas: whether the last one runs at every step, with the canvas, and sees it.
    separate_passages: whether the segment of a passage depends on that alone: it stays valid when others
    change, is cut to `passage_length`, and its fact has no number.
    """

    place: Callable[[Any, int], Sequence[PlacedTokens]]
    runs_with_canvas: bool = False
    separate_passages: bool = False


def place_whole_prompt(prompt: Any, passage_length: int) -> list[PlacedTokens]:
    return [(prompt.ids, 0)]


def place_passages_apart(prompt: Any, passage_length: int) -> list[PlacedTokens]:
    """Each passage from position 0, then the question after the longest of them."""
    return [*((fact, 0) for fact in prompt.facts), (prompt.head + prompt.tail, passage_length)]


EVIDENCE_LAYOUTS = {
    "joint": EvidenceLayout(place_whole_prompt, runs_with_canvas=True),
    "prefix": EvidenceLayout(place_whole_prompt),
    "independent": EvidenceLayout(place_passages_apart, separate_passages=True),
    "parallel": EvidenceLayout(place_passages_apart, runs_with_canvas=True, separate_passages=True),
}
