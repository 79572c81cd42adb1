"""The canvas of a question: its tokens, all masked at first, and how a step writes into it."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dlm_rag.config import DecodeConfig
from dlm_rag.diffusion.commit_rules import Proposals, samples_actions
from dlm_rag.randomness import sample_uniform

TokenIds = NDArray[np.int64]
Span = tuple[int, int]  # positions, from and up to


class CanvasChange(NamedTuple):
    """What a step has written: where no token was, in place of another one, and what it has taken back."""

    committed: Proposals | None = None
    edited: Proposals | None = None
    remasked: tuple[int, ...] = ()


@dataclass
class Canvas:
    """Token ids (n,) with `mask_id` where nothing is committed yet.

    frozen_length: positions in front that change no more; None: a committed token stays.
    chooses_itself: whether `write` takes its own choice of proposals, and no rule is asked.

    Invariant: a committed token changes only by `edit`, after the frozen positions.
    """

    chooses_itself: ClassVar[bool] = False
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
        return self.ids

    def select_provisional(self, proposals: Proposals) -> Proposals:
        """The proposals of a step, which has been written, that stand for what is still to come."""
        return proposals.subset(self.masked[proposals.positions])

    def draw_numbers(
        self, settings: DecodeConfig, generator: torch.Generator
    ) -> tuple[NDArray[np.float64] | None, float]:
        """The uniform numbers of a step, by position, (5, n) for a policy, (1, n) for sampled tokens.

        And the temperature of these tokens.
        """
        count = 5 if samples_actions(settings) else int(settings.temperature > 0)
        return sample_uniform(generator, count, self.length) if count else None, settings.temperature

    def committed_share(self, begin: int, end: int) -> float:
        """Of a block; what of it stands in the prompt counts as committed."""
        return (end - begin - int(self.masked[max(begin, 0) : end].sum())) / (end - begin)

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
        """Ids with the provisional tokens of at least that confidence in their places."""
        ids, entering = self.ids.copy(), provisional.subset(provisional.confidence >= least_confidence)
        ids[entering.positions] = entering.token_ids
        return ids.tolist()

    def is_finished(self, end_ids: Collection[int]) -> bool:
        """Whether the text is certain: nothing may change, or nothing before a committed end token."""
        before = self.ids[: self.first_mutable]
        return len(before) == self.length or bool(np.isin(before, list(end_ids)).any())
