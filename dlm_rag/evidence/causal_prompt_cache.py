"""Prompts whose tokens see only what is before them, in slots: one that changes runs from there on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import Tensor

from dlm_rag.evidence.segment_kv_cache import CacheStats
from dlm_rag.model.diffusion_gemma import DiffusionGemmaDenoiser, PromptKeysValues


@dataclass
class PrefixSlot:
    """What is kept for a row: its text, and what its last step left for the next one of the same block."""

    ids: tuple[int, ...] = ()
    keys_values: PromptKeysValues = field(default_factory=list)
    logits_block_start: int = -1  # where the block begins that `logits` are of
    previous_logits: Tensor | None = None


class PrefixKVCache:
    """The slots of a batch; `cache_stats` counts tokens that rows see, and those that were run."""

    def __init__(self, denoiser: DiffusionGemmaDenoiser) -> None:
        self._denoiser, self.slots, self.cache_stats = denoiser, dict[int, PrefixSlot](), CacheStats()

    def prefill(self, number: int, ids: Sequence[int]) -> PrefixSlot:
        """The slot with the keys and values of `ids`, at least one; runs what it lacks of them."""
        slot, wanted = self.slots.setdefault(number, PrefixSlot()), tuple(ids)
        self.cache_stats.requested_tokens += len(wanted)
        if slot.ids == wanted:
            return slot
        pairs = zip(slot.ids, wanted, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        kept = (
            [(keys[:, :, :same], values[:, :, :same]) for keys, values in slot.keys_values] if same else []
        )
        if rest := wanted[same:]:  # none where the text has been cut
            self.cache_stats.encoded_tokens += len(rest)
            kept = self._denoiser.extend_cache(kept, rest)
        slot.ids, slot.keys_values = wanted, kept
        return slot

    def release(self, number: int) -> None:
        """Drops what is kept under this number."""
        self.slots.pop(number, None)
