"""Prompts whose tokens see only what is before them, in slots: one that changes runs from there on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import Tensor

from dlm_rag.evidence.pool import Reuse
from dlm_rag.model.gemma import Kept, NoiseDenoiser


@dataclass
class Slot:
    """What is kept for a row: its text, and what its last step left for the next one of the same block."""

    ids: tuple[int, ...] = ()
    kept: Kept = field(default_factory=list)
    block: int = -1  # where the block begins that `logits` are of
    logits: Tensor | None = None


class Prefixes:
    """The slots of a batch; `reuse` counts tokens that rows see, and those that were run."""

    def __init__(self, denoiser: NoiseDenoiser) -> None:
        self._denoiser, self.slots, self.reuse = denoiser, dict[int, Slot](), Reuse()

    def load(self, number: int, ids: Sequence[int]) -> Slot:
        """The slot with the keys and values of `ids`, at least one; runs what it lacks of them."""
        slot, wanted = self.slots.setdefault(number, Slot()), tuple(ids)
        self.reuse.wanted += len(wanted)
        if slot.ids == wanted:
            return slot
        pairs = zip(slot.ids, wanted, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        kept = [(keys[:, :, :same], values[:, :, :same]) for keys, values in slot.kept] if same else []
        if rest := wanted[same:]:  # none where the text has been cut
            self.reuse.encoded += len(rest)
            kept = self._denoiser.extend(kept, rest)
        slot.ids, slot.kept = wanted, kept
        return slot

    def release(self, number: int) -> None:
        """Drops what is kept under this number."""
        self.slots.pop(number, None)
