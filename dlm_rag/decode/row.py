"""What the engine carries from step to step: rows, groups of rows, their searches."""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NewType

import numpy as np
import torch
from numpy.typing import NDArray

from dlm_rag.config import DecodeConfig
from dlm_rag.decode.canvas import Canvas
from dlm_rag.decode.copy_sources import CopySources
from dlm_rag.decode.provisional_log import ProvisionalDelta, ProvisionalRecorder
from dlm_rag.decode.rollout import Action, CommittedToken, Rollout
from dlm_rag.diffusion.commit_rules import Proposals
from dlm_rag.evidence.prompt_segments import LaidOutPrompt
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import query_uses_provisional_tokens

log = logging.getLogger(__name__)

Ticket = NewType("Ticket", int)
SearchResult = list[Passage] | Exception  # by one search


@dataclass(eq=False)
class Row:
    """A question in the batch and its state between two steps."""

    ticket: Ticket
    question: Question
    settings: DecodeConfig  # its own
    slot: int  # where its context lies
    canvas: Canvas
    generator: torch.Generator
    rollout: Rollout
    stop_ids: frozenset[int]  # tokens behind which no text is: none where the whole canvas is decoded
    end_ids: frozenset[int] = frozenset()
    evidence: dict[str, str] = field(default_factory=dict)  # id -> the text of it that is in the prompt
    known_words: frozenset[str] | None = None  # of question and evidence, once they are asked for
    copy_sources: CopySources | None = None  # what is to be copied of them, where that is asked for
    dropped_ids: tuple[str, ...] = ()  # ids of what was found and has no place in the prompt
    retrieved_passages: list[Passage] | None = None  # what fits of it is the evidence
    laid_out_prompt: LaidOutPrompt | None = None  # the prompt of the evidence, laid out
    query_key: Hashable = None
    searched_words: frozenset[str] = frozenset()  # of the query that was searched for last
    first_passages: list[Passage] = field(default_factory=list)  # what the first search found
    provisional: Proposals | None = None
    provisional_recorder: ProvisionalRecorder | None = None  # of guesses, where somebody wants to see them
    lowest_confidence: float | None = None
    edit_rounds_taken: int = (
        0  # steps since the block under work has no mask, where its tokens may be edited
    )
    has_started: bool = False  # whether it has asked for the first time
    # What the step that is under way has done so far.
    step_query: str | None = None
    step_searched: bool = False
    committed: tuple[CommittedToken, ...] = ()
    remasked: tuple[int, ...] = ()
    edited: tuple[CommittedToken, ...] = ()
    provisional_delta: ProvisionalDelta | None = None
    uniform_draws: NDArray[np.float64] | None = (
        None  # (5, length) that its policy draws at; of noise (2, length)
    )
    action: Action | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The step that is under way."""
        return len(self.rollout.steps)

    @property
    def is_done(self) -> bool:
        """Whether its text is certain, or never will be."""
        return bool(self.rollout.error) or self.canvas.is_finished(self.stop_ids)

    @property
    def current_block(self) -> tuple[int, int]:
        """The positions, from and up to, of the block under work; all where attention has no blocks."""
        assert self.laid_out_prompt is not None
        begin, end = self.laid_out_prompt.block_bounds(self.canvas.first_mutable)
        return begin, min(end, self.canvas.length)

    @property
    def follows_last_block(self) -> bool:
        """Whether the next token is the first of a block and follows from the block before it: it is asked
        for alone, and the model looks at nothing behind.
        """
        assert self.laid_out_prompt is not None
        return (
            self.laid_out_prompt.predicts_next_block and self.canvas.first_masked == self.current_block[0]
        )

    @property
    def window(self) -> tuple[int, int]:
        """The positions, from and up to, that the model looks at: the block under work, whole blocks of
        lookahead behind it where its query takes guesses.
        """
        assert self.laid_out_prompt is not None
        settings, (begin, end) = self.settings, self.current_block
        if self.follows_last_block:
            return begin, begin
        if (
            settings.query_window
            and end < self.canvas.length
            and query_uses_provisional_tokens(settings.query_policy, settings.query_threshold)
        ):
            last = min(end + settings.query_window, self.canvas.length) - 1
            end = min(self.laid_out_prompt.block_bounds(last)[1], self.canvas.length)
        return max(0, begin), end

    @property
    def positions_to_predict(self) -> NDArray[np.int64]:
        """The canvas positions that the next step asks about: those masked in the window, and with revision
        or edits those committed in the block.
        """
        begin, end = self.window
        if begin == end:
            return np.array([begin])
        asked = self.canvas.masked[begin:end].copy()
        if self.settings.remask_threshold is not None or self.canvas.frozen_length is not None:
            asked[: self.current_block[1] - begin] = True
        return begin + np.flatnonzero(asked)

    def fail(self, reason: str) -> None:
        """Ends this question without an answer."""
        log.warning("question '%s' failed: %s", self.question.id, reason)
        self.rollout.error = reason


@dataclass
class PendingSearch:
    """What was asked for some rows; `results` waits while the search is under way."""

    rows: list[Row] = field(default_factory=list)
    results: Callable[[], list[SearchResult]] = list


@dataclass
class RowGroup:
    """Rows that take their steps together, and their search."""

    rows: list[Row] = field(default_factory=list)
    search: PendingSearch = field(default_factory=PendingSearch)

    @property
    def active_rows(self) -> list[Row]:
        """The rows that take more steps."""
        return [row for row in self.rows if not (row.rollout.error or row.rollout.finished)]

    @property
    def ready_rows(self) -> list[Row]:
        """Those of them that have evidence, be it empty."""
        return [row for row in self.active_rows if row.laid_out_prompt is not None]

    @property
    def started_rows(self) -> list[Row]:
        """The rows of which a step is under way."""
        return [row for row in self.rows if row.has_started]
