"""Keys and values that rows see before their own tokens, kept in one block of memory.

In training a context is a list of tensors that gradients flow through. In decoding it stays from step
to step: `ContextStore` holds a slot for each row, the context in front, room for the canvas behind it,
so that a step copies nothing but the keys and values of the canvas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

PAGE = 256  # tokens; the paged kernels of flash-attn want a multiple


class ContextStore:
    """Slots of keys and values, grown as they are needed.

    keys_values: (N, 2, slots, capacity, Hk, D) for N layers; what stands where is the caller's to know.
    """

    def __init__(
        self, layers: int, heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.keys_values = torch.empty((layers, 2, 0, 0, heads, head_dim), device=device, dtype=dtype)

    @property
    def capacity(self) -> int:
        """Tokens that a slot has room for."""
        return self.keys_values.shape[3]

    def reserve(self, slots: int, tokens: int) -> None:
        """Makes room for that many slots of that many tokens; keeps what is there."""
        layers, two, had, room, *rest = self.keys_values.shape
        slots, tokens = max(slots, had), max(-(-tokens // PAGE) * PAGE, room)
        if (slots, tokens) != (had, room):
            grown = self.keys_values.new_empty((layers, two, slots, tokens, *rest))
            grown[:, :, :had, :room] = self.keys_values
            self.keys_values = grown

    def put(self, slot: int, start: int, kept: Tensor) -> None:
        """Writes keys and values (N, 2, n, Hk, D) into a slot from token `start` on."""
        self.keys_values[:, :, slot, start : start + kept.shape[2]] = kept

    def rows(self, slots: Sequence[int], seen: Sequence[int]) -> "StoredRows":
        """The context of one call: row r sees the first seen[r] tokens of slot slots[r]."""
        return StoredRows(self, tuple(slots), tuple(seen))


@dataclass(frozen=True)
class StoredRows:
    """The rows of one call in a `ContextStore`."""

    store: ContextStore
    slots: tuple[int, ...]
    seen: tuple[int, ...]

    @cached_property
    def table(self) -> Tensor:
        """(rows, 1) int32: the page, as large as a slot, that each row reads."""
        return torch.tensor(self.slots, dtype=torch.int32, device=self.store.keys_values.device)[:, None]

    def places(self, lengths: Sequence[int]) -> Tensor:
        """(T,) where packed tokens of rows of `lengths` go, in slots laid behind one another."""
        starts = [
            slot * self.store.capacity + seen for slot, seen in zip(self.slots, self.seen, strict=True)
        ]
        places = [start + n for start, length in zip(starts, lengths, strict=True) for n in range(length)]
        return torch.tensor(places, device=self.store.keys_values.device)

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Puts the rows' own keys and values (T, Hk, D) behind their contexts.

        Returns the keys and values of all slots, each (slots, capacity, Hk, D).
        """
        both = self.store.keys_values[layer]
        for side, own in zip(both, (k, v), strict=True):
            side.flatten(0, 1).index_copy_(0, places, own)
        return both[0], both[1]

    def views(self, slots: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Of `slots` (slots, capacity, Hk, D) what each row sees: (length, Hk, D)."""
        return tuple(slots[slot, :length] for slot, length in zip(self.slots, lengths, strict=True))
