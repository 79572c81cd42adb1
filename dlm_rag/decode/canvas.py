"""The canvas of a question: its tokens, all masked at first, and how a step writes into it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dlm_rag.config import DecodeConfig
from dlm_rag.diffusion.commit_rules import Proposals, samples_actions
from dlm_rag.randomness import sample_uniform

TokenIds = NDArray[np.int64]
Span = tuple[int, int]  # positions, from and up to
# Of at least one candidate those to commit; with the positions of which the schedule of `steps_per_block`
# says how many a step commits, and whether any must be.
Choose = Callable[[Proposals, Span | None, bool], Proposals]


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

    def commit_range(self, block_length: int | None, begin: int, end: int) -> Span:
        """From where and up to where positions may be committed: the first block with a mask.

        Blocks of `block_length` (None or 0: one block) are counted from `begin`, which may be below 0, to
        `end`.
        """
        if block_length:
            first = max(begin, 0) + int(np.argmax(self.masked[max(begin, 0) : end]))
            begin = first - (first - begin) % block_length
            end = min(begin + block_length, end)
        return begin, end

    def committed_share(self, begin: int, end: int) -> float:
        """Of a block; what of it stands in the prompt counts as committed."""
        return (end - begin - int(self.masked[max(begin, 0) : end].sum())) / (end - begin)

    def write_step(
        self, proposals: Proposals, settings: DecodeConfig, blocks: Sequence[Span], choose: Choose
    ) -> CanvasChange:
        """Commits within blocks, of which the first is the current one, and edits in this."""
        at, block, offers = proposals.positions, blocks[0], list[tuple[Proposals, Span, bool]]()
        for n, span in enumerate(blocks):
            begin, end = self.commit_range(settings.block_length, *span)
            candidates = proposals.subset(self.masked[at] & (at >= begin) & (at < end))
            must = not n or self.committed_share(*blocks[n - 1]) >= settings.semi_complete_threshold
            if len(candidates.positions):
                offers.append((candidates, (begin, end), must))
        waiting, edited, committed = bool(offers), None, None
        if settings.edit_threshold is not None:
            edited = self.edit(proposals, settings.edit_threshold)
            self.edit_steps = 0 if waiting else self.edit_steps + 1
        if waiting:
            first, *others = [choose(*offer) for offer in offers]
            written = np.concatenate([each.positions for each in (first, *others)])
            committed = proposals.subset(np.isin(at, written)) if others else first
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
