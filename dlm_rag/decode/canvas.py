"""The canvas of one question: its response positions, and what a step writes there.

`Canvas` starts all masked. `UniformNoiseCanvas` starts as random tokens (DiffusionGemma): a step proposes
for all positions of a block, accepts some and draws the others again, also those accepted before.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dlm_rag.config import DecodeConfig
from dlm_rag.diffusion.commit_rules import Proposals, samples_actions
from dlm_rag.randomness import sample_uniform

TokenIds = NDArray[np.int64]
# Of at least one candidate those to commit; with the positions, from and up to, of which the schedule of
# `steps_per_block` says how many a step commits.
Choose = Callable[[Proposals, tuple[int, int] | None], Proposals]


@dataclass(frozen=True)
class CanvasChange:
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
        numbers = sample_uniform(generator, count, self.length) if count else None
        return numbers, settings.temperature

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
        """Mask (n,) of the positions that may be committed: masked, in the `commit_range`."""
        begin, end = self.commit_range(block_length, begin, end)
        within = np.zeros(self.length, dtype=bool)
        within[max(0, begin) : end] = True
        return self.masked & within

    def write_step(
        self, proposals: Proposals, settings: DecodeConfig, block: tuple[int, int], choose: Choose
    ) -> CanvasChange:
        """Edits and commits within the current block, from and up to `block`."""
        begin, end = block
        at = proposals.positions
        candidates = proposals.subset(self.candidates(settings.block_length, begin, end)[at])
        waiting, edited, committed = len(candidates.positions) > 0, None, None
        if settings.edit_threshold is not None:
            edited = self.edit(proposals, settings.edit_threshold)
            self.edit_steps = 0 if waiting else self.edit_steps + 1
        if waiting:
            committed = choose(candidates, self.commit_range(settings.block_length, begin, end))
            self.commit(committed)
        settled = self.edit_steps > 0 and (edited is None or not len(edited.positions))
        over = settled or self.edit_steps >= settings.max_edit_steps
        if self.frozen_length is not None and over and not self.masked[max(0, begin) : end].any():
            self.frozen_length, self.edit_steps = end, 0
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


@dataclass
class UniformNoiseCanvas(Canvas):
    """A canvas of uniform noise, denoised block after block.

    `ids` hold what is accepted now; elsewhere the model sees `noise`. Invariant: what stands before
    `frozen_length` changes no more; in the block after it every step accepts again.
    """

    noise: TokenIds = field(kw_only=True)  # (length,)
    vocab_size: int = field(kw_only=True, default=0)
    next_noise: TokenIds | None = field(init=False, default=None)
    block_steps: int = 0  # steps of the current block
    # its most probable tokens at these steps
    argmax_history: list[TokenIds] = field(default_factory=list)

    @property
    def model_ids(self) -> TokenIds:
        return np.where(self.masked, self.noise, self.ids)

    @property
    def open_positions(self) -> NDArray[np.bool_]:
        """An accepted token was drawn: the most probable one stands for it until the block is finished."""
        return np.arange(self.length) >= self.first_mutable

    def draw_numbers(
        self, settings: DecodeConfig, generator: torch.Generator
    ) -> tuple[NDArray[np.float64], float]:
        """(2, n), for tokens and the next noise; the temperature falls from step to step of a block."""
        numbers = sample_uniform(generator, 2, self.length)
        self.next_noise = uniform_tokens(numbers[1], self.vocab_size)
        steps, high, low = settings.steps_per_block, settings.temperature_high, settings.temperature_low
        assert steps is not None and high is not None and low is not None
        return numbers, anneal_temperature(self.block_steps, steps, high, low)

    def write_step(
        self, proposals: Proposals, settings: DecodeConfig, block: tuple[int, int], choose: Choose
    ) -> CanvasChange:
        """Accepts what the rule chooses; once the block has converged or its steps are taken, the most
        probable tokens.
        """
        best = proposals.most_probable
        assert best is not None and self.next_noise is not None
        assert settings.convergence_steps is not None and settings.stop_entropy is not None
        sure = float(proposals.entropy.mean()) < settings.stop_entropy
        over = sure and has_converged(self.argmax_history, best.token_ids, settings.convergence_steps)
        over = over or self.block_steps + 1 == settings.steps_per_block
        change = self.accept(best if over else choose(proposals, None))
        self.block_steps, self.noise = self.block_steps + 1, self.next_noise
        self.argmax_history.append(best.token_ids)
        if over:
            self.finish_block(block[1])
        return change

    def accept(self, chosen: Proposals) -> CanvasChange:
        """Makes `chosen` all that is accepted of the current block."""
        at, before = chosen.positions, self.masked.copy()
        new, other = before[at], ~before[at] & (self.ids[at] != chosen.token_ids)
        self.masked[self.first_mutable :] = True
        self.masked[at] = False
        taken_back = np.flatnonzero(self.masked & ~before)
        self.ids[at], self.ids[taken_back] = chosen.token_ids, self.mask_id
        return CanvasChange(chosen.subset(new), chosen.subset(other), tuple(taken_back.tolist()))

    def finish_block(self, end: int) -> None:
        """Goes on after `end`."""
        self.frozen_length, self.block_steps, self.argmax_history = end, 0, []


def anneal_temperature(taken: int, steps: int, high: float, low: float) -> float:
    """Of the step after `taken` of at most `steps` steps: `high` at first, then linear towards `low`.

    In float32, as transformers does it: a model that reads its own logits amplifies the last bit.
    """
    share = np.float32(steps - taken) / np.float32(steps)
    return float(np.float32(low) + np.float32(high - low) * share)


def uniform_tokens(numbers: NDArray[np.float64], vocabulary: int) -> TokenIds:
    """Token ids (n,), all equally likely, from numbers (n,) in [0, 1)."""
    return np.minimum((numbers * vocabulary).astype(np.int64), vocabulary - 1)


def has_converged(before: Sequence[TokenIds], best: TokenIds, convergence_steps: int) -> bool:
    """Whether the most probable tokens are those of each of the last `convergence_steps` steps.

    before: those of the earlier steps, oldest first.
    """
    last = before[len(before) - convergence_steps :] if convergence_steps <= len(before) else None
    return last is not None and all(np.array_equal(ids, best) for ids in last)
