"""Keys and values that rows see before their own tokens: in parts, or kept in one block of memory.

In training a context is in parts that gradients flow through (`SharedContext`). In decoding it stays from
step to step: `SlotKVCache` has a slot for each row, the context first, then room for the canvas, so that a
step copies nothing but the keys and values of the canvas. `SharedSegments` lie in memory once, whoever
reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby
from typing import Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

PAGE_TOKENS = 256  # of which slots have a whole number, so that they grow seldom
MIN_MOVE_TOKENS = 16  # below it, copying by way of other memory takes fewer calls
KeysValues = Sequence[tuple[Tensor, Tensor]]  # for each layer, each (n, Hk, D)


@dataclass(frozen=True)
class SharedContext:
    """The context of each row among the keys and values of an earlier call, which rows may share.

    keys_values: of all tokens of that call, layer by layer. row_ranges: those that each row sees.
    """

    keys_values: KeysValues
    row_ranges: Sequence[Sequence[range]]

    @cached_property
    def context_lengths(self) -> tuple[int, ...]:
        """Tokens that each row sees before its own."""
        return tuple(sum(map(len, stretches)) for stretches in self.row_ranges)

    def build_arrays(self, lengths: Sequence[int], keys: Sequence[int]) -> dict[str, NDArray[Any]]:
        """`places`: what each row sees, in that call's tokens followed by the rows' own, of `lengths`."""
        _, *own = make_consecutive_ranges([len(self.keys_values[0][0]), *lengths])
        seen = [part for row, last in zip(self.row_ranges, own, strict=True) for part in (*row, last)]
        starts = np.array([part.start for part in seen])
        return {"places": concatenate_ranges(starts, [len(part) for part in seen])}

    def extend(self, layer: int, k: Tensor, v: Tensor, at: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """For each row its context, then its own k and v (T, Hk, D); at: what `build_arrays` made."""
        kept_k, kept_v = self.keys_values[layer]
        return GatherConcat.apply(kept_k, k, at["places"]), GatherConcat.apply(kept_v, v, at["places"])


class GatherConcat(torch.autograd.Function):
    """`torch.cat((kept, own))[places]`, with gradients that are tensors of their own.

    A view would keep the gradients of the rows' own tokens alive until backward reaches the contexts.
    """

    @staticmethod
    def forward(ctx: Any, kept: Tensor, own: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.lengths = len(kept), len(own)
        return torch.cat((kept, own))[places]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        whole = slope.new_zeros((sum(ctx.lengths), *slope.shape[1:])).index_add_(0, places, slope)
        return *(part.clone() for part in whole.split(ctx.lengths)), None


class SlotKVCache:
    """Slots of keys and values, grown when needed, and scratch room after them for one call.

    parts: (N, 2, tokens, Hk, D) for N layers, tokens in pages of `PAGE_TOKENS`; one for each run of layers
    on the same device. Slot s begins at token s * capacity; the caller knows what is where.
    """

    def __init__(
        self, heads: int, head_dim: int, dtype: torch.dtype, devices: Sequence[torch.device]
    ) -> None:
        """devices: of each layer."""
        self.parts = [
            torch.empty((len(list(same)), 2, 0, heads, head_dim), device=device, dtype=dtype)
            for device, same in groupby(devices)
        ]
        self.slots = self.capacity = 0  # how many slots, and tokens that each has room for

    def reserve(self, slots: int, tokens: int, scratch: int = 0) -> None:
        """Makes room for that many slots of that many tokens, and scratch tokens; keeps what slots hold."""
        slots, capacity = max(slots, self.slots), max(round_up_to_page(tokens), self.capacity)
        grown = (slots, capacity) != (self.slots, self.capacity)
        if not grown and slots * capacity + scratch <= self.parts[0].shape[2]:
            return
        for number, part in enumerate(self.parts):
            layers, two, _, *rest = part.shape
            room = part.new_empty((layers, two, slots * capacity + scratch, *rest))
            if self.slots:
                by_slot = "layers kv (slots tokens) h d -> layers kv slots tokens h d"
                there = rearrange(room[:, :, : slots * capacity], by_slot, slots=slots)
                held = rearrange(part[:, :, : self.slots * self.capacity], by_slot, slots=self.slots)
                there[:, :, : self.slots, : self.capacity] = held
            self.parts[number] = room
        self.slots, self.capacity = slots, capacity

    def layer(self, number: int) -> Tensor:
        """Keys and values (2, tokens, Hk, D) of a layer, on its device."""
        for part in self.parts:
            if number < len(part):
                return part[number]
            number -= len(part)
        raise IndexError

    def write_tokens(self, place: int, kept: Tensor) -> None:
        """Writes keys and values (N, 2, n, Hk, D) from a place on."""
        for part, own in zip(self.parts, kept.split([*map(len, self.parts)]), strict=True):
            part[:, :, place : place + kept.shape[2]] = own

    def move_tokens(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Moves keys and values as if at once; each (from, to, tokens)."""
        moves = sorted(move for move in moves if move[0] != move[1] and move[2])
        places = [place for _, place, _ in moves]
        if places != sorted(places):  # they pass each other: all are read before any is written
            read = [(place, self.read_tokens(source, tokens)) for source, place, tokens in moves]
            for place, kept in read:
                self.write_tokens(place, kept)
            return
        # In this order nothing is overwritten that is still to be moved.
        left = [move for move in moves if move[1] < move[0]]
        right = [move for move in reversed(moves) if move[1] > move[0]]
        for source, place, tokens in (*left, *right):
            step = source - place
            piece = step if step >= MIN_MOVE_TOKENS else tokens
            for at in range(0, tokens, piece):
                count = min(piece, tokens - at)
                for part in self.parts:
                    kept = part[:, :, source + at : source + at + count]
                    kept = kept if abs(step) >= count else kept.clone()
                    part[:, :, place + at : place + at + count] = kept

    def read_tokens(self, place: int, tokens: int) -> Tensor:
        """A copy of the keys and values (N, 2, n, Hk, D) from a place on, on the first device."""
        first, *rest = (part[:, :, place : place + tokens] for part in self.parts)
        return torch.cat([first, *(part.to(first.device) for part in rest)]) if rest else first.clone()


def round_up_to_page(tokens: int) -> int:
    """The tokens of the pages that so many need."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


@dataclass(frozen=True)
class CachedRows:
    """The rows of one call in a `SlotKVCache`: each sees its `context_lengths` first tokens from its start
    on.

    copies: rows whose keys and values are also written elsewhere, each (row, place), for other rows of the
    call: in every layer all keys are written before any row attends. gathered: whether what the rows see is
    copied out of the slots, for kernels that want consecutive rows.
    """

    cache: SlotKVCache
    starts: Sequence[int]
    context_lengths: Sequence[int]
    copies: Sequence[tuple[int, int]] = ()
    gathered: bool = False

    def build_arrays(self, lengths: Sequence[int], keys: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Where packed tokens of rows of `lengths` go, and where `keys` of each row lie.

        places, sources: (T + copied,) of tokens and of where they go, all in order, then those that are
        copied; sources are left out where there are none. kept: (sum of keys,) what is gathered.
        """
        rows = [*range(len(lengths)), *(row for row, _ in self.copies)]
        own = [start + seen for start, seen in zip(self.starts, self.context_lengths, strict=True)]
        begin = np.array([*own, *(place for _, place in self.copies)], dtype=np.int64)
        taken = [lengths[row] for row in rows]
        found: dict[str, NDArray[Any]] = {"places": concatenate_ranges(begin, taken)}
        if self.copies:
            first = np.cumsum(lengths, dtype=np.int64) - np.array(lengths, dtype=np.int64)
            found["sources"] = concatenate_ranges(first[rows], taken)
        if self.gathered:
            found["kept"] = concatenate_ranges(np.array(self.starts, dtype=np.int64), keys)
        return found

    def extend(self, layer: int, k: Tensor, v: Tensor, at: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Writes the rows' own keys and values (T, Hk, D) after their contexts, and the copies.

        at: what `build_arrays` made. Returns all keys and values of the cache, each (tokens, Hk, D), or
        those that are gathered.
        """
        both, sources = self.cache.layer(layer), at.get("sources")
        for side, own in zip(both, (k, v), strict=True):
            side.index_copy_(0, at["places"], own if sources is None else own[sources])
        keys, values = (both.index_select(1, at["kept"]) if self.gathered else both).unbind()
        return keys, values

    def slice_rows(self, stored: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """What each row sees of `stored` (tokens, Hk, D): (length, Hk, D)."""
        return tuple(stored[at : at + length] for at, length in zip(self.starts, lengths, strict=True))


@dataclass(frozen=True)
class SharedSegments:
    """Segments that the rows of a call share, in one memory, and what is each row's own, in a slot.

    In each layer the keys and values that a row sees are gathered behind one another, by one index for all
    rows and layers: for kernels that want nothing but consecutive rows. memory: an arena of the evidence
    pool. row_ranges: tokens of it that each row sees. written: rows that are new segments themselves, each
    (row, place): in every layer their keys and values go there before any row attends. slots: None where
    no row has tokens of its own from before; its rows are gathered.
    """

    memory: Any
    row_ranges: Sequence[Sequence[range]]
    written: Sequence[tuple[int, int]] = ()
    slots: CachedRows | None = None

    @property
    def context_lengths(self) -> list[int]:
        """Tokens that each row sees before its own."""
        kept = [0] * len(self.row_ranges) if self.slots is None else self.slots.context_lengths
        return [sum(map(len, row)) + n for row, n in zip(self.row_ranges, kept, strict=True)]

    def build_arrays(self, lengths: Sequence[int], keys: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Those of the slots; where tokens of rows of `lengths` go, and where `keys` of each row lie.

        written, written_to: packed tokens, and where in the memory they go. seen: (K,) which tokens of the
        memory are copied for all rows, any for the row's own keys; own: where these go among the K. Neither
        is there where no row sees a segment.
        """
        shared = [sum(map(len, row)) for row in self.row_ranges]
        own = [n - m for n, m in zip(keys, shared, strict=True)]
        found = {} if self.slots is None else self.slots.build_arrays(lengths, own)
        if self.written:
            packed, (rows, places) = make_consecutive_ranges(lengths), zip(*self.written, strict=True)
            taken = [lengths[row] for row in rows]
            found["written"] = concatenate_ranges(np.array([packed[row].start for row in rows]), taken)
            found["written_to"] = concatenate_ranges(np.array(places), taken)
        if any(shared):
            parts = list(chain.from_iterable(self.row_ranges))
            begin = np.cumsum(keys, dtype=np.int64) - np.array(keys, dtype=np.int64)
            found["seen"] = np.zeros(sum(keys), np.int64)
            found["seen"][concatenate_ranges(begin, shared)] = concatenate_ranges(
                np.array([part.start for part in parts]), [len(part) for part in parts]
            )
            found["own"] = concatenate_ranges(begin + np.array(shared), own)
        return found

    def extend(self, layer: int, k: Tensor, v: Tensor, at: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Writes the rows' own keys and values (T, Hk, D) where others read them.

        Returns all that the rows see, row by row.
        """
        if self.written:
            self.memory.write_layer(layer, at["written_to"], k[at["written"]], v[at["written"]])
        own = (k, v) if self.slots is None else self.slots.extend(layer, k, v, at)
        if "seen" not in at:
            return own
        keys, values = self.memory.read_layer(layer, at["seen"]).unbind()
        keys.index_copy_(0, at["own"], own[0])
        values.index_copy_(0, at["own"], own[1])
        return keys, values


def concatenate_ranges(starts: NDArray[np.int64], lengths: Sequence[int]) -> NDArray[np.int64]:
    """(sum of lengths,) for each row the numbers from its start on, as many as its length."""
    before = np.cumsum(lengths) - lengths
    return np.arange(sum(lengths)) + np.repeat(starts - before, lengths)


def make_consecutive_ranges(lengths: Sequence[int]) -> list[range]:
    """The places of consecutive pieces of `lengths`, from 0 on."""
    return [range(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
