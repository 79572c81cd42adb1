"""The canvas of a model that deletes and inserts tokens (LLaDA2.2), and when it does so.

Proposed tokens may be of two kinds that are no text: one takes the token at its place away, one puts a mask
before it. The block under work keeps its length: what is lost at its end becomes masks, what is pushed over
it is lost. The rule is `JointThresholdInDel` of SGLang.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dlm_rag.config import DecodeConfig
from dlm_rag.decode.canvas import Canvas, CanvasChange, Choose, Span
from dlm_rag.diffusion.commit_rules import Proposals, find_rule
from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser_config import DenoiserConfig


@dataclass
class LevenshteinCanvas(Canvas):
    """A canvas whose current block is edited by substitution, deletion and insertion.

    Masks are `original` where they are of the fresh canvas; they move with what is deleted and inserted
    before them, and what is written over them keeps the mark. Others were introduced by edits.

    Invariant: before `frozen_length` nothing changes.
    """

    edit_ids: tuple[int, ...] = field(kw_only=True)  # of the tokens that delete and split
    original: NDArray[np.bool_] = field(init=False)
    # Of the current block: steps taken, what it was before each of them, and the tokens that were written
    # at each position.
    block_steps: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)
    tried: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.original = np.ones(self.length, dtype=bool)

    @property
    def introduced_masks(self) -> int:
        return int((self.masked & ~self.original).sum())

    def second_choices(self, settings: DecodeConfig, block: tuple[int, int]) -> dict[int, tuple[int, ...]]:
        begin, end = self._editable(block)
        if self._is_last_step(settings, block):
            return dict.fromkeys(range(begin, end), self.edit_ids)
        if tuple(self.ids[begin:end].tolist()) in self.seen:
            return {place: tuple(self.tried.get(place, ())) for place in range(begin, end)}
        return {}

    def _editable(self, block: tuple[int, int]) -> tuple[int, int]:
        return max(block[0], self.first_mutable), block[1]

    def _is_last_step(self, settings: DecodeConfig, block: tuple[int, int]) -> bool:
        """Whether the next step ends the block: it fills all masks, and neither deletes nor inserts."""
        begin, end = self._editable(block)
        filled, most = not (self.masked & self.original)[begin:end].any(), settings.max_edit_steps
        return self.edit_steps + filled >= most or self.block_steps >= block[1] - block[0] + most

    def write_step(
        self, proposals: Proposals, settings: DecodeConfig, blocks: Sequence[Span], choose: Choose
    ) -> CanvasChange:
        """Edits and commits within the current block: while original masks are left those that the rule
        chooses, then all.
        """
        assert settings.edit_threshold is not None
        block = blocks[0]
        begin, end = self._editable(block)
        found = proposals.subset((proposals.positions >= begin) & (proposals.positions < end))
        ids, masked = self.ids[begin:end], self.masked[begin:end]
        left, last = (masked & self.original[begin:end]).any(), self._is_last_step(settings, block)
        self.block_steps += 1
        self.edit_steps += not left
        filling = masked.copy()
        if left and not last:
            filling = np.isin(found.positions, choose(found.subset(masked), (begin, end), True).positions)
        sure = found.confidence >= settings.edit_threshold
        writing = filling | (~masked & sure & (found.token_ids != ids))
        change, over = CanvasChange(), last or not writing.any()
        if writing.any():
            found = self._choose_others(found, proposals.second_choice, writing, last)
            self.seen.add(tuple(ids.tolist()))
            change = self._write(found, writing, begin)
        if over:
            self.frozen_length, self.block_steps, self.edit_steps = block[1], 0, 0
            self.seen, self.tried = set(), {}
        return change

    def _choose_others(
        self, found: Proposals, others: Proposals | None, writing: NDArray[np.bool_], last: bool
    ) -> Proposals:
        """The proposals with second choices where the last step would delete or insert, or, in a block that
        is as it was before, at the least certain change.
        """
        if others is None:
            return found
        taken = writing & np.isin(found.token_ids, self.edit_ids)
        if not last:
            changing = np.flatnonzero(writing)
            taken = np.arange(len(writing)) == changing[np.argmin(found.confidence[changing])]
        names = ("token_ids", "confidence", "log_prob")
        return replace(found, **{n: np.where(taken, getattr(others, n), getattr(found, n)) for n in names})

    def _write(self, found: Proposals, writing: NDArray[np.bool_], begin: int) -> CanvasChange:
        """Writes tokens (n,) from `begin` on where they are to be written, then deletes and inserts."""
        for place in np.flatnonzero(writing).tolist():
            self.tried.setdefault(begin + place, set()).add(int(found.token_ids[place]))
        deleting, splitting = (writing & (found.token_ids == edit) for edit in self.edit_ids)
        text, masked = writing & ~deleting & ~splitting, self.masked[found.positions]
        committed = found.subset(text & masked)
        edited = found.subset(text & ~masked & (found.token_ids != self.ids[found.positions]))
        self.commit(committed)
        self.ids[edited.positions] = edited.token_ids
        count = len(writing)
        places: list[int] = []  # where what stands in the block then was before; `count`: a new mask
        for at in range(count):
            places += [] if deleting[at] else [count, at] if splitting[at] else [at]
        places = (places + [count] * count)[:count]
        for array, fresh in ((self.ids, self.mask_id), (self.masked, True), (self.original, False)):
            array[begin : begin + count] = np.append(array[begin : begin + count], fresh)[places]
        deleted = tuple(begin + at for at in range(count) if at not in places)
        inserted = tuple(begin + n for n, at in enumerate(places) if at == count)
        return CanvasChange(committed, edited, deleted=deleted, inserted=inserted)


def check_edit_settings(settings: DecodeConfig, shape: DenoiserConfig) -> None:
    """Raises `ConfigError` for settings that do not go with deletions and insertions."""
    rule = find_rule(settings.commit_rule or "threshold")
    wrong = {
        f"commit_rule={settings.commit_rule}": "actions" in rule.statistics,
        f"temperature={settings.temperature:g}": settings.temperature,
        f"copy_penalty={settings.copy_penalty}": settings.copy_penalty is not None,
        f"tokens_per_step={settings.tokens_per_step}": settings.tokens_per_step,
        f"block_length={settings.block_length}": settings.block_length not in (0, shape.block_size),
        "max_edit_steps=0": not settings.max_edit_steps,
    }
    if found := next((words for words, holds in wrong.items() if holds), None):
        raise ConfigError(
            f"{found} does not go with edit_threshold in a model that deletes and inserts: leave it out"
        )
