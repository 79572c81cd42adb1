"""From passages to what the transformer runs: what of them fits, how it is laid out, what blocks see.

`model/denoiser_config.py` says which segments of a prompt see themselves alone. The canvas sees itself and
every segment. Keys and values of a segment depend on nothing but the segment, which is what may be kept
between steps and questions.

Where attention runs in blocks, finished blocks of the canvas are computed once, too, in the order in which
things stand: each sees what is before it. So the order says what finished blocks see:
`recompute` has passages, question, finished blocks, window; finished blocks run again when the evidence
changes. `no_evidence` has question, finished blocks, passages, window; nothing runs again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from dlm_rag.config import EngineConfig
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.model.denoiser_config import EVIDENCE_LAYOUTS, DenoiserConfig
from dlm_rag.model.packed_batch import LaidOutPrompt, Segment
from dlm_rag.questions import Question
from dlm_rag.text import content_words, find_sentence_spans, split_words
from dlm_rag.tokenizer import Prompt, Tokenizer

_make_shared_segment = lru_cache(maxsize=4096)(Segment)  # one for all who read it, found by identity


def lay_out_prompt(
    prompt: Prompt, shape: DenoiserConfig, layout: str | None = None,
    finished_block_context: str | None = None, mode: str = "diffusion",
) -> LaidOutPrompt:  # fmt: skip
    """Lays a prompt out for a denoiser, in its own layout and order where no others are named.

    Where the state before a block predicts its first token, the last prompt token runs with the canvas.
    With attention in blocks, a prompt of passages that are not separate has them too: `joint` is `prefix`.
    """
    own, block = EVIDENCE_LAYOUTS[layout or shape.evidence_layout], shape.block_size
    order = finished_block_context or shape.finished_block_context
    alone = 1 if shape.causal_context else None
    make = _make_shared_segment if own.separate_passages else Segment
    placed = [make(tuple(ids), at, 0, alone) for ids, at in own.place(prompt, shape.passage_length)]
    *placed, question = placed
    context, unseen = tuple(segment for segment in placed if segment.ids), 0
    lead = question
    if not runs_with_canvas(shape, layout):
        keep = len(question.ids) - shape.predicts_next_block
        lead = Segment(question.ids[keep:], question.start + keep)
        question = Segment(question.ids[:keep], question.start, block=alone)
        if block is not None and order == "no_evidence":
            context, unseen = (question, *context), len(context)
        else:
            context = (*context, question)
    if block is None:
        return LaidOutPrompt(context, lead, shifted=shape.shifted)
    if mode == "autoregressive":
        block = 1
    from_prompt = shape.block_grid == "prompt"
    return LaidOutPrompt(
        context, lead, (0 if from_prompt else len(lead.ids) % block) or block, block, unseen,
        shape.predicts_next_block, from_prompt or shape.causal_context, shape.causal_context, shape.shifted,
    )  # fmt: skip


def runs_with_canvas(shape: DenoiserConfig, layout: str | None = None) -> bool:
    """Whether the question runs with the canvas; so do the passages then, where they are not separate."""
    own = EVIDENCE_LAYOUTS[layout or shape.evidence_layout]
    return own.runs_with_canvas or (shape.block_size is not None and not own.separate_passages)


def check_kept_evidence(engine: EngineConfig, shape: DenoiserConfig, layout: str) -> None:
    """Raises `ConfigError` for settings of what is kept of evidence where nothing is."""
    kept = EVIDENCE_LAYOUTS[layout].separate_passages or not runs_with_canvas(shape, layout)
    for name in ("store", "cache_dtype"):
        if (given := getattr(engine, name)) not in (None, "auto") and not kept:
            raise ConfigError(
                f"engine.{name}={given} has no effect with evidence_layout={layout}, in which this model "
                "keeps nothing of its evidence: leave it out, or set model.evidence_layout=independent"
            )


def check_finished_blocks(
    shape: DenoiserConfig, finished_block_context: str, layout: str, mode: str | None = "diffusion"
) -> None:
    """Raises `ConfigError` for a layout or an order of finished blocks that the attention rules out."""
    own = EVIDENCE_LAYOUTS[layout]
    if shape.routes_blocks and own.separate_passages:
        raise ConfigError(
            f"evidence_layout={layout}: the choice of experts of this model reads the prompt in one piece; "
            "set evidence_layout=joint"
        )
    next_token = shape.block_size and shape.predicts_next_block and mode == "diffusion"
    if next_token and finished_block_context == "no_evidence":
        raise ConfigError(
            "finished_block_context=no_evidence: a finished token predicts the first of the next block "
            "without evidence; set decode.finished_block_context=recompute"
        )
    alone = own.separate_passages and not own.runs_with_canvas
    if shape.block_size and finished_block_context != "recompute" and not alone:
        raise ConfigError(
            f"finished_block_context={finished_block_context} needs evidence_layout=independent: elsewhere "
            "passages stand in one chain with the canvas; set finished_block_context=recompute"
        )


@dataclass
class ContextBudget:
    """How evidence is laid out and what must hold it next to the canvas; lengths in tokens."""

    layout: str
    context_length: int
    canvas_length: int
    passage_length: int

    @classmethod
    def from_config(
        cls, shape: DenoiserConfig, layout: str | None = None, canvas: int | None = None
    ) -> "ContextBudget":
        """The room in a denoiser's context; by default with its own layout and canvas."""
        context, passage = shape.max_position_embeddings, shape.passage_length
        return cls(layout or shape.evidence_layout, context, canvas or shape.canvas_length, passage)


def truncate_evidence(prompt: Prompt, room: ContextBudget) -> Prompt:
    """The prompt with as much evidence as the context holds.

    Passages keep their tokens in rank order until the context is full; the one that crosses the end is
    shortened, later ones are dropped. Where they are separate, each is shortened to `passage_length`. What
    is dropped leaves an empty fact. Raises `QuestionError` when the question alone does not fit.
    """
    left = room.context_length - len(prompt.head) - len(prompt.tail) - room.canvas_length
    if EVIDENCE_LAYOUTS[room.layout].separate_passages:
        left -= room.passage_length
        facts = [fact[: room.passage_length] for fact in prompt.facts]
    else:
        starts = accumulate(map(len, prompt.facts), initial=0)
        facts = [fact[: max(0, left - n)] for fact, n in zip(prompt.facts, starts, strict=False)]
    if left < 0:
        raise QuestionError(
            f"the question is {-left} tokens too long: the context of {room.context_length} must hold it "
            f"and the canvas of {room.canvas_length}"
        )
    return Prompt(prompt.head, tuple(facts), prompt.tail)


def check_prompt_room(questions: Sequence[Question], tokenizer: Tokenizer, room: ContextBudget) -> None:
    """Raises `ConfigError` where the shortest question leaves no room for evidence, `QuestionError` where
    no question at all fits. One that does not among others that do is recorded as failed once it is asked.
    """
    left = room.context_length - room.canvas_length - len(tokenizer.build_prompt("?", []))
    if left <= 0 and not EVIDENCE_LAYOUTS[room.layout].separate_passages:  # which have a room of their own
        raise ConfigError(
            f"the prompt leaves no room for evidence: it is {1 - left} tokens too long for a context of "
            f"{room.context_length} with a response of {room.canvas_length}"
        )
    error = None
    for question in questions:
        try:
            truncate_evidence(tokenizer.build_prompt(question.question, []), room)
        except QuestionError as too_long:
            error = error or QuestionError(f"question '{question.id}': {too_long}")
        else:
            return
    if error is not None:
        raise error


@dataclass
class Evidence:
    """Passages in a prompt that fits, and what became of each."""

    prompt: Prompt
    texts: dict[str, str]  # by id, in rank order: what of each passage is in the prompt
    dropped: tuple[str, ...]  # ids of the passages without a place, which rank after all others
    cut: dict[str, int]  # tokens that were cut, passages that were shortened and dropped


def fit_passages(
    tokenizer: Tokenizer, question: str, passages: Mapping[str, str], room: ContextBudget, system: str = ""
) -> Evidence:
    """The prompt for a question and its passages (id -> text as found, in rank order).

    They are cut by rank. A passage without a place still shapes the prompt: the one before it is not the
    last fact, which alone has no line break after it where facts are numbered. Where passages are separate,
    one that is longer than a passage may be begins at the sentence that `skip_to_relevant` finds. Raises
    `QuestionError` when the question alone does not fit.
    """
    skips, length = EVIDENCE_LAYOUTS[room.layout].separate_passages, room.passage_length
    found = {
        name: skip_to_relevant(tokenizer, text, question, length) if skips else (text, 0)
        for name, text in passages.items()
    }
    prompt = tokenizer.build_prompt(question, [text for text, _ in found.values()], system)
    fitted = truncate_evidence(prompt, room)
    texts, tokens, shortened = dict[str, str](), 0, 0
    facts = zip(found.items(), prompt.facts, fitted.facts, strict=True)
    for number, ((name, (text, skipped)), fact, kept) in enumerate(facts, start=1):
        cut = len(fact) - len(kept)
        tokens += skipped + cut
        if kept and cut:
            whole, left = (tokenizer.decode_with_offsets([*ids])[0] for ids in (fact, kept))
            lost = len(whole.removesuffix("\n")) - len(left.rstrip("\ufffd"))
            text = tokenizer.template.shorten_passage(number, text, lost)
        if kept and (text or not cut):
            texts[name] = text
            shortened += bool(skipped or cut)
    dropped = tuple(name for name in passages if name not in texts)
    counts = {"tokens": tokens, "passages_shortened": shortened, "passages_dropped": len(dropped)}
    return Evidence(fitted, texts, dropped, counts)


@lru_cache(maxsize=4096)  # a passage stays in the evidence of a question for several steps
def skip_to_relevant(tokenizer: Tokenizer, text: str, question: str, length: int) -> tuple[str, int]:
    """Returns a text without the sentences that stand before those about the question, and their tokens.

    A text of at most `length` tokens stays as it is. Of a longer one, the part of `length` tokens stays
    that has most content words of the question, of equals the first; its title line is kept before it.
    """
    if len(tokenizer.encode(text)) <= length:
        return text, 0
    title, _, body = text.partition("\n") if "\n" in text else ("", "", text)
    asked = {word for word, _ in content_words(question, 0, len(question))} - {*split_words(title)}
    spans = find_sentence_spans(body)
    held = [asked & {*split_words(body[start:stop])} for start, stop in spans]
    lengths = [len(tokenizer.encode(body[start:stop])) for start, stop in spans]
    room = length - len(tokenizer.encode(title))

    def count_words(first: int) -> int:
        pairs = zip(held[first:], accumulate(lengths[first:]), strict=True)
        return len(set[str]().union(*(words for words, end in pairs if end <= room)))

    best = max(range(len(spans)), key=count_words, default=0)
    if not best:
        return text, 0
    kept = body[spans[best][0] :].lstrip()
    return f"{title}\n{kept}" if title else kept, sum(lengths[:best])
