"""Packed rows: what one call of the denoiser runs over, and what each row sees.

Rows follow one another without padding. All that a call needs to know about them (ids, positions, where
rows end, where keys go) is made on the host and goes to the device in one copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.model.device_io import to_device
from dlm_rag.model.kv_store import CachedRows, SharedContext, concatenate_ranges

CachedContext = SharedContext | CachedRows


@dataclass(frozen=True)
class Segment:
    """Token ids at consecutive positions from `start`.

    With a `block`, a token sees its own block and everything before it: the `first` tokens are one block,
    then every `block` of them. Without, each token sees all. The first `prompt_length` tokens are the
    prompt, for families with attention patterns.
    """

    ids: tuple[int, ...]
    start: int
    first: int = 0
    block: int | None = None
    prompt_length: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def block_ends(self) -> list[int]:
        """Where its blocks end, ascending."""
        length = len(self.ids)
        if self.block is None or self.first >= length:
            return [length]
        return [*range(self.first or self.block, length, self.block), length]

    @property
    def visible_counts(self) -> NDArray[np.int32]:
        """(n,) how many tokens of the segment each of them sees."""
        ends = np.array(self.block_ends, dtype=np.int32)
        return np.repeat(ends, np.diff(ends, prepend=0))

    @property
    def num_attention_pairs(self) -> int:
        """How many pairs of a token and one that it sees there are."""
        return int(self.visible_counts.sum())

    @property
    def has_partial_view(self) -> bool:
        """Whether some token does not see all."""
        return self.block is not None and len(self.ids) > (self.first or self.block)

    def block_start(self, token: int) -> int:
        """The last place up to `token` at which a block begins."""
        if self.block is None or token < self.first:
            return 0
        return self.first + (token - self.first) // self.block * self.block

    def slice_tokens(self, start: int, stop: int) -> "Segment":
        """Its tokens from `start` on and before `stop`, in the same blocks."""
        first = self.first
        if self.block is not None:
            first = first - start if start < first else self.block - (start - first) % self.block
        return Segment(self.ids[start:stop], self.start + start, first, self.block)

    def split_into_blocks(self) -> "list[Segment]":
        """Its blocks, each a segment whose tokens see all of it."""
        ends = self.block_ends
        return [Segment(self.ids[a:b], self.start + a) for a, b in pairwise([0, *ends])]


@dataclass(frozen=True)
class ContextParallel:
    """Which process of those that share rows; `group` is theirs, None where nothing is sent (a plan)."""

    rank: int
    size: int
    group: Any

    def local_token_range(self, length: int, rank: int | None = None) -> range:
        """The tokens of a row of that length which are this process's, or another's."""
        size = -(-length // self.size)
        at = (self.rank if rank is None else rank) * size
        return range(min(at, length), min(at + size, length))


@dataclass(frozen=True)
class ShardedRows:
    """The packed rows of one call, `lengths` tokens each; every process has a part of each.

    Attention that is not causal needs no ring and no balancing: queries stay, keys and values are gathered
    layer by layer, and their gradients are summed on the way back. Exact, up to the order of additions.
    """

    context_parallel: ContextParallel
    lengths: tuple[int, ...]

    @cached_property
    def gather_order(self) -> NDArray[np.int64]:
        """Where the tokens of all rows are in what is gathered, row by row."""
        share, ranks = self.context_parallel, range(self.context_parallel.size)
        # (ranks, rows): tokens of each row at each rank, and where they begin in what is gathered
        counts = np.array([[len(share.local_token_range(n, rank)) for n in self.lengths] for rank in ranks])
        starts = counts.cumsum(1) - counts + self._padded * np.array(ranks)[:, None]
        return concatenate_ranges(starts.T.flatten(), counts.T.flatten().tolist())

    @property
    def _padded(self) -> int:
        """Tokens that every process sends: as many as the first one has."""
        return sum(-(-length // self.context_parallel.size) for length in self.lengths)

    def gather(self, own: Tensor, order: Tensor) -> Tensor:
        """own (tokens here, ...) -> (tokens of all rows, ...), in order; gradients flow back to all.

        order: `gather_order` on the device.
        """
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        padding = own.new_zeros((self._padded - len(own), *own.shape[1:]))
        sent = torch.cat((own, padding))
        if self.context_parallel.group is None:
            gathered = sent.repeat(self.context_parallel.size, *[1] * (sent.dim() - 1))
        else:
            gathered = all_gather_tensor_autograd(sent, 0, self.context_parallel.group)
        return gathered[order]


@dataclass(frozen=True)
class RaggedLengths:
    """Where the rows of a packed tensor end.

    lengths: tokens of each row; cu_seqlens: (rows + 1,) int32 on the device, 0 and the end of each row.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor

    @property
    def max_length(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True)
class AttentionMetadata:
    """Who sees whom: row r of the queries sees row r of the keys.

    num_attention_pairs: pairs of a query and a key that it sees, attention patterns aside.
    partial_view_rows: rows with tokens that see only their first keys, `visible_counts` (Tq,) of them;
    causal: these rows have no context, and each token sees itself and what precedes it.
    cached_rows: the rows whose keys are in slots; block_table: (rows, pages) int32 where they are,
    key_counts: (rows,) int32 how many there are.
    positions, output_indices, prompt_lengths: as in `PackedRows` and `Segment`, for attention patterns.
    masks: those of this call, made once for all layers that share them.
    """

    queries: RaggedLengths
    keys: RaggedLengths
    num_attention_pairs: int
    partial_view_rows: tuple[bool, ...] = ()
    visible_counts: Tensor | None = None
    causal: bool = False
    cached_rows: CachedRows | None = None
    block_table: Tensor | None = None
    key_counts: Tensor | None = None
    positions: Tensor | None = None
    output_indices: Tensor | None = None
    prompt_lengths: Tensor | None = None
    masks: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def has_block_mask(self) -> bool:
        """Whether some token sees only a part of its row's keys, in a way that only a mask can say."""
        return any(self.partial_view_rows) and not self.causal


@dataclass(frozen=True)
class PackedRows:
    """The rows of one call; made by `pack_rows` or `pack_rectangle`.

    ids, positions: (T,). attention_metadata: of all tokens; last_layer_metadata: of those that go through
    the last layer, `output_indices` (n,) being their places, None where all do. cache_indices: where keys
    and values go in a `SlotKVCache`, those of the tokens `source_indices`, or of all in order; of
    `SharedContext` where they come from. extra_tensors: what else went to the device with them.
    """

    ids: Tensor
    positions: Tensor
    attention_metadata: AttentionMetadata
    last_layer_metadata: AttentionMetadata
    output_indices: Tensor | None = None
    context: CachedContext | None = None
    cache_indices: Tensor | None = None
    source_indices: Tensor | None = None
    sharded_rows: ShardedRows | None = None
    gather_order: Tensor | None = None
    extra_tensors: tuple[Tensor, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return self.attention_metadata.queries.lengths

    def gather_keys_values(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that the rows see in a layer, their own k and v (T, Hk, D) included."""
        if self.sharded_rows is not None:
            assert self.gather_order is not None
            k, v = self.sharded_rows.gather(torch.stack((k, v), dim=1), self.gather_order).unbind(1)
        if self.context is None:
            return k, v
        assert self.cache_indices is not None
        return self.context.extend(layer, k, v, self.cache_indices, self.source_indices)


def pack_rows(
    runs: Sequence[Segment],
    device: torch.device,
    read: Sequence[Sequence[int]] | None = None,
    context: CachedContext | None = None,
    stretches: ShardedRows | None = None,
    add: Sequence[NDArray[Any]] = (),
) -> PackedRows:
    """Rows of tokens, each of which sees its `context` and, by the blocks of its segment, itself.

    read: per row the tokens (from 0, ascending) whose hidden states are asked for; the others skip the last
    layer. stretches: the whole rows, where `runs` are only a part of each. add: arrays that go to the
    device with them.
    """
    lengths = tuple(len(run.ids) for run in runs)
    seen = (0,) * len(runs) if context is None else context.context_lengths
    own = lengths if stretches is None else stretches.lengths
    keys = tuple(a + b for a, b in zip(seen, own, strict=True))
    sent = _build_arrays(runs, seen, keys, read)
    if context is not None:
        sent |= context.build_arrays(lengths, keys)
    if stretches is not None:
        sent["order"] = stretches.gather_order
    there = to_device([*sent.values(), *add], device)
    at = dict(zip(sent, there, strict=False))
    bounded = tuple(run.has_partial_view for run in runs)
    causal = any(bounded) and context is None and all(run.block == 1 for run in runs)
    sight = AttentionMetadata(
        RaggedLengths(lengths, at["queries"]), RaggedLengths(keys, at["keys"]),
        _count_pairs(lengths, keys, sent.get("limits")), bounded, at.get("limits"), causal,
        context if isinstance(context, CachedRows) else None,
        at.get("table"), at.get("counts"), at["positions"], None, at["prompts"],
    )  # fmt: skip
    last = sight
    if read is not None and not causal:  # the kernels' own causal rule is for whole rows
        reads = tuple(map(len, read))
        pairs = _count_pairs(reads, keys, sent.get("last_limits"))
        last = replace(
            sight, queries=RaggedLengths(reads, at["reads"]), num_attention_pairs=pairs,
            visible_counts=at.get("last_limits"), output_indices=at["read"],
        )  # fmt: skip
    return PackedRows(
        at["ids"], at["positions"], sight, last, at.get("read"), context, at.get("places"),
        at.get("sources"), stretches, at.get("order"), tuple(there[len(sent) :]),
    )  # fmt: skip


def _build_arrays(
    runs: Sequence[Segment], seen: Sequence[int], keys: Sequence[int], read: Sequence[Sequence[int]] | None
) -> dict[str, NDArray[Any]]:
    """What the device needs to know of the rows, whatever they see before their own tokens."""
    lengths = [len(run.ids) for run in runs]
    sent: dict[str, NDArray[Any]] = {
        "ids": np.fromiter(chain.from_iterable(run.ids for run in runs), np.int64, sum(lengths)),
        "positions": concatenate_ranges(np.array([run.start for run in runs], dtype=np.int64), lengths),
        "queries": _ends(lengths),
        "keys": _ends(keys),
        "prompts": np.array([run.prompt_length for run in runs], dtype=np.int32),
    }
    if read is not None:
        reads = [len(tokens) for tokens in read]
        places = np.fromiter(chain.from_iterable(read), np.int64, sum(reads))
        sent["read"] = places + np.repeat(_ends(lengths)[:-1].astype(np.int64), reads)
        sent["reads"] = _ends(reads)
    if any(run.has_partial_view for run in runs):
        sent["limits"] = np.concatenate([n + run.visible_counts for n, run in zip(seen, runs, strict=True)])
        if read is not None:
            sent["last_limits"] = sent["limits"][sent["read"]]
    return sent


def _count_pairs(queries: Sequence[int], keys: Sequence[int], limits: NDArray[Any] | None) -> int:
    """How many pairs of a query and a key that it sees there are in some rows."""
    return sum(n * k for n, k in zip(queries, keys, strict=True)) if limits is None else int(limits.sum())


def pack_rectangle(ids: Tensor, block: int | None = None) -> PackedRows:
    """Rows (B, L) of ids on the device, from position 0 on; each sees itself, by blocks."""
    rows, length = ids.shape
    lengths = (length,) * rows
    row = Segment((0,) * length, 0, block=block)
    limits = np.tile(row.visible_counts, rows)
    prompts = np.zeros(rows, dtype=np.int32)
    ends, there, no_prompts = to_device([_ends(lengths), limits, prompts], ids.device)
    whole, bounded = RaggedLengths(lengths, ends), (row.has_partial_view,) * rows
    positions = torch.arange(length, device=ids.device).repeat(rows)
    sight = AttentionMetadata(
        whole, whole, int(limits.sum()), bounded, there if row.has_partial_view else None,
        row.has_partial_view and block == 1, positions=positions, prompt_lengths=no_prompts,
    )  # fmt: skip
    return PackedRows(ids.flatten(), positions, sight, sight)


def _ends(lengths: Sequence[int]) -> NDArray[np.int32]:
    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    return ends
