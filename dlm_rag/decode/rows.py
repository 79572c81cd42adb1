"""What the loop carries from step to step: the rows of a batch, their groups, their searches."""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from dlm_rag.decode.canvas import Canvas
from dlm_rag.decode.rollout import Committed, Rollout
from dlm_rag.diffusion.commit import Gram, Proposals
from dlm_rag.evidence.layout import Arrangement
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import Passage

log = logging.getLogger(__name__)

OnStep = Callable[[Rollout], None]
Found = list[Passage] | Exception  # by one search


@dataclass(eq=False)
class Row:
    """A question in the batch and its state between two steps."""

    question: Question
    slot: int  # where its context lies
    canvas: Canvas
    generator: torch.Generator
    rollout: Rollout
    evidence: dict[str, str] = field(default_factory=dict)  # id -> the text of it that is in the prompt
    dropped: tuple[str, ...] = ()  # ids of what was found and has no place in the prompt
    found: list[Passage] | None = None  # by the last search; what fits of it is the evidence
    arrangement: Arrangement | None = None  # the prompt of the evidence, laid out
    query_key: Hashable = None
    first_passage: str = ""  # the best of step 0, for query=feedback
    grams: dict[Gram, int] = field(default_factory=dict)  # of its facts, for copied_threshold
    shown: int = 0  # positions of the canvas that the denoiser gets to see
    guesses: Proposals | None = None
    lowest_confidence: float | None = None
    # What the step that is under way has done so far.
    asked: str | None = None
    searched: bool = False
    committed: tuple[Committed, ...] = ()
    remasked: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The step that is under way."""
        return len(self.rollout.steps)

    def fail(self, reason: str) -> None:
        """Ends this question without an answer."""
        log.warning("question '%s' failed: %s", self.question.id, reason)
        self.rollout.error = reason


@dataclass
class Search:
    """What was asked for some rows; `results` waits while the search is under way."""

    rows: list[Row] = field(default_factory=list)
    results: Callable[[], list[Found]] = list


@dataclass
class Group:
    """Rows that take their steps together, the slots free for more of them, their search."""

    free: list[int]
    on_step: OnStep | None
    most: int = 0  # rows that it may have
    rows: list[Row] = field(default_factory=list)
    search: Search = field(default_factory=Search)

    @property
    def live(self) -> list[Row]:
        """The rows that have not failed."""
        return [row for row in self.rows if not row.rollout.error]

    @property
    def ready(self) -> list[Row]:
        """Those of them that have evidence, be it empty."""
        return [row for row in self.live if row.arrangement is not None]
