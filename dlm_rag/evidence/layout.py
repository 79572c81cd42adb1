"""From a prompt to what the transformer runs: the three evidence layouts, and what finished blocks see.

| layout | segments that see themselves alone | run with the canvas |
|---|---|---|
| `joint` | none | the whole prompt: everything sees everything |
| `prefix` | the prompt | nothing |
| `independent` | each passage, the question | nothing |

The canvas sees itself and every segment. Keys and values of a segment depend on nothing but the segment,
which is what may be kept between steps and questions.

Where attention runs in blocks, finished blocks of the canvas are computed once, too, in the order in which
things stand: each sees what is before it. So the order says what finished blocks see (`FINISHED_BLOCKS`):

| | order | when the evidence changes |
|---|---|---|
| `reread` | passages, question, finished blocks, window | finished blocks run again |
| `text` | question, finished blocks, passages, window | nothing runs again |
| `append` | as they came: new passages behind the blocks that were finished by then | nothing runs again |
| `kept` | as `reread` | nothing runs again: they keep what they saw (an ablation) |
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlm_rag.errors import ConfigError
from dlm_rag.model.rows import Segment
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.tokenizer import Prompt

LAST = 2**62  # behind all finished blocks, however many there are


@dataclass(frozen=True)
class Arrangement:
    """A prompt laid out.

    context: segments that see themselves alone, in front. lead: what runs before the canvas; lead and
    canvas are one chain, whose blocks are `first` tokens and then `block` each (None: one block). later:
    segments that see themselves alone and stand in the chain, behind so many of its tokens, ascending.
    kept: whether finished blocks keep what they saw when something before them changes. led: whether the
    last token of a block predicts the first of the next. whole: whether the last block must be whole.
    """

    context: tuple[Segment, ...]
    lead: Segment
    first: int = 0
    block: int | None = None
    later: tuple[tuple[int, Segment], ...] = ()
    kept: bool = False
    led: bool = False
    whole: bool = False

    def chain(self, canvas: Sequence[int]) -> Segment:
        """Lead and canvas."""
        return Segment((*self.lead.ids, *canvas), self.lead.start, self.first, self.block)

    def block_of(self, position: int) -> tuple[int, int]:
        """The canvas positions, from and up to, of the block that a canvas position is in.

        The first one is below 0 where a block begins in the prompt.
        """
        lead = len(self.lead.ids)
        if self.block is None:
            return 0, LAST
        behind = lead + position - self.first
        if behind < 0:
            return -lead, self.first - lead
        begin = position - behind % self.block
        return begin, begin + self.block

    def canvas_length(self, least: int) -> int:
        """Of a canvas of at least so many positions, with its last block as it must be."""
        return self.block_of(least - 1)[1] if self.whole else least

    def state(self, canvas: Sequence[int], finished: int, shifted: bool) -> "State":
        """The canvas at a moment when its first `finished` positions are whole finished blocks."""
        chain = self.chain(canvas)
        segments = tuple(segment for _, segment in self.later)
        at = len(self.lead.ids)
        if not finished or not segments:
            return State((*self.context, *segments), chain, at - shifted)
        assert self.block is not None and not shifted, "such an order is for blocks that predict themselves"
        *others, question = self.context
        stands = at + finished
        text = Segment((*question.ids, *chain.ids[:stands]), question.start, len(question.ids), self.block)
        window = Segment(chain.ids[stands:], chain.start + stands, self.block, self.block)
        return State((*others, text, *segments), window, -finished)


@dataclass(frozen=True)
class State:
    """One moment of a row, as it is trained on: what sees itself alone, and the run that sees all of it.

    first: where in the run the state stands that predicts the first canvas position; below 0 where finished
    blocks are part of the context.
    """

    context: tuple[Segment, ...]
    run: Segment
    first: int


def arrange(
    prompt: Prompt, shape: DenoiserConfig, layout: str | None = None, finished_blocks: str | None = None
) -> Arrangement:
    """Lays a prompt out for a denoiser, in its own layout and order where no others are named.

    In a `shifted` denoiser the row before a position predicts it, so the last prompt token runs
    with the canvas whose first token it predicts. In `independent` every passage starts at position
    0 and the question at `passage_length`, wherever the passage ranks and whatever the others are. Where
    attention runs in blocks, the prompt of `joint` and `prefix` does too, and both are the same.
    """
    layout, block = layout or shape.evidence_layout, shape.attention_block
    order = finished_blocks or shape.finished_blocks
    passages: tuple[Segment, ...] = ()
    if layout == "joint" or (layout == "prefix" and block is not None):
        return in_blocks(Arrangement((), Segment(tuple(prompt.ids), 0)), shape)
    if layout == "prefix":
        question = Segment(tuple(prompt.ids), 0)
    elif layout == "independent":
        passages = tuple(Segment(fact, 0) for fact in prompt.facts if fact)
        question = Segment(prompt.head + prompt.tail, shape.passage_length)
    else:
        raise ValueError(f"'{layout}' is not an evidence layout")
    keep = len(question.ids) - shape.shifted
    lead = Segment(question.ids[keep:], question.start + keep)
    question = Segment(question.ids[:keep], question.start)
    if block is not None and order == "text":
        later = tuple((LAST, passage) for passage in passages)
        return in_blocks(Arrangement((question,), lead, later=later), shape)
    return in_blocks(Arrangement((*passages, question), lead, kept=order == "kept"), shape)


def in_blocks(laid: Arrangement, shape: DenoiserConfig) -> Arrangement:
    """With the blocks of the denoiser, counted from where it counts them."""
    if shape.attention_block is None:
        return laid
    block, whole = shape.attention_block, shape.block_grid == "prompt" or shape.noise is not None
    short = 0 if shape.block_grid == "prompt" else len(laid.lead.ids) % block
    return replace(laid, first=short or block, block=block, led=shape.shifted, whole=whole)


def with_new_passages(before: Arrangement, now: Arrangement, finished: int) -> Arrangement:
    """The order `append`: what stands stays, passages of `now` that are not there yet come behind the first
    `finished` tokens of the chain.
    """
    held = {*before.context, *(segment for _, segment in before.later)}
    new = [segment for segment in dict.fromkeys(now.context) if segment not in held]
    return replace(before, later=(*before.later, *((finished, segment) for segment in new)))


def by_arrival(before: Sequence[Passage], now: Sequence[Passage]) -> list[Passage]:
    """The passages of `now`: those of `before` in their order there, new ones behind, in theirs.

    Where a prompt sees only what is before, it stays what it was up to the first passage that has left.
    """
    found, held = {passage.id for passage in now}, {passage.id for passage in before}
    stay = [passage for passage in before if passage.id in found]
    return [*stay, *(passage for passage in now if passage.id not in held)]


def check_order(shape: DenoiserConfig, finished_blocks: str, layout: str) -> None:
    """Raises `ConfigError` for an order that the layout cannot have, where attention has blocks."""
    if shape.attention_block and finished_blocks != "reread" and layout != "independent":
        raise ConfigError(
            f"finished_blocks={finished_blocks} needs evidence_layout=independent: elsewhere passages "
            "stand in one chain with the canvas; set finished_blocks=reread"
        )
