"""A question in the batch: its canvas, how a step writes into it, its evidence and its search."""

import logging
import math
from collections.abc import Collection, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, NewType

import numpy as np
import torch
from numpy.typing import NDArray

from dlm_rag.answer_forms import find_answer_span
from dlm_rag.config import DecodeConfig
from dlm_rag.decode.provisional_log import ProvisionalRecorder
from dlm_rag.decode.rollout import Rollout, RolloutStep, Span, cite_passages
from dlm_rag.engine.copying import WordTable
from dlm_rag.engine.rules import Proposals, find_rule
from dlm_rag.evidence.prompt_segments import Evidence
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.packed_batch import LaidOutPrompt
from dlm_rag.questions import Question
from dlm_rag.randomness import sample_uniform
from dlm_rag.retrieval.base import resolve_query_threshold
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Ticket = NewType("Ticket", int)
SearchResult = list[Passage] | Exception  # of one query
TokenIds = NDArray[np.int64]


class CanvasChange(NamedTuple):
    """What a step has written: where no token was, in place of another one, and what it has taken back."""

    committed: Proposals | None = None
    edited: Proposals | None = None
    remasked: tuple[int, ...] = ()


class OpenSpan(NamedTuple):
    """Canvas positions, from and up to, that may be committed."""

    begin: int
    end: int
    block_end: int  # where their attention block ends
    must_commit: bool  # whether the rule has to commit one of them


class StepView(NamedTuple):
    """What of its canvas a row's next step is about."""

    block: Span  # the current block; all where attention has no blocks
    spans: list[OpenSpan]
    shown: Span  # what the model sees


@dataclass
class Canvas:
    """Token ids (n,) with `mask_id` where nothing is committed yet.

    Invariant: a committed token changes only by `edit`, after the frozen positions.
    """

    chooses_itself: ClassVar[bool] = False  # whether `write` chooses proposals, and no rule is asked
    length: int
    mask_id: int
    frozen_length: int | None = None  # positions in front that change no more; None: a committed one stays
    edit_steps: int = 0  # since the current block has no mask
    ids: TokenIds = field(init=False)
    masked: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = np.full(self.length, self.mask_id, dtype=np.int64)
        self.masked = np.ones(self.length, dtype=bool)

    @property
    def first_masked(self) -> int:
        """The first masked position; the length where there is none."""
        first = int(self.masked.argmax())
        return first if self.masked[first] else self.length

    @property
    def first_mutable(self) -> int:
        """The first position that may change; the length where there is none."""
        return self.first_masked if self.frozen_length is None else self.frozen_length

    @property
    def model_ids(self) -> TokenIds:
        return self.ids

    def select_provisional(self, proposals: Proposals) -> Proposals:
        """The proposals of a step, which has been written, that stand for what is still to come."""
        return proposals.subset(self.masked[proposals.positions])

    def draw_numbers(
        self, settings: DecodeConfig, generator: torch.Generator
    ) -> tuple[NDArray[np.float64] | None, float]:
        """The uniform numbers of a step by position, (5, n) for a rule that samples, of which the last row
        has no use, (1, n) for sampled tokens; and the temperature of these.
        """
        rule = find_rule(settings.commit_rule)
        count = 5 if rule.samples else int(settings.temperature > 0)
        return sample_uniform(generator, count, self.length) if count else None, settings.temperature

    def write(
        self, proposals: Proposals, chosen: Proposals | None, settings: DecodeConfig, block: Span
    ) -> CanvasChange:
        """Commits what was chosen, if masks were left to choose from, and edits in the current block."""
        edited = None
        if settings.edit_threshold is not None:
            edited = self.edit(proposals, settings.edit_threshold)
            self.edit_steps = self.edit_steps + 1 if chosen is None else 0
        if chosen is not None:
            self.commit(chosen)
        settled = self.edit_steps > 0 and (edited is None or not len(edited.positions))
        over = settled or self.edit_steps >= settings.max_edit_steps
        if self.frozen_length is not None and over and not self.masked[max(0, block[0]) : block[1]].any():
            self.frozen_length, self.edit_steps = block[1], 0
        return CanvasChange(chosen, edited)

    def commit(self, chosen: Proposals) -> None:
        """Writes the chosen proposals down; raises `ValueError` if one of them is committed already."""
        if np.count_nonzero(self.masked[chosen.positions]) < len(chosen.positions):
            raise ValueError("a committed position cannot be committed again")
        self.ids[chosen.positions] = chosen.token_ids
        self.masked[chosen.positions] = False

    def edit(self, proposals: Proposals, bound: float) -> Proposals:
        """Replaces committed tokens by proposals of at least `bound` for another token; returns these."""
        at = proposals.positions
        other = proposals.token_ids != self.ids[at]
        sure = ~self.masked[at] & (at >= self.first_mutable) & (proposals.confidence >= bound)
        edits = proposals.subset(other & sure)
        self.ids[edits.positions] = edits.token_ids
        return edits

    def fill_provisional(self, provisional: Proposals, least_confidence: float) -> list[int]:
        """Ids with the provisional tokens of at least that confidence in their places."""
        ids, entering = self.ids.copy(), provisional.confidence >= least_confidence
        ids[provisional.positions[entering]] = provisional.token_ids[entering]
        return ids.tolist()

    def is_finished(self, end_ids: Collection[int]) -> bool:
        """Whether the text is certain: nothing may change, or nothing before a committed end token."""
        before = self.ids[: self.first_mutable].tolist()
        return len(before) == self.length or not frozenset(end_ids).isdisjoint(before)


def make_canvas(
    settings: DecodeConfig, shape: DenoiserConfig, tokenizer: Tokenizer, generator: torch.Generator
) -> Canvas:
    """A fresh canvas, as the settings want it."""
    if shape.adapter is not None:
        return shape.adapter.make_canvas(settings, shape, tokenizer, generator)
    assert settings.max_new_tokens is not None
    frozen = None if settings.edit_threshold is None else 0
    return Canvas(settings.max_new_tokens, tokenizer.mask_id, frozen)


@dataclass(eq=False)
class Row:
    """A question in the batch and its state between two steps; `record` is of the current step."""

    ticket: Ticket
    question: Question
    settings: DecodeConfig  # its own
    canvas: Canvas
    generator: torch.Generator
    rollout: Rollout
    end_ids: frozenset[int] = frozenset()
    recorder: ProvisionalRecorder | None = None  # where provisional tokens are to be recorded
    record: RolloutStep = field(default_factory=lambda: RolloutStep(0, None, (), False))
    draws: NDArray[np.float64] | None = None  # (5, length) the numbers that a policy samples at
    retrieved_passages: list[Passage] | None = None  # what fits of these is the evidence
    first_passages: list[Passage] = field(default_factory=list)  # what the first search found
    evidence: Evidence | None = None  # what fits of these, with its prompt
    laid_out_prompt: LaidOutPrompt = field(init=False, repr=False)  # this, laid out
    query_key: Hashable = None
    # What was asked last, until it is taken: a search for several rows, and which of them this is.
    search: tuple[Future[list[SearchResult]], int] | None = None
    provisional: Proposals | None = None
    view: StepView = field(init=False, repr=False)  # of the step that is under way
    blocks_just_finished: int = 0  # by the last step: their keys and values are computed in this one
    words: WordTable | None = None  # where words are copied

    @property
    def step(self) -> int:
        return len(self.rollout.steps)

    @property
    def written(self) -> list[int]:
        """The tokens before the first mask."""
        return self.canvas.ids[: self.canvas.first_masked].tolist()

    @property
    def read_texts(self) -> list[str]:
        """The question and what of the passages is in the prompt."""
        return [self.question.question, *(self.evidence.texts.values() if self.evidence else ())]

    @property
    def is_active(self) -> bool:
        """Whether it takes part in the next step."""
        return not (self.rollout.error or self.rollout.finished)

    @property
    def is_done(self) -> bool:
        return self.canvas.is_finished(self.end_ids if self.settings.early_stopping else ())

    @property
    def current_block(self) -> tuple[int, int]:
        """The positions, from and up to, of the block that is written now."""
        begin, end = self.laid_out_prompt.block_bounds(self.canvas.first_mutable)
        return begin, min(end, self.canvas.length)

    def find_view(self) -> StepView:
        """What the next step is about: once for all that ask, until the canvas is written."""
        spans = self._find_open_spans(block := self.current_block)
        return StepView(block, spans, self._find_shown_span(block, spans))

    def _find_open_spans(self, block: Span) -> list[OpenSpan]:
        """Where positions may be committed: in the current block, and in as many after it as
        `decode.blocks_at_once` lets join, each once the one before is written far enough.
        """
        settings, canvas, (begin, end) = self.settings, self.canvas, block
        spans, must_commit = list[OpenSpan](), True
        while True:
            found = find_commit_span(canvas.masked, (begin, end), settings.block_length)
            spans.append(OpenSpan(*found, end, must_commit))
            if end == canvas.length or len(spans) + self.blocks_just_finished >= settings.blocks_at_once:
                return spans
            # What of a block stands in the prompt counts as committed.
            share = (end - begin - int(canvas.masked[max(begin, 0) : end].sum())) / (end - begin)
            if share < settings.block_add_threshold:
                return spans
            begin, end = end, min(self.laid_out_prompt.block_bounds(end)[1], canvas.length)
            must_commit = share >= settings.semi_complete_threshold

    def _find_shown_span(self, block: Span, spans: list[OpenSpan]) -> Span:
        """The positions, from and up to, that the model sees: the blocks of open spans, and whole blocks of
        lookahead where the query takes provisional tokens.

        None of them where the next token is the first of a block and the block before it predicts it, but
        for rules from left to right where each token is predicted by the one before.
        """
        settings, length, (begin, end) = self.settings, self.canvas.length, block
        laid = self.laid_out_prompt
        in_order = laid.shifted and find_rule(settings.commit_rule).in_order
        if laid.predicts_next_block and self.canvas.first_masked == begin and not in_order:
            return begin, begin
        ahead = resolve_query_threshold(settings.query_policy, settings.query_threshold) <= 1
        if settings.query_window and end < length and ahead:
            last = min(end + settings.query_window, length) - 1
            end = min(self.laid_out_prompt.block_bounds(last)[1], length)
        return max(0, begin), max(end, spans[-1].block_end)

    def fail(self, reason: str) -> None:
        log.warning("question '%s' failed: %s", self.question.id, reason)
        self.rollout.error = reason

    def end_step(self) -> None:
        """Moves the record of the step into the rollout, or finishes this where the question failed."""
        if self.rollout.error:
            self.rollout.finished = True
            return
        if self.evidence is not None:
            self.record.passage_ids, self.record.dropped = tuple(self.evidence.texts), self.evidence.dropped
        self.rollout.steps.append(self.record)
        self.record = RolloutStep(self.step, None, (), False)

    def finish(self, tokenizer: Tokenizer) -> None:
        """Finishes the rollout: the text before the first end token, and its citations."""
        ids, rollout, steps = self.canvas.ids.tolist(), self.rollout, self.rollout.commit_steps()
        end = next((n for n, token in enumerate(ids) if token in tokenizer.end_ids), len(ids))
        text, spans = tokenizer.decode_with_offsets(ids[:end])
        blanks, response, form = len(text) - len(text.lstrip()), text.strip(), tokenizer.template.answer
        spans = [(start - blanks, stop - blanks) for start, stop in spans]
        written = [steps[position] for position in range(end)]
        rollout.response, rollout.answer_form = response, form
        begin, stop = find_answer_span(response, form)
        told = [n for n, (a, b) in enumerate(spans) if begin < stop and a < stop and b > begin]
        if told:  # with the end token, if it is the next
            tokens = rollout.final_tokens()
            told += [end] if told[-1] + 1 == end in tokens else []
            # Guessed behind another token and confirmed by a text, not by the model: no measure of it.
            unsure = {n for n in told if tokens[n].confidence < self.settings.commit_threshold}
            if self.words is not None and not find_rule(self.settings.commit_rule).samples:
                told = [n for n in told if n not in unsure or steps.get(n - 1) != steps[n]] or told
            total = sum(tokens[position].log_prob or 0.0 for position in told)
            rollout.confidence = math.exp(total / len(told))
        rollout.citations = cite_passages(
            response, spans, written, rollout.evidence_at, rollout.evidence_texts, rollout.question, form
        )
        rollout.finished = True


def find_commit_span(masked: NDArray[np.bool_], block: Span, block_length: int | None) -> Span:
    """Returns what of a block of attention may be committed: its first part of `block_length` (None or 0:
    the block) with a mask. Parts are counted from where the block begins, which may be below 0."""
    begin, end = block
    if block_length:
        first = max(begin, 0) + int(masked[max(begin, 0) : end].argmax())
        begin = first - (first - begin) % block_length
        end = min(begin + block_length, end)
    return begin, end
