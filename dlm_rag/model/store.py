"""Keys and values that rows see before their own tokens: in parts, or kept in one block of memory.

In training a context is in parts that gradients flow through (`Parts`). In decoding it stays from step
to step: `ContextStore` holds a slot for each row, the context in front, room for the canvas behind it,
so that a step copies nothing but the keys and values of the canvas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAGE = 256  # tokens; the paged kernels want a multiple
KeysValues = Sequence[tuple[Tensor, Tensor]]  # for each layer, each (n, Hk, D)


@dataclass(frozen=True)
class Parts:
    """The context of each row as keys and values of earlier calls, in parts that rows may share."""

    rows: Sequence[Sequence[KeysValues]]

    @cached_property
    def seen(self) -> tuple[int, ...]:
        """Tokens that each row sees before its own."""
        return tuple(sum(len(part[0][0]) for part in parts) for parts in self.rows)

    def join(self, layer: int, k: Tensor, v: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of each row its context, then its own k and v (T, Hk, D), rows of `lengths`."""
        kept = [[part[layer] for part in parts] for parts in self.rows]
        rows = list(zip(kept, k.split(list(lengths)), v.split(list(lengths)), strict=True))
        seen_k = [x for parts, own_k, _ in rows for x in (*(part[0] for part in parts), own_k)]
        seen_v = [x for parts, _, own_v in rows for x in (*(part[1] for part in parts), own_v)]
        return Joined.apply(*seen_k), Joined.apply(*seen_v)


class Joined(torch.autograd.Function):
    """`torch.cat`, but that the gradient of each piece is a tensor of its own.

    A view would keep that of all rows alive, in every layer, until backward comes to the contexts.
    """

    @staticmethod
    def forward(ctx: Any, *pieces: Tensor) -> Tensor:
        ctx.lengths = [len(piece) for piece in pieces]
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, ...]:
        return tuple(piece.clone() for piece in slope.split(ctx.lengths))


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

    def move(self, slot: int, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copies stretches within a slot, each (from, to, tokens); all are read before any is written."""
        held = self.keys_values[:, :, slot]
        read = [held[:, :, start : start + count].clone() for start, _, count in moves]
        for (_, target, count), kept in zip(moves, read, strict=True):
            held[:, :, target : target + count] = kept

    def rows(self, slots: Sequence[int], seen: Sequence[int]) -> "StoredRows":
        """The context of one call: row r sees the first seen[r] tokens of slot slots[r]."""
        return StoredRows(self, tuple(slots), tuple(seen))


@dataclass(frozen=True)
class StoredRows:
    """The rows of one call in a `ContextStore`."""

    store: ContextStore
    slots: tuple[int, ...]
    seen: tuple[int, ...]

    def places(self, lengths: Sequence[int]) -> NDArray[np.int64]:
        """(T,) where packed tokens of rows of `lengths` go, in slots laid behind one another."""
        starts = np.array(self.slots) * self.store.capacity + np.array(self.seen)
        return counted_from(starts, lengths)

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


def counted_from(starts: NDArray[np.int64], lengths: Sequence[int]) -> NDArray[np.int64]:
    """(sum of lengths,) for each row the numbers from its start on, as many as its length."""
    before = np.cumsum(lengths) - lengths
    return np.arange(sum(lengths)) + np.repeat(starts - before, lengths)
