"""From a prompt to what the transformer runs: the three evidence layouts.

| layout | context segments (see themselves) | run with the canvas |
|---|---|---|
| `joint` | none | the whole prompt: everything sees everything |
| `prefix` | the prompt | nothing |
| `independent` | each passage, the question | nothing |

The canvas sees itself and every context segment. Keys and values of a segment depend on nothing but
the segment, which is what may be kept between steps and questions.
"""

from dataclasses import dataclass

from dlm_rag.model.rows import Segment
from dlm_rag.tokenizer import Prompt


@dataclass(frozen=True)
class Arrangement:
    """A prompt laid out: segments that see themselves, and the lead that runs before the canvas."""

    context: tuple[Segment, ...]
    lead: Segment


def arrange(prompt: Prompt, layout: str, shifted: bool, passage_length: int) -> Arrangement:
    """Lays a prompt out.

    In a `shifted` denoiser the row before a position predicts it, so the last prompt token runs
    with the canvas whose first token it predicts. In `independent` every passage starts at position
    0 and the question at `passage_length`, wherever the passage ranks and whatever the others are.
    """
    if layout == "joint":
        return Arrangement((), Segment(tuple(prompt.ids), 0))
    if layout == "prefix":
        passages: tuple[Segment, ...] = ()
        question = Segment(tuple(prompt.ids), 0)
    elif layout == "independent":
        passages = tuple(Segment(fact, 0) for fact in prompt.facts if fact)
        question = Segment(prompt.head + prompt.tail, passage_length)
    else:
        raise ValueError(f"'{layout}' is not an evidence layout")
    keep = len(question.ids) - shifted
    lead = Segment(question.ids[keep:], question.start + keep)
    return Arrangement((*passages, Segment(question.ids[:keep], question.start)), lead)
