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
from dlm_rag.decode.copying import Copying
from dlm_rag.decode.guesses import Guesses, Recorder
from dlm_rag.decode.rollout import Action, Committed, Rollout
from dlm_rag.diffusion.commit import Proposals
from dlm_rag.evidence.layout import Arrangement
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import takes_guesses

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
    stop_at: frozenset[int]  # tokens behind which no text is: none where the whole canvas is decoded
    end_ids: frozenset[int] = frozenset()
    evidence: dict[str, str] = field(default_factory=dict)  # id -> the text of it that is in the prompt
    known_words: frozenset[str] | None = None  # of question and evidence, once they are asked for
    copying: Copying | None = None  # what is to be copied of them, where that is asked for
    dropped: tuple[str, ...] = ()  # ids of what was found and has no place in the prompt
    found: list[Passage] | None = None  # what fits of it is the evidence
    arrangement: Arrangement | None = None  # the prompt of the evidence, laid out
    query_key: Hashable = None
    searched_words: frozenset[str] = frozenset()  # of the query that was searched for last
    first_found: list[Passage] = field(default_factory=list)  # at step 0, for feedback and two_rounds
    guesses: Proposals | None = None
    recorder: Recorder | None = None  # of guesses, where somebody wants to see them
    lowest_confidence: float | None = None
    rounds: int = 0  # steps since the block under work has no mask, where its tokens may be edited
    begun: bool = False  # whether it has asked for the first time
    # What the step that is under way has done so far.
    asked: str | None = None
    searched: bool = False
    committed: tuple[Committed, ...] = ()
    remasked: tuple[int, ...] = ()
    edited: tuple[Committed, ...] = ()
    guessed: Guesses | None = None
    lots: NDArray[np.float64] | None = None  # (5, length) that its policy draws at; of noise (2, length)
    action: Action | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The step that is under way."""
        return len(self.rollout.steps)

    @property
    def ended(self) -> bool:
        """Whether its text is certain, or never will be."""
        return bool(self.rollout.error) or self.canvas.finished(self.stop_at)

    @property
    def block(self) -> tuple[int, int]:
        """The positions, from and up to, of the block under work; all where attention has no blocks."""
        assert self.arrangement is not None
        begin, end = self.arrangement.block_of(self.canvas.first_open)
        return begin, min(end, self.canvas.length)

    @property
    def given(self) -> bool:
        """Whether the next token is the first of a block and follows from the block before it: it is asked
        for alone, and the model looks at nothing behind.
        """
        assert self.arrangement is not None
        return self.arrangement.led and self.canvas.first_masked == self.block[0]

    @property
    def window(self) -> tuple[int, int]:
        """The positions, from and up to, that the model looks at: the block under work, whole blocks of
        lookahead behind it where its query takes guesses.
        """
        assert self.arrangement is not None
        settings, (begin, end) = self.settings, self.block
        if self.given:
            return begin, begin
        if (
            settings.lookahead
            and end < self.canvas.length
            and takes_guesses(settings.query, settings.query_threshold)
        ):
            last = min(end + settings.lookahead, self.canvas.length) - 1
            end = min(self.arrangement.block_of(last)[1], self.canvas.length)
        return max(0, begin), end

    @property
    def positions(self) -> NDArray[np.int64]:
        """The canvas positions that the next step asks about: those masked in the window, and with revision
        or edits those committed in the block.
        """
        begin, end = self.window
        if begin == end:
            return np.array([begin])
        asked = self.canvas.masked[begin:end].copy()
        if self.settings.revision_threshold is not None or self.canvas.closed is not None:
            asked[: self.block[1] - begin] = True
        return begin + np.flatnonzero(asked)

    def fail(self, reason: str) -> None:
        """Ends this question without an answer."""
        log.warning("question '%s' failed: %s", self.question.id, reason)
        self.rollout.error = reason


@dataclass
class Search:
    """What was asked for some rows; `results` waits while the search is under way."""

    rows: list[Row] = field(default_factory=list)
    results: Callable[[], list[SearchResult]] = list


@dataclass
class Group:
    """Rows that take their steps together, and their search."""

    rows: list[Row] = field(default_factory=list)
    search: Search = field(default_factory=Search)

    @property
    def live(self) -> list[Row]:
        """The rows that take more steps."""
        return [row for row in self.rows if not (row.rollout.error or row.rollout.finished)]

    @property
    def ready(self) -> list[Row]:
        """Those of them that have evidence, be it empty."""
        return [row for row in self.live if row.arrangement is not None]

    @property
    def begun(self) -> list[Row]:
        """The rows of which a step is under way."""
        return [row for row in self.rows if row.begun]
