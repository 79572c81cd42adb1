"""Segments that the rows of a call share: their keys and values lie in memory once, whoever reads them.

In each layer the keys and values that a row sees are gathered behind one another, by one index for all rows
and layers: segments of any length, shared in any order, for kernels that want nothing but consecutive rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.model.kv_store import CachedRows, concatenate_ranges, make_consecutive_ranges


class SegmentMemory(Protocol):
    """Where keys and values of segments lie; each segment has consecutive tokens."""

    def write_layer(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes keys and values (n, Hk, D) of a layer to the tokens `places` (n,)."""

    def read_layer(self, layer: int, places: Tensor) -> Tensor:
        """A copy of the keys and values (2, n, Hk, D) of a layer at `places` (n,)."""


@dataclass(frozen=True)
class SharedSegments:
    """The context of each row of a call: ranges of a memory, and what is the row's own, in a slot.

    row_ranges: tokens of the memory that each row sees. written: rows that are new segments themselves,
    each (row, place): in every layer their keys and values go there before any row attends. slots: None
    where no row has tokens of its own from before; its rows are gathered.
    """

    memory: SegmentMemory
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
