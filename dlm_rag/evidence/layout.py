"""From a prompt to what the transformer runs: the three evidence layouts, and what does not fit.

| layout | context segments (see themselves) | run with the canvas |
|---|---|---|
| `joint` | none | the whole prompt: everything sees everything |
| `prefix` | the prompt | nothing |
| `independent` | each passage, the question | nothing |

The canvas sees itself and every context segment. Keys and values of a segment depend on nothing but
the segment, which is what may be kept between steps and questions.
"""

from dataclasses import dataclass

from dlm_rag.errors import QuestionError
from dlm_rag.model.rows import Segment
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.tokenizer import Prompt


@dataclass(frozen=True)
class Arrangement:
    """A prompt laid out: segments that see themselves, and the lead that runs before the canvas."""

    context: tuple[Segment, ...]
    lead: Segment


@dataclass(frozen=True)
class Cut:
    """What of the evidence did not fit into the context."""

    tokens: int = 0
    passages_shortened: int = 0
    passages_dropped: int = 0


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


def fit(
    prompt: Prompt, layout: str, context_length: int, canvas_length: int, passage_length: int
) -> tuple[Prompt, Cut]:
    """The prompt with as much evidence as the context holds, and what was cut.

    `joint` and `prefix`: passages keep their tokens in rank order until the context is full; the one
    that crosses the end is shortened, later ones are dropped. `independent`: each passage is
    shortened to `passage_length`. What is dropped leaves an empty fact. Raises `QuestionError` when
    the question alone does not fit.
    """
    fixed = len(prompt.head) + len(prompt.tail) + canvas_length
    if layout == "independent":
        room, limits = context_length - passage_length - fixed, [passage_length] * len(prompt.facts)
    else:
        room, limits = context_length - fixed, []
        for fact in prompt.facts:
            limits.append(max(0, min(len(fact), room - sum(limits))))
    if room < 0:
        raise QuestionError(
            f"the question is {-room} tokens too long: the context of {context_length} must hold it "
            f"beside the canvas of {canvas_length}"
        )
    facts = [fact[:limit] for fact, limit in zip(prompt.facts, limits, strict=True)]
    lost = [len(fact) - len(kept) for fact, kept in zip(prompt.facts, facts, strict=True)]
    cut = Cut(
        tokens=sum(lost),
        passages_shortened=sum(1 for kept, n in zip(facts, lost, strict=True) if n and kept),
        passages_dropped=sum(1 for kept in facts if not kept),
    )
    return Prompt(prompt.head, tuple(facts), prompt.tail), cut


def fit_to(prompt: Prompt, shape: DenoiserConfig) -> Prompt:
    """As `fit`, with the layout, context and canvas of a denoiser's own config."""
    return fit(
        prompt, shape.evidence_layout, shape.max_position_embeddings, shape.canvas_length,
        shape.passage_length,
    )[0]  # fmt: skip
