"""Segments that the rows of a call share: their keys and values lie in memory once, whoever reads them.

Attention to disjoint sets of keys, each part weighted by the exponential of its log-sum-exp, is attention
to all of them (as FlashAttention merges its splits). So each row attends to its own tokens; each segment,
in one ragged call, is attended to by the queries of all rows that see it; and the parts are merged in the
order of the row. There is no block table, and no segment is padded to a page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.model.kv_store import CachedRows, concatenate_ranges, make_consecutive_ranges


class SegmentMemory(Protocol):
    """Where keys and values of segments lie; each segment has consecutive tokens."""

    is_compressed: bool  # whether it has to be gathered before it can be attended to

    def write_layer(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes keys and values (n, Hk, D) of a layer to the tokens `places` (n,)."""

    def read_layer(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each (n, Hk, D): all, or of a compressed memory those at `places`."""


class SharedReadPlan(NamedTuple):
    """Which queries of a call see which segments of a memory, as one ragged call of attention.

    query_lengths, key_lengths: of its rows: a segment and all queries that see it; what lies between two
    segments is a row without queries. pairs: of a query and a key. arrays, in this order: query_index (S,),
    packed queries, segment by segment; query_ends, key_ends (rows + 1,) int32; merge_index (Tq, P), which
    of the S belong to a query, S for none; gathered (K,), the tokens of a compressed memory that are seen.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    pairs: int
    arrays: dict[str, NDArray[Any]]


EMPTY_PLAN = SharedReadPlan((), (), 0, {})


@dataclass(frozen=True)
class SharedSegments:
    """The context of each row of a call: ranges of a memory, and what is the row's own, in a slot.

    row_ranges: tokens of the memory that each row sees. written: rows that are new segments themselves,
    each (row, place): in every layer their keys and values go there before any row attends. slots: None
    where no row has tokens of its own from before.
    """

    memory: SegmentMemory
    row_ranges: Sequence[Sequence[range]]
    written: Sequence[tuple[int, int]] = ()
    slots: CachedRows | None = None

    @property
    def context_lengths(self) -> Sequence[int]:
        """Tokens that each row sees before its own in its slot."""
        return (0,) * len(self.row_ranges) if self.slots is None else self.slots.context_lengths

    def build_arrays(self, lengths: Sequence[int], keys: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Those of the slots; `written`, `written_to`: packed tokens, and where in the memory they go."""
        found = {} if self.slots is None else self.slots.build_arrays(lengths, keys)
        if self.written:
            own, (rows, places) = make_consecutive_ranges(lengths), zip(*self.written, strict=True)
            taken = [lengths[row] for row in rows]
            found["written"] = concatenate_ranges(np.array([own[row].start for row in rows]), taken)
            found["written_to"] = concatenate_ranges(np.array(places), taken)
        return found

    def plan_reads(self, queries: Sequence[int]) -> SharedReadPlan:
        """Who reads what, for rows of so many queries."""
        readers = dict[tuple[int, int], list[int]]()
        for row, ranges in enumerate(self.row_ranges):
            for part in ranges:
                readers.setdefault((part.start, part.stop), []).append(row)
        own, total = make_consecutive_ranges(queries), 0
        index, query_lengths, key_lengths = [np.zeros(0, np.int64)], list[int](), list[int]()
        first, end = dict[tuple[int, int, int], int](), 0  # (segment, row) -> its first of the S
        for start, stop in sorted(readers):
            if not self.memory.is_compressed and start > end:
                query_lengths.append(0)
                key_lengths.append(start - end)
            for row in readers[start, stop]:
                first[start, stop, row] = total
                index.append(np.arange(own[row].start, own[row].stop))
                total += queries[row]
            query_lengths.append(sum(queries[row] for row in readers[start, stop]))
            key_lengths.append(stop - start)
            end = stop
        merge = np.full((sum(queries), max(map(len, self.row_ranges))), total, dtype=np.int64)
        for row, ranges in enumerate(self.row_ranges):
            for rank, part in enumerate(ranges):
                begin = first[part.start, part.stop, row]
                merge[own[row].start : own[row].stop, rank] = np.arange(begin, begin + queries[row])
        gathered = [np.arange(*segment) for segment in sorted(readers)] if self.memory.is_compressed else []
        arrays: dict[str, NDArray[Any]] = {
            "query_index": np.concatenate(index),
            "query_ends": np.cumsum([0, *query_lengths], dtype=np.int32),
            "key_ends": np.cumsum([0, *key_lengths], dtype=np.int32),
            "merge_index": merge,
            "gathered": np.concatenate([np.zeros(0, np.int64), *gathered]),
        }
        pairs = sum(n * k for n, k in zip(query_lengths, key_lengths, strict=True))
        return SharedReadPlan(tuple(query_lengths), tuple(key_lengths), pairs, arrays)

    def extend(self, layer: int, k: Tensor, v: Tensor, at: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Writes the rows' own keys and values (T, Hk, D) where others read them.

        Returns what the rows see of their own: all that the slots hold, or k and v as they are.
        """
        if self.written:
            self.memory.write_layer(layer, at["written_to"], k[at["written"]], v[at["written"]])
        return (k, v) if self.slots is None else self.slots.extend(layer, k, v, at)


def merge_attention(
    own: tuple[Tensor, Tensor], shared: tuple[Tensor, Tensor], merge_index: Tensor
) -> Tensor:
    """Attention to the union of disjoint sets of keys, from that to each of them.

    own: attention (Tq, H, D) and log-sum-exp (H, Tq) of each query to its own row; shared: the same of S
    queries, (S, H, D) and (H, S); merge_index (Tq, P): which of the S belong to a query, S for none. Sums
    are in float32, in this order.
    """
    (found, weight), (parts, weights) = own, shared
    absent = merge_index == len(parts)
    index = merge_index.masked_fill(absent, 0)
    there = weights[:, index].masked_fill(absent, -torch.inf)  # (H, Tq, P)
    shares = torch.cat((weight[..., None], there), dim=-1).softmax(-1).movedim(0, 1)  # (Tq, H, 1 + P)
    total = found.float() * shares[..., :1]
    for rank in range(index.shape[1]):
        part = parts[index[:, rank]] * shares[..., rank + 1, None]
        total += part.masked_fill_(absent[:, rank, None, None], 0.0)  # another row's may be no number
    return total.to(found.dtype)
