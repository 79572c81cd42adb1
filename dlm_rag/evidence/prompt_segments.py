"""From a prompt to what the transformer runs: what of it fits into the context, and where it stands.

`model/evidence_layouts.py` says which segments of a prompt see themselves alone. The canvas sees itself and
every segment. Keys and values of a segment depend on nothing but the segment, which is what may be kept
between steps and questions.

Where attention runs in blocks, finished blocks of the canvas are computed once, too, in the order in which
things stand: each sees what is before it. So the order says what finished blocks see:
`recompute` has passages, question, finished blocks, window; finished blocks run again when the evidence
changes. `no_evidence` has question, finished blocks, passages, window; nothing runs again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.evidence_layouts import EVIDENCE_LAYOUTS
from dlm_rag.model.packed_batch import Segment
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.tokenizer import Prompt, Tokenizer

UNBOUNDED_POSITION = 2**62  # after all finished blocks, however many there are


@dataclass(frozen=True)
class ContextBudget:
    """How evidence is laid out and what must hold it next to the canvas; lengths in tokens."""

    layout: str
    context_length: int
    canvas_length: int
    passage_length: int
    passage_order: str = "best_first"  # as `decode.passage_order`

    @classmethod
    def from_config(
        cls,
        shape: DenoiserConfig,
        layout: str | None = None,
        canvas: int | None = None,
        passage_order: str = "best_first",
    ) -> "ContextBudget":
        """The room in a denoiser's context; by default with its own layout and canvas."""
        return cls(
            layout or shape.evidence_layout, shape.max_position_embeddings, canvas or shape.canvas_length,
            shape.passage_length, passage_order,
        )  # fmt: skip


@dataclass(frozen=True)
class Truncation:
    """What of the evidence did not fit into the context."""

    tokens: int = 0
    passages_shortened: int = 0
    passages_dropped: int = 0


def truncate_evidence(prompt: Prompt, room: ContextBudget) -> tuple[Prompt, Truncation]:
    """The prompt with as much evidence as the context holds, and what was cut.

    Passages keep their tokens in rank order until the context is full; the one that crosses the end is
    shortened, later ones are dropped. Where they are separate, each is shortened to `passage_length`. What
    is dropped leaves an empty fact. Raises `QuestionError` when the question alone does not fit.
    """
    left = room.context_length - len(prompt.head) - len(prompt.tail) - room.canvas_length
    if EVIDENCE_LAYOUTS[room.layout].separate_passages:
        left -= room.passage_length
        facts = [fact[: room.passage_length] for fact in prompt.facts]
    else:
        facts = []
        for fact in prompt.facts:
            facts.append(fact[: max(0, left - sum(map(len, facts)))])
    if left < 0:
        raise QuestionError(
            f"the question is {-left} tokens too long: the context of {room.context_length} must hold it "
            f"and the canvas of {room.canvas_length}"
        )
    lost = [len(fact) - len(kept) for fact, kept in zip(prompt.facts, facts, strict=True)]
    shortened = sum(1 for kept, n in zip(facts, lost, strict=True) if n and kept)
    cut = Truncation(sum(lost), shortened, sum(1 for kept in facts if not kept))
    return Prompt(prompt.head, tuple(facts), prompt.tail), cut


@dataclass(frozen=True)
class FittedPrompt:
    """A prompt that fits, and what became of each passage."""

    prompt: Prompt
    texts: dict[str, str]  # by id, in rank order: what of each passage is in the prompt
    dropped: tuple[str, ...]  # ids of the passages without a place, which rank after all others
    truncation: Truncation


def fit_passages(
    tokenizer: Tokenizer, question: str, passages: Mapping[str, str], room: ContextBudget
) -> FittedPrompt:
    """The prompt for a question and its passages (id -> text as found, in rank order).

    They are cut by rank, whatever their order in the prompt. A passage without a place still shapes the
    prompt: the one before it is not the last fact, which alone has no line break after it where facts are
    numbered. Raises `QuestionError` when the question alone does not fit.
    """
    step = -1 if room.passage_order == "best_last" else 1
    prompt = tokenizer.build_prompt(question, list(passages.values())[::step])
    ranked = Prompt(prompt.head, prompt.facts[::step], prompt.tail)
    fitted, cut = truncate_evidence(ranked, room)
    texts = {
        name: text if kept == fact else tokenizer.decode_with_offsets(list(kept))[0]
        for (name, text), fact, kept in zip(passages.items(), ranked.facts, fitted.facts, strict=True)
        if kept
    }
    placed = Prompt(fitted.head, fitted.facts[::step], fitted.tail)
    return FittedPrompt(placed, texts, tuple(name for name in passages if name not in texts), cut)


def keep_shorter_texts(texts: dict[str, str], more: Mapping[str, str]) -> None:
    """Takes texts up; of a passage cut twice the shorter stays, which makes for a safe citation."""
    for name, text in more.items():
        texts[name] = min(texts.get(name, text), text, key=len)


@dataclass(frozen=True)
class LaidOutPrompt:
    """A prompt laid out.

    context_segments: segments that see themselves alone, in front; later_segments: those that stand after
    the finished blocks. canvas_prefix: what runs before the canvas; lead and canvas are one chain, whose
    blocks are `first_block_length` tokens and then `block_size` each (None: one block).
    predicts_next_block: whether the last token of a block predicts the first of the next.
    complete_last_block: whether the last block must be whole.
    """

    context_segments: tuple[Segment, ...]
    canvas_prefix: Segment
    first_block_length: int = 0
    block_size: int | None = None
    later_segments: tuple[Segment, ...] = ()
    predicts_next_block: bool = False
    complete_last_block: bool = False

    def build_canvas_segment(self, canvas: Sequence[int]) -> Segment:
        """Lead and canvas."""
        lead = self.canvas_prefix
        ids = (*lead.ids, *canvas)
        return Segment(ids, lead.start, self.first_block_length, self.block_size, len(lead.ids))

    def block_bounds(self, position: int) -> tuple[int, int]:
        """The canvas positions, from and up to, of the block that a canvas position is in.

        The first one is below 0 where a block begins in the prompt.
        """
        lead = len(self.canvas_prefix.ids)
        if self.block_size is None:
            return 0, UNBOUNDED_POSITION
        after = lead + position - self.first_block_length
        if after < 0:
            return -lead, self.first_block_length - lead
        begin = position - after % self.block_size
        return begin, begin + self.block_size

    def round_up_canvas(self, least: int) -> int:
        """Of a canvas of at least so many positions, with its last block as it must be."""
        return self.block_bounds(least - 1)[1] if self.complete_last_block else least

    def build_row(self, canvas: Sequence[int], finished: int, shifted: bool) -> "LaidOutRow":
        """The canvas at a moment when its first `finished` positions are whole finished blocks."""
        chain, at = self.build_canvas_segment(canvas), len(self.canvas_prefix.ids)
        if not finished or not self.later_segments:
            return LaidOutRow((*self.context_segments, *self.later_segments), chain, at - shifted)
        assert self.block_size is not None and not shifted, "this is for blocks that predict themselves"
        *others, question = self.context_segments
        stands, block = at + finished, self.block_size
        text = Segment((*question.ids, *chain.ids[:stands]), question.start, len(question.ids), block)
        window = Segment(chain.ids[stands:], chain.start + stands, block, block)
        return LaidOutRow((*others, text, *self.later_segments), window, -finished)


@dataclass(frozen=True)
class LaidOutRow:
    """One moment of a row, as it is trained on: what sees itself alone, and the run that sees all of it.

    canvas_start: where in the run the state stands that predicts the first canvas position; below 0 where
    finished blocks are part of the context.
    """

    context_segments: tuple[Segment, ...]
    canvas_segment: Segment
    canvas_start: int


def lay_out_prompt(
    prompt: Prompt,
    shape: DenoiserConfig,
    layout: str | None = None,
    finished_block_context: str | None = None,
) -> LaidOutPrompt:
    """Lays a prompt out for a denoiser, in its own layout and order where no others are named.

    In a `shifted` denoiser the row before a position predicts it, so the last prompt token runs
    with the canvas whose first token it predicts. Where attention runs in blocks, a prompt whose passages
    are not separate does too: `joint` and `prefix` are the same.
    """
    own, block = EVIDENCE_LAYOUTS[layout or shape.evidence_layout], shape.block_size
    order = finished_block_context or shape.finished_block_context
    *placed, question = (Segment(tuple(ids), at) for ids, at in own.place(prompt, shape.passage_length))
    context, later = tuple(segment for segment in placed if segment.ids), tuple[Segment, ...]()
    lead = question
    if not (own.runs_with_canvas or (block is not None and not own.separate_passages)):
        keep = len(question.ids) - shape.shifted
        lead = Segment(question.ids[keep:], question.start + keep)
        question = Segment(question.ids[:keep], question.start)
        if block is not None and order == "no_evidence":
            context, later = (question,), context
        else:
            context = (*context, question)
    if block is None:
        return LaidOutPrompt(context, lead)
    from_prompt = shape.block_grid == "prompt"
    return LaidOutPrompt(
        context, lead, (0 if from_prompt else len(lead.ids) % block) or block, block, later, shape.shifted,
        from_prompt or shape.noise is not None,
    )  # fmt: skip


def order_by_arrival(before: Sequence[Passage], now: Sequence[Passage]) -> list[Passage]:
    """The passages of `now`: those of `before` in their order there, then new ones in theirs.

    Where a prompt sees only what is before, it stays what it was up to the first passage that has left.
    """
    found, held = {passage.id for passage in now}, {passage.id for passage in before}
    stay = [passage for passage in before if passage.id in found]
    return [*stay, *(passage for passage in now if passage.id not in held)]


def check_finished_blocks(shape: DenoiserConfig, finished_block_context: str, layout: str) -> None:
    """Raises `ConfigError` for a layout or an order of finished blocks that the attention rules out."""
    own = EVIDENCE_LAYOUTS[layout]
    if shape.attention_patterns and not own.runs_with_canvas:
        raise ConfigError(
            f"evidence_layout={layout}: the attention of this model reads the prompt in one piece; set "
            "evidence_layout=joint"
        )
    if shape.block_size and finished_block_context != "recompute" and not own.separate_passages:
        raise ConfigError(
            f"finished_block_context={finished_block_context} needs evidence_layout=independent: elsewhere "
            "passages stand in one chain with the canvas; set finished_block_context=recompute"
        )
