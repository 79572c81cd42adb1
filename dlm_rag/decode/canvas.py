"""The canvas: the response positions, masked and committed, of one question."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dlm_rag.diffusion.commit_rules import Proposals


@dataclass
class Canvas:
    """Token ids (n,) with `mask_id` where nothing is committed yet.

    frozen_length: positions in front that change no more; None: wherever no mask is, what is written stays.

    Invariant: a committed token changes only through `remask`, and a position at most once, or through
    `edit`, and only behind what is closed.
    """

    length: int
    mask_id: int
    frozen_length: int | None = None
    ids: NDArray[np.int64] = field(init=False)
    masked: NDArray[np.bool_] = field(init=False)
    revised: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = np.full(self.length, self.mask_id, dtype=np.int64)
        self.masked = np.ones(self.length, dtype=bool)
        self.revised = np.zeros(self.length, dtype=bool)

    @property
    def first_masked(self) -> int:
        """The first position that is masked; the length where none is."""
        return int(np.argmax(self.masked)) if self.masked.any() else self.length

    @property
    def first_mutable(self) -> int:
        """The first position that may change; the length where none does."""
        return self.first_masked if self.frozen_length is None else self.frozen_length

    def commit_range(
        self, block_length: int | None, begin: int = 0, end: int | None = None
    ) -> tuple[int, int]:
        """From where and up to where positions may be committed: the first block with a mask.

        Blocks of `block_length` (None or 0: one block) are counted from `begin`, which may be below 0, to
        `end`.
        """
        end = self.length if end is None else end
        if block_length:
            begin = self.first_masked - (self.first_masked - begin) % block_length
            end = min(begin + block_length, end)
        return begin, end

    def candidates(
        self, block_length: int | None, begin: int = 0, end: int | None = None
    ) -> NDArray[np.bool_]:
        """Mask (n,) of the positions that may be committed: masked, in the `commit_block`."""
        begin, end = self.commit_range(block_length, begin, end)
        within = np.zeros(self.length, dtype=bool)
        within[max(0, begin) : end] = True
        return self.masked & within

    def commit(self, chosen: Proposals) -> None:
        """Writes the chosen proposals down; raises `ValueError` if one of them is committed already."""
        if not self.masked[chosen.positions].all():
            raise ValueError("a committed position cannot be committed again")
        self.ids[chosen.positions] = chosen.token_ids
        self.masked[chosen.positions] = False

    def remask(self, proposals: Proposals, bound: float) -> NDArray[np.int64]:
        """Masks committed tokens whose probability now is under `bound`, each position once.

        Returns the positions masked again, ascending.
        """
        at = proposals.positions
        fallen = at[~self.masked[at] & ~self.revised[at] & (proposals.current_prob < bound)]
        self.ids[fallen] = self.mask_id
        self.masked[fallen] = self.revised[fallen] = True
        return fallen

    def edit(self, proposals: Proposals, bound: float) -> Proposals:
        """Puts another token where one is committed, for proposals of at least `bound`; returns these."""
        at = proposals.positions
        other = proposals.token_ids != self.ids[at]
        edits = proposals.subset(
            other & ~self.masked[at] & (at >= self.first_mutable) & (proposals.confidence >= bound)
        )
        self.ids[edits.positions] = edits.token_ids
        return edits

    @property
    def model_ids(self) -> NDArray[np.int64]:
        """The ids that a model sees."""
        return self.ids

    def fill_provisional(self, guesses: Proposals, least_confidence: float) -> list[int]:
        """Ids with the guesses of at least that confidence in the masked positions they are for."""
        ids = self.ids.copy()
        enter = guesses.subset((guesses.confidence >= least_confidence) & self.masked[guesses.positions])
        ids[enter.positions] = enter.token_ids
        return ids.tolist()

    def is_finished(self, end_ids: Collection[int]) -> bool:
        """Whether the text is certain: nothing is open any more, or nothing before a committed end token.

        What stands behind the first end token is no part of the text.
        """
        if self.first_mutable == self.length:
            return True
        before = self.ids[: self.first_mutable]
        return bool(np.isin(before, list(end_ids)).any())


@dataclass
class UniformNoiseCanvas(Canvas):
    """A canvas of uniform noise, denoised block after block.

    `ids` hold what is accepted now; elsewhere the model sees `noise`. Invariant: what stands before
    `closed` changes no more; in the block behind it every step accepts anew.
    """

    noise: NDArray[np.int64] = field(kw_only=True)  # (length,)
    block_steps: int = 0  # steps of the block under work
    # its most probable tokens at these steps
    argmax_history: list[NDArray[np.int64]] = field(default_factory=list)

    @property
    def model_ids(self) -> NDArray[np.int64]:
        return np.where(self.masked, self.noise, self.ids)

    def accept(self, chosen: Proposals) -> tuple[Proposals, Proposals, NDArray[np.int64]]:
        """Makes `chosen` all that is accepted of the block under work.

        Returns those for positions where nothing was accepted, those that differ from what was, and the
        positions whose token is taken back, ascending.
        """
        at, before = chosen.positions, self.masked.copy()
        new, other = before[at], ~before[at] & (self.ids[at] != chosen.token_ids)
        self.masked[self.first_mutable :] = True
        self.masked[at] = False
        taken_back = np.flatnonzero(self.masked & ~before)
        self.ids[at], self.ids[taken_back] = chosen.token_ids, self.mask_id
        return chosen.subset(new), chosen.subset(other), taken_back

    def renoise(self, best: NDArray[np.int64], noise: NDArray[np.int64]) -> None:
        """Goes on with other noise (length,); best: the most probable tokens of the block under work."""
        self.block_steps, self.noise = self.block_steps + 1, noise
        self.argmax_history.append(best)

    def finish_block(self, end: int) -> None:
        """Goes on behind `end`."""
        self.frozen_length, self.block_steps, self.argmax_history = end, 0, []

    def fill_provisional(self, guesses: Proposals, least_confidence: float) -> list[int]:
        """As of any canvas; a guess stands before an accepted token too, which is drawn and not the most
        probable one."""
        ids = self.ids.copy()
        enter = guesses.subset(
            (guesses.confidence >= least_confidence) & (guesses.positions >= self.first_mutable)
        )
        ids[enter.positions] = enter.token_ids
        return ids.tolist()
