"""Rows as the model is shown them, and packed: what one call runs over, and what each row sees.

Rows follow one another without padding. All that a call needs to know about them (ids, positions, where
rows end, where keys go) is made on the host and goes to the device in one copy.

What rows see before their own tokens: in training parts of an earlier call that gradients flow through
(`SharedContext`); in decoding places of a memory that stays from step to step (`MemoryRows`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT_BYTES = 16  # bytes; what is read as wide numbers must begin at a multiple of them
Places = NDArray[np.int64]  # of tokens in a memory
KeysValues = Sequence[tuple[Tensor, Tensor]]  # for each layer, each (n, Hk, D)
UNBOUNDED_POSITION = 2**62  # after all finished blocks, however many there are


@dataclass
class Segment:
    """Token ids at consecutive positions from `start`.

    With a `block`, a token sees its own block and everything before it: the `first` tokens are one block,
    then every `block` of them. Without, each token sees all. The first `causal` tokens are a block each.
    """

    ids: tuple[int, ...]
    start: int
    first: int = 0
    block: int | None = None
    causal: int = 0

    @cached_property
    def _hash(self) -> int:
        return hash((self.ids, self.start, self.first, self.block or 0))

    def __hash__(self) -> int:
        return self._hash  # a step looks at each segment of each row dozens of times

    @cached_property
    def block_ends(self) -> list[int]:
        length, ends = len(self.ids), range(0)
        if self.block is not None and self.first < length:
            ends = range(self.first or self.block, length, self.block)
        return [*range(1, min(self.causal, length - 1) + 1), *(e for e in ends if e > self.causal), length]

    @property
    def visible_counts(self) -> NDArray[np.int32]:
        """(n,) how many tokens of the segment each of them sees."""
        ends = np.array(self.block_ends, dtype=np.int32)
        return np.repeat(ends, np.diff(ends, prepend=0))

    def block_start(self, token: int) -> int:
        """The last place up to `token` at which a block begins."""
        if token < self.causal:
            return token
        if self.block is None or token < self.first:
            return self.causal
        return self.first + (token - self.first) // self.block * self.block

    def slice_tokens(self, start: int, stop: int) -> "Segment":
        """Its tokens from `start` on and before `stop`, in the same blocks."""
        first = self.first
        if self.block is not None:
            first = first - start if start < first else self.block - (start - first) % self.block
        causal = max(0, min(self.causal, stop) - start)
        return Segment(self.ids[start:stop], self.start + start, first, self.block, causal=causal)

    def split_into_blocks(self) -> "list[Segment]":
        """Its blocks, each a segment whose tokens see all of it; what is causal stays one."""
        if self.block is None and not self.causal:
            return [self]
        head = [self.slice_tokens(0, self.causal)] * (self.causal > 0)
        ends = [self.causal, *(end for end in self.block_ends if end > self.causal)]
        return [*head, *(Segment(self.ids[a:b], self.start + a) for a, b in pairwise(ends))]


@dataclass
class LaidOutPrompt:
    """A prompt laid out."""

    context_segments: tuple[Segment, ...]  # that see themselves alone
    canvas_prefix: Segment  # the lead, which runs before the canvas, in one chain with it
    first_block_length: int = 0  # tokens of the chain's first block
    block_size: int | None = None  # and of each after it; None: one block
    unseen_segments: int = 0  # as many of the last segments stand after the finished blocks
    predicts_next_block: bool = False  # whether the last token of a block predicts the first of the next
    complete_last_block: bool = False  # whether the last block must be whole
    causal_context: bool = False  # whether all before the current block is causal
    shifted: bool = False  # as in `DenoiserConfig`

    @cached_property
    def counts_seen_by_blocks(self) -> dict[Segment, int]:
        """The segments that finished blocks see, in any order, with how often each stands there."""
        return dict(Counter(self.context_segments[: len(self.context_segments) - self.unseen_segments]))

    def build_canvas_segment(self, canvas: Sequence[int], finished: int) -> Segment:
        """Lead and canvas, whose first `finished` positions are whole finished blocks."""
        lead, at = self.canvas_prefix, len(self.canvas_prefix.ids)
        ids, causal = (*lead.ids, *canvas), (at + finished) * self.causal_context
        return Segment(ids, lead.start, self.first_block_length, self.block_size, causal)

    def block_bounds(self, position: int) -> tuple[int, int]:
        """Start and end on the canvas of a position's block; the former is below 0 if in the prompt."""
        lead = len(self.canvas_prefix.ids)
        if self.block_size is None:
            return 0, UNBOUNDED_POSITION
        after = lead + position - self.first_block_length
        if after < 0:
            return -lead, self.first_block_length - lead
        begin = position - after % self.block_size
        return begin, begin + self.block_size

    def round_up_canvas(self, least: int) -> int:
        """Of a canvas of at least so many positions, with its last block as it must be."""
        return self.block_bounds(least - 1)[1] if self.complete_last_block else least

    def build_row(self, canvas: Sequence[int], finished: int, shifted: bool) -> "LaidOutRow":
        """The canvas at a moment when its first `finished` positions are whole finished blocks."""
        chain, at = self.build_canvas_segment(canvas, finished), len(self.canvas_prefix.ids)
        if not finished or not self.unseen_segments:
            before = finished if self.predicts_next_block and not shifted else None
            return LaidOutRow(self.context_segments, chain, at - shifted, before)
        assert self.block_size is not None and not shifted, "this is for blocks that predict themselves"
        question, *passages = self.context_segments
        stands, block = at + finished, self.block_size
        ids = (*question.ids, *chain.ids[:stands])
        text = Segment(ids, question.start, len(question.ids), block, causal=len(ids) * self.causal_context)
        window = Segment(chain.ids[stands:], chain.start + stands, block, block)
        return LaidOutRow((text, *passages), window, -finished)


@dataclass
class RowInput:
    """What a model is shown of a row that is to take a step, and asked about it."""

    row: int  # its ticket: what is kept for it is kept under this number
    laid_out_prompt: LaidOutPrompt
    canvas: NDArray[np.int64]  # (length,) the ids that stand there now, as far as the model is to look
    # Those to propose for, ascending; (length,) alone: the masked one behind.
    # Below 0, from the last on, those of the lead.
    positions: NDArray[np.int64]
    temperature: float = 0.0
    # At which tokens are drawn: (n,) with a temperature; (2, n) of a policy, the second where it is forced.
    quantiles: NDArray[np.float64] | None = None
    soft_threshold: tuple[float, float, float] | None = None  # of a policy: temperature, threshold, width
    needs_entropy: bool = False  # whether entropy and margin are wanted
    finished_length: int = 0  # positions in front that are whole blocks and change no more
    barred: NDArray[np.bool_] | None = None  # (V,) tokens that may not stand at the first position
    chain: Segment = field(init=False)  # lead and canvas
    states: NDArray[np.int64] = field(init=False)  # (n,) places in it of what predicts the positions

    def __post_init__(self) -> None:
        laid, at = self.laid_out_prompt, self.positions
        self.chain = laid.build_canvas_segment(self.canvas.tolist(), self.finished_length)
        before = laid.shifted or (len(at) > 0 and at[-1] >= len(self.canvas))
        self.states = at + (len(laid.canvas_prefix.ids) - bool(before))

    @property
    def finished_tokens(self) -> int:
        """Tokens of the chain in whole blocks that change no more."""
        return self.chain.block_start(len(self.laid_out_prompt.canvas_prefix.ids) + self.finished_length)

    @property
    def training_row(self) -> "LaidOutRow":
        """The same up to the end of the current block, as one run after what sees itself alone."""
        laid, finished = self.laid_out_prompt, self.finished_length
        canvas = self.canvas[: laid.block_bounds(finished)[1]].tolist()
        return laid.build_row(canvas, finished, laid.shifted)


@dataclass(frozen=True)
class LaidOutRow:
    """One moment of a row, as it is trained on: what sees itself alone, and the run that sees all of it."""

    context_segments: tuple[Segment, ...]
    canvas_segment: Segment
    # Where in the run the state stands that predicts the first canvas position; below 0 where finished
    # blocks are part of the context.
    canvas_start: int
    from_before: int | None = None  # the one position that the state before it predicts, not its own

    def find_state(self, position: int) -> int:
        """Where in the run the state stands that predicts a canvas position."""
        return self.canvas_start + position - (position == self.from_before)


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
    """`torch.cat((kept, own))[places]`; gradients are no views, which would keep those of `own` alive."""

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


@dataclass(frozen=True)
class MemoryRows:
    """The rows of a call in a memory of keys and values: places of what each sees, and of its own tokens.

    In each layer all rows write before any attends, so a row may see what another one computes. memory: a
    `KVMemory` of the engine. by_row: whether attention reads the places itself, row by row.
    """

    memory: Any
    seen: Sequence[Places]
    own: Sequence[Places]
    by_row: bool = False

    @property
    def context_lengths(self) -> list[int]:
        """Tokens that each row sees before its own."""
        return [*map(len, self.seen)]

    def build_arrays(self, lengths: Sequence[int], keys: Sequence[int]) -> dict[str, NDArray[Any]]:
        """places: (T,) where the packed tokens go. seen: (K,) the places of the `keys` of each row, its own
        last; own: where these are among the K, if the memory does not keep them as they are."""
        places = np.concatenate([*chain.from_iterable(zip(self.seen, self.own, strict=True))])
        found: dict[str, NDArray[Any]] = {"places": np.concatenate(self.own), "seen": places}
        if self.memory.is_compressed:
            own = np.cumsum(keys, dtype=np.int64) - np.array(lengths, dtype=np.int64)
            found["own"] = concatenate_ranges(own, lengths)
        return found

    def extend(self, layer: int, k: Tensor, v: Tensor, at: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Writes the rows' own k and v (T, Hk, D); returns what rows see, or all that the memory holds."""
        self.memory.write_layer(layer, at["places"], k, v, at["positions"])
        if self.by_row:
            keys, values = self.memory.layer(layer).unbind()
            return keys, values
        keys, values = self.memory.read_layer(layer, at["seen"]).unbind()
        if "own" in at:
            keys.index_copy_(0, at["own"], k)
            values.index_copy_(0, at["own"], v)
        return keys, values


CachedContext = SharedContext | MemoryRows


@dataclass(frozen=True)
class AttentionMetadata:
    """Who sees whom: row r of the queries sees row r of the keys.

    query_lengths, key_lengths: tokens of each row; query_ends, key_ends: (rows + 1,) int32 on the device,
    0 and the end of each row. num_attention_pairs: of a query and a key that it sees.
    partial_view_rows: rows with tokens that see only their first keys, `visible_counts` (Tq,) of them;
    causal: these rows have no context, and each token sees itself and what precedes it.
    key_places: (sum of key_lengths,) where each row's keys are in a memory, if they are not gathered.
    masks: those of this call, made once for all layers that share them.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    query_ends: Tensor
    key_ends: Tensor
    num_attention_pairs: int
    partial_view_rows: tuple[bool, ...] = ()
    visible_counts: Tensor | None = None
    causal: bool = False
    key_places: Tensor | None = None
    masks: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)


@dataclass(frozen=True)
class PackedRows:
    """The rows of one call, made by `pack_rows`.

    ids, positions: (T,). attention_metadata: of all tokens; last_layer_metadata: of those that go through
    the last layer, `output_indices` (n,) being their places, None where all do. context_tensors: the arrays
    of the context, by name. extra_tensors: what else went to the device with them.
    """

    ids: Tensor
    positions: Tensor
    attention_metadata: AttentionMetadata
    last_layer_metadata: AttentionMetadata
    output_indices: Tensor | None = None
    context: CachedContext | None = None
    context_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    extra_tensors: tuple[Tensor, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.attention_metadata.query_lengths

    @cached_property
    def attention_blocks(self) -> Tensor:
        """(T,) the number, from 0, of each token's block of attention; without blocks, of its row."""
        begins, seen = torch.zeros_like(self.ids), self.attention_metadata.visible_counts
        begins[self.attention_metadata.query_ends[:-1].long()] = 1
        if seen is not None:
            begins[1:] |= seen[1:] != seen[:-1]
        return begins.cumsum(0) - 1

    def gather_keys_values(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that the rows see in a layer, their own k and v (T, Hk, D) included."""
        if self.context is None:
            return k, v
        return self.context.extend(layer, k, v, self.context_tensors)


def pack_rows(
    runs: Sequence[Segment], device: torch.device, read: Sequence[Sequence[int]] | None = None,
    context: CachedContext | None = None, add: Sequence[NDArray[Any]] = (),
    send: Callable[[dict[str, NDArray[Any]], Sequence[NDArray[Any]]], list[Tensor]] | None = None,
) -> PackedRows:  # fmt: skip
    """Rows of tokens, each of which sees its `context` and, by the blocks of its segment, itself.

    read: per row the tokens (from 0, ascending) whose hidden states are asked for; the others skip the last
    layer. add: arrays that go to the device with them. send: what takes them there in place of
    `to_device`, and may make those of the rows longer.
    """
    lengths = tuple(len(run.ids) for run in runs)
    seen = (0,) * len(runs) if context is None else context.context_lengths
    keys = tuple(a + b for a, b in zip(seen, lengths, strict=True))
    # Whether some token does not see all.
    partial = tuple((run.block is not None or run.causal > 0) and len(run.block_ends) > 1 for run in runs)
    starts = np.array([run.start for run in runs], dtype=np.int64)
    sent: dict[str, NDArray[Any]] = {
        "ids": np.fromiter(chain.from_iterable(run.ids for run in runs), np.int64, sum(lengths)),
        "positions": concatenate_ranges(starts, lengths),
    }
    if any(partial):
        limits = [n + run.visible_counts for n, run in zip(seen, runs, strict=True)]
        sent["limits"] = np.concatenate(limits)
    sent |= {"queries": _ends(lengths), "keys": _ends(keys)}
    reads = () if read is None else tuple(map(len, read))
    if read is not None:
        places = np.fromiter(chain.from_iterable(read), np.int64, sum(reads))
        sent["read"] = places + np.repeat(sent["queries"][:-1].astype(np.int64), reads)
        sent["reads"] = _ends(reads)
        if any(partial):
            sent["last_limits"] = sent["limits"][sent["read"]]
    kept = {} if context is None else context.build_arrays(lengths, keys)
    sent |= kept
    there = to_device([*sent.values(), *add], device) if send is None else send(sent, add)
    at = dict(zip(sent, there, strict=False))
    causal = any(partial) and context is None and all(run.block == 1 for run in runs)
    in_memory = at["seen"] if isinstance(context, MemoryRows) and context.by_row else None
    sight = AttentionMetadata(
        lengths, keys, at["queries"], at["keys"], _count_pairs(lengths, keys, sent.get("limits")), partial,
        at.get("limits"), causal, in_memory,
    )  # fmt: skip
    last = sight
    if read is not None and not causal:  # the kernels' own causal rule is for whole rows
        last = replace(
            sight, query_lengths=reads, query_ends=at["reads"], visible_counts=at.get("last_limits"),
            num_attention_pairs=_count_pairs(reads, keys, sent.get("last_limits")),
        )  # fmt: skip
    return PackedRows(
        at["ids"], at["positions"], sight, last, at.get("read"), context,
        {name: at[name] for name in (*kept, "positions")}, tuple(there[len(sent) :]),
    )  # fmt: skip


def _count_pairs(queries: Sequence[int], keys: Sequence[int], limits: NDArray[Any] | None) -> int:
    return sum(n * k for n, k in zip(queries, keys, strict=True)) if limits is None else int(limits.sum())


def _ends(lengths: Sequence[int]) -> NDArray[np.int32]:
    return np.fromiter(accumulate(lengths, initial=0), np.int32, len(lengths) + 1)


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, views of one buffer that travels in one copy; nothing waits."""
    arrays = [np.asarray(array, order="C") for array in arrays]
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu" or not tensors:
        return tensors  # which share the memory of the arrays
    sizes = [-(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for array in arrays]
    starts = list(accumulate(sizes, initial=0))
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    room = packed.numpy()
    for start, array in zip(starts, arrays, strict=False):
        room[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    # Pinned memory is kept until it has been read; on MPS nothing does that (pytorch #189690).
    there = packed.to(device, non_blocking=device.type != "mps")
    typed = {dtype: there.view(dtype) for dtype in {tensor.dtype for tensor in tensors}}
    found = []
    for start, tensor in zip(starts, tensors, strict=False):
        first = start // tensor.itemsize
        part = typed[tensor.dtype][first : first + tensor.numel()]
        found.append(part if tensor.dim() == 1 else part.view(tensor.shape))
    return found


def start_gather(tensors: Sequence[Tensor]) -> Callable[[], list[NDArray[Any]]]:
    """Starts one copy of tensors (n,) of a device to the host; what is returned waits for the contents."""
    if not tensors[0].is_cuda:
        arrays = [to_host(tensor) for tensor in tensors]
        return lambda: arrays
    wait = start_copy(torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors]))
    ends = list(accumulate(tensor.nbytes for tensor in tensors))
    dtypes = [torch.empty(0, dtype=tensor.dtype).numpy().dtype for tensor in tensors]

    def split() -> list[NDArray[Any]]:
        parts = np.split(wait(), ends[:-1])
        return [part.view(dtype) for part, dtype in zip(parts, dtypes, strict=True)]

    return split


def to_host(tensor: Tensor) -> NDArray[Any]:
    """The contents of a tensor."""
    return start_copy(tensor)()


def start_copy(tensor: Tensor) -> Callable[[], NDArray[Any]]:
    """Starts to copy a tensor to the host; what is returned waits for its contents, and for no work that is
    launched later. The one place that waits for the device."""
    tensor = tensor.detach()
    if not tensor.is_cuda:
        found = tensor.cpu()
        return found.numpy
    found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    found.copy_(tensor, non_blocking=True)
    # An event, so that `torch.cuda.set_sync_debug_mode` finds the waits that nobody meant.
    copied = torch.cuda.current_stream(tensor.device).record_event()

    def wait() -> NDArray[Any]:
        copied.synchronize()
        return found.numpy()

    return wait


def concatenate_ranges(starts: NDArray[np.int64], lengths: Sequence[int]) -> NDArray[np.int64]:
    """(sum of lengths,) for each row the numbers from its start on, as many as its length."""
    before = np.cumsum(lengths) - lengths
    return np.arange(sum(lengths)) + np.repeat(starts - before, lengths)


def make_consecutive_ranges(lengths: Sequence[int]) -> list[range]:
    """The places of consecutive pieces of `lengths`, from 0 on."""
    return [range(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
