"""A question in the batch: its canvas, its evidence, and what it carries from step to step.

A canvas starts all masked; that of a model of uniform noise is in `uniform_noise.py`.
"""

import logging
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

import numpy as np
import torch
from numpy.typing import NDArray

from dlm_rag.config import DecodeConfig
from dlm_rag.decode.copy_sources import CopySources
from dlm_rag.decode.provisional_log import ProvisionalRecorder
from dlm_rag.decode.rollout import Rollout, RolloutStep, cite_passages
from dlm_rag.diffusion.commit_rules import Proposals, samples_actions
from dlm_rag.evidence.prompt_segments import LaidOutPrompt
from dlm_rag.evidence.truncation import FittedPrompt
from dlm_rag.questions import Question
from dlm_rag.randomness import sample_uniform
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import query_uses_provisional_tokens
from dlm_rag.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Ticket = NewType("Ticket", int)
TokenIds = NDArray[np.int64]
# Of at least one candidate those to commit; with the positions, from and up to, of which the schedule of
# `steps_per_block` says how many a step commits.
Choose = Callable[[Proposals, tuple[int, int] | None], Proposals]


class CanvasChange(NamedTuple):
    """What a step has written: where no token was, in place of another one, and what it has taken back."""

    committed: Proposals | None = None
    edited: Proposals | None = None
    remasked: tuple[int, ...] = ()


@dataclass
class Canvas:
    """Token ids (n,) with `mask_id` where nothing is committed yet.

    frozen_length: positions in front that change no more; None: a committed token stays.

    Invariant: a committed token changes only by `edit`, after the frozen positions.
    """

    length: int
    mask_id: int
    frozen_length: int | None = None
    edit_steps: int = 0  # since the current block has no mask
    ids: TokenIds = field(init=False)
    masked: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = np.full(self.length, self.mask_id, dtype=np.int64)
        self.masked = np.ones(self.length, dtype=bool)

    @property
    def first_masked(self) -> int:
        """The first masked position; the length where there is none."""
        return int(np.argmax(self.masked)) if self.masked.any() else self.length

    @property
    def first_mutable(self) -> int:
        """The first position that may change; the length where there is none."""
        return self.first_masked if self.frozen_length is None else self.frozen_length

    @property
    def model_ids(self) -> TokenIds:
        """The ids that a model sees."""
        return self.ids

    @property
    def open_positions(self) -> NDArray[np.bool_]:
        """Mask (n,) of the positions where a provisional token stands for what is still to come."""
        return self.masked

    def draw_numbers(
        self, settings: DecodeConfig, generator: torch.Generator
    ) -> tuple[NDArray[np.float64] | None, float]:
        """The uniform numbers of a step, by position, (5, n) for a policy, (1, n) for sampled tokens.

        And the temperature of these tokens.
        """
        count = 5 if samples_actions(settings) else int(settings.temperature > 0)
        return sample_uniform(generator, count, self.length) if count else None, settings.temperature

    def commit_range(self, block_length: int | None, begin: int, end: int) -> tuple[int, int]:
        """From where and up to where positions may be committed: the first block with a mask.

        Blocks of `block_length` (None or 0: one block) are counted from `begin`, which may be below 0, to
        `end`.
        """
        if block_length:
            begin = self.first_masked - (self.first_masked - begin) % block_length
            end = min(begin + block_length, end)
        return begin, end

    def write_step(
        self, proposals: Proposals, settings: DecodeConfig, block: tuple[int, int], choose: Choose
    ) -> CanvasChange:
        """Edits and commits within the current block, from and up to `block`."""
        begin, end = self.commit_range(settings.block_length, *block)
        at = proposals.positions
        candidates = proposals.subset(self.masked[at] & (at >= begin) & (at < end))
        waiting, edited, committed = len(candidates.positions) > 0, None, None
        if settings.edit_threshold is not None:
            edited = self.edit(proposals, settings.edit_threshold)
            self.edit_steps = 0 if waiting else self.edit_steps + 1
        if waiting:
            committed = choose(candidates, (begin, end))
            self.commit(committed)
        settled = self.edit_steps > 0 and (edited is None or not len(edited.positions))
        over = settled or self.edit_steps >= settings.max_edit_steps
        if self.frozen_length is not None and over and not self.masked[max(0, block[0]) : block[1]].any():
            self.frozen_length, self.edit_steps = block[1], 0
        return CanvasChange(committed, edited)

    def commit(self, chosen: Proposals) -> None:
        """Writes the chosen proposals down; raises `ValueError` if one of them is committed already."""
        if not self.masked[chosen.positions].all():
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
        """Ids with the provisional tokens of at least that confidence in open positions."""
        ids, at = self.ids.copy(), provisional.positions
        entering = (provisional.confidence >= least_confidence) & self.open_positions[at]
        ids[at[entering]] = provisional.token_ids[entering]
        return ids.tolist()

    def is_finished(self, end_ids: Collection[int]) -> bool:
        """Whether the text is certain: nothing may change, or nothing before a committed end token."""
        before = self.ids[: self.first_mutable]
        return len(before) == self.length or bool(np.isin(before, list(end_ids)).any())


@dataclass(eq=False)
class Row:
    """A question in the batch and its state between two steps; `record` is of the current step."""

    ticket: Ticket
    question: Question
    settings: DecodeConfig  # its own
    slot: int  # where its context is cached
    canvas: Canvas
    generator: torch.Generator
    rollout: Rollout
    end_ids: frozenset[int] = frozenset()
    recorder: ProvisionalRecorder | None = None  # where provisional tokens are to be recorded
    record: RolloutStep = field(default_factory=lambda: RolloutStep(0, None, (), False))
    draws: NDArray[np.float64] | None = None  # (5, length) the numbers that a policy samples at
    retrieved_passages: list[Passage] | None = None  # what fits of these is the evidence
    first_passages: list[Passage] = field(default_factory=list)  # what the first search found
    fitted_prompt: FittedPrompt | None = None  # with what fits of the evidence
    laid_out_prompt: LaidOutPrompt | None = None
    known_words: frozenset[str] | None = None  # of question and evidence, once they are asked for
    copy_sources: CopySources | None = None  # where copying has a price
    query_key: Hashable = None
    searched_words: frozenset[str] = frozenset()  # of the last query that was searched for
    provisional: Proposals | None = None
    lowest_confidence: float | None = None  # of provisional tokens; None where nothing is masked

    @property
    def step(self) -> int:
        """The number of the current step."""
        return len(self.rollout.steps)

    @property
    def is_done(self) -> bool:
        """Whether its text is certain."""
        return self.canvas.is_finished(self.end_ids if self.settings.early_stopping else ())

    @property
    def evidence(self) -> dict[str, str]:
        """id -> what of the passage is in the prompt, in rank order."""
        return {} if self.fitted_prompt is None else self.fitted_prompt.texts

    @property
    def current_block(self) -> tuple[int, int]:
        """The positions, from and up to, of the current block; all where attention has no blocks."""
        assert self.laid_out_prompt is not None
        begin, end = self.laid_out_prompt.block_bounds(self.canvas.first_mutable)
        return begin, min(end, self.canvas.length)

    @property
    def follows_last_block(self) -> bool:
        """Whether the next token is the first of a block and the block before it predicts it: it is asked
        for alone, and the model sees nothing after it.
        """
        assert self.laid_out_prompt is not None
        predicts = self.laid_out_prompt.predicts_next_block
        return predicts and self.canvas.first_masked == self.current_block[0]

    @property
    def window(self) -> tuple[int, int]:
        """The positions, from and up to, that the model sees: the current block, and whole blocks of
        lookahead where the query takes provisional tokens.
        """
        assert self.laid_out_prompt is not None
        settings, length, (begin, end) = self.settings, self.canvas.length, self.current_block
        if self.follows_last_block:
            return begin, begin
        ahead = query_uses_provisional_tokens(settings.query_policy, settings.query_threshold)
        if settings.query_window and end < length and ahead:
            last = min(end + settings.query_window, length) - 1
            end = min(self.laid_out_prompt.block_bounds(last)[1], length)
        return max(0, begin), end

    @property
    def positions_to_predict(self) -> NDArray[np.int64]:
        """The canvas positions that the next step asks about: the masked ones of the window, and with edits
        the committed ones of the block.
        """
        begin, end = self.window
        if begin == end:
            return np.array([begin])
        asked = self.canvas.masked[begin:end].copy()
        if self.canvas.frozen_length is not None:
            asked[: self.current_block[1] - begin] = True
        return begin + np.flatnonzero(asked)

    def fail(self, reason: str) -> None:
        """Ends this question without an answer."""
        log.warning("question '%s' failed: %s", self.question.id, reason)
        self.rollout.error = reason

    def end_step(self) -> None:
        """Moves the record of the step into the rollout, or finishes this where the question failed."""
        if self.rollout.error:
            self.rollout.finished = True
            return
        if self.fitted_prompt is not None:
            self.record.passage_ids, self.record.dropped = tuple(self.evidence), self.fitted_prompt.dropped
        self.rollout.steps.append(self.record)
        self.record = RolloutStep(self.step, None, (), False)

    def finish(self, tokenizer: Tokenizer) -> None:
        """Finishes the rollout: the text before the first end token, and its citations."""
        ids, rollout, steps = self.canvas.ids.tolist(), self.rollout, self.rollout.commit_steps()
        end = next((n for n, token in enumerate(ids) if token in tokenizer.end_ids), len(ids))
        text, spans = tokenizer.decode_with_offsets(ids[:end])
        blanks = len(text) - len(text.lstrip())
        rollout.response = text.strip()
        rollout.citations = cite_passages(
            rollout.response,
            [(start - blanks, stop - blanks) for start, stop in spans],
            [steps[position] for position in range(end)],
            rollout.evidence_at,
            rollout.evidence_texts,
            rollout.question,
        )
        rollout.finished = True
