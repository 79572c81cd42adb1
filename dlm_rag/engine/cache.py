"""The cache of keys and values: what rows see, each segment computed once, in one memory.

A segment that sees itself alone (a passage, a question) is kept under its tokens for whichever row asks
next, the least recently used leaving first. With a store, all that was computed goes to its files, too.
Finished blocks of the chain of lead and canvas, which see what stands before them, are kept for their row
alone, until something before them changes. What nothing holds runs in the same call as the windows that
see it.

The memory is one block, in which a token of any segment has a place in every layer. Which tokens a row sees
is a list of places, so nothing has to lie together, and nothing is moved. Keys and values are kept in the
model's dtype, or as int8 with a float16 scale for each token and head behind its numbers. Keys of
projections with a bias have channels that are large for every token (Qwen2, so Dream and Fast-dLLM v2;
KVQuant, Hooper et al. 2024): the bias, turned to the token's position, is taken off before and added after.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.engine.store import EvidenceStore
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.layers import Attention, apply_rope
from dlm_rag.model.packed_batch import MemoryRows, Places, RowInput, Segment, pack_rows, to_device

PREFILL_TOKENS = 8192  # of new segments that run in one call of their own, and those of one segment more
MAX_JOINT_TOKENS = 65536  # of new segments that run in the same call as the rows
SCALE_BYTES = 2  # float16
NOWHERE = np.empty(0, np.int64)  # places of no token
SMALLEST_SCALE = 2.0**-24  # of a float16 above 0


class ForwardSpan(NamedTuple):
    """A stretch of a row's chain that is to run."""

    row: int | None  # which of those shown; None: a segment by itself, of whose states none is read
    begin: int  # which token of the chain is its first
    segment: Segment

    def locate(self, places: NDArray[np.int64]) -> list[int]:
        """Which of these places in the chain, ascending, are in it, counted from its first token."""
        at, end = (places - self.begin).tolist(), len(self.segment.ids)
        return at if at and at[0] >= 0 and at[-1] < end else [n for n in at if 0 <= n < end]


@dataclass
class CacheStats:
    """Counts over a run: of context tokens, and of segments by where they came from."""

    requested_tokens: int = 0  # tokens that rows saw, summed over steps
    encoded_tokens: int = 0  # tokens that the denoiser had to run for
    evicted_segments: int = 0  # segments that had to make room
    device_segments: int = 0  # that were asked for and lay on the device
    store_segments: int = 0  # that were read from the store
    store_bytes: int = 0
    store_seconds: float = 0.0  # seconds that the engine waited for them
    encoded_segments: int = 0  # that the denoiser had to run for

    @property
    def reused_share(self) -> float:
        """The share of the wanted tokens that needed no run of their own."""
        return 1 - self.encoded_tokens / self.requested_tokens if self.requested_tokens else 0.0


@dataclass(frozen=True)
class _Chain:
    """The finished blocks of a row."""

    context: dict[Segment, int]  # what they saw before them, in any order
    first: int  # tokens of the first block
    ids: tuple[int, ...]
    places: Places


class KVCache:
    """The keys and values that rows see, in a memory for as many tokens as are to be kept.

    A call may take more; after it, what was used longest ago leaves until the rest fits. Without room
    nothing is kept, and every step computes everything, as a plain implementation does.
    """

    def __init__(self, memory: "KVMemory", store: EvidenceStore | None = None) -> None:
        self.cache_stats, self.store, self._denoiser = CacheStats(), store, memory.denoiser
        self.kept: OrderedDict[Segment, Places] = OrderedDict()  # the least recently used first
        self.memory, self.budget_tokens = memory, memory.capacity
        self.budget_bytes = memory.capacity * memory.token_bytes
        self._chains: dict[int, _Chain] = {}  # by row
        # Of the call under way: segments that it sees, those it computes, chains after it, other places.
        self._seen: dict[Segment, Places] = {}
        self._new: dict[Segment, Places] = {}
        self._next: dict[int, _Chain] = {}
        self._loose: list[Places] = []

    @property
    def used_bytes(self) -> int:
        """The bytes on the device that hold something."""
        return self.memory.taken * self.memory.token_bytes

    def release(self, row: int) -> None:
        """A row has gone, and its finished blocks with it."""
        if (chain := self._chains.pop(row, None)) is not None:
            self.memory.give_back(chain.places)

    def prepare_rows(self, rows: Sequence[RowInput]) -> tuple[list[ForwardSpan], MemoryRows | None]:
        """Finds out what of these rows has to run: first segments that nothing holds, then row by row.

        Returns these runs, and what they see; None where no row sees or keeps anything. After the call,
        `store_computed` keeps what it computed. Rows that share a segment share its computation.
        """
        self._give_up()
        prompts = [row.laid_out_prompt for row in rows]
        if all(laid.block_size is None and not laid.context_segments for laid in prompts):
            return [ForwardSpan(n, 0, row.chain) for n, row in enumerate(rows)], None
        wanted = [segment for laid in prompts for segment in laid.context_segments]
        self.cache_stats.requested_tokens += sum(len(segment.ids) for segment in wanted)
        self._locate(dict.fromkeys(wanted))
        new = [*self._new]
        # Apart they would cost one row 6 % more on a CPU, and a GPU one more pass over the weights.
        if sum(len(segment.ids) for segment in new) > MAX_JOINT_TOKENS:
            self._run_new()
            new = []
        found = [(ForwardSpan(None, 0, segment), NOWHERE, self._new[segment]) for segment in new]
        # Attention reads the memory where it is, with masks: `indexed`, and SDPA on a CPU.
        kernel, device = self._denoiser.backend, self._denoiser.device.type
        in_place = kernel == "indexed" or (kernel == "sdpa" and device == "cpu")
        in_place = in_place and not self.memory.is_compressed
        for number, row in enumerate(rows):
            found += self._spans(number, row, in_place)
        runs, seen, own = (list(each) for each in zip(*found, strict=True))
        return runs, MemoryRows(self.memory, seen, own, in_place)

    def store_computed(self) -> None:
        """Keeps what the call has computed."""
        if not self.budget_tokens:
            self._give_up()
            return
        if self.store is not None:
            for segment, places in self._new.items():
                self.store.add(segment, *self._copy_to_host(places))
        self.kept |= self._new
        self._chains |= self._next
        self._new, self._next = {}, {}
        self._give_up()
        while self.memory.taken > self.budget_tokens and self.kept:
            self._evict()

    def _give_up(self) -> None:
        """Frees what the call under way has taken and nobody keeps."""
        chains = (chain.places for chain in self._next.values())
        self.memory.give_back(np.concatenate([NOWHERE, *self._new.values(), *chains, *self._loose]))
        self._seen, self._new, self._next, self._loose = {}, {}, {}, []

    def _locate(self, wanted: dict[Segment, None]) -> None:
        """Gives each segment its places; `_new` are those that have to run."""
        stats = self.cache_stats
        self._seen = {segment: held for segment in wanted if (held := self.kept.get(segment)) is not None}
        for segment in self._seen:
            self.kept.move_to_end(segment)
        stats.device_segments += len(self._seen)
        for segment in [segment for segment in wanted if segment not in self._seen]:
            self._new[segment] = self._take(len(segment.ids))
        self._seen |= self._new
        for segment, kept in self._find_stored([*self._new]).items():
            self.memory.write(self._new[segment], kept, segment.start)
            self.kept[segment] = self._new.pop(segment)
        stats.encoded_tokens += sum(len(segment.ids) for segment in self._new)
        stats.encoded_segments += len(self._new)

    def _find_stored(self, segments: list[Segment]) -> dict[Segment, Tensor]:
        """What the store has of these segments, in host memory."""
        if self.store is None or not segments:
            return {}
        stats, begin = self.cache_stats, time.perf_counter()
        pairs = zip(segments, self.store.get_all(segments), strict=True)
        stored = {segment: kept for segment, kept in pairs if kept is not None}
        stats.store_seconds += time.perf_counter() - begin
        stats.store_segments += len(stored)
        stats.store_bytes += sum(kept.nbytes for kept in stored.values())
        return stored

    def _take(self, tokens: int) -> Places:
        """Places for so many tokens; what was used longest ago makes room, but nothing that is seen now."""
        while self.memory.free < tokens and self.kept and next(iter(self.kept)) not in self._seen:
            self._evict()
        return self.memory.take(tokens)

    def _evict(self) -> None:
        """Gives up the segment that was used longest ago."""
        self.memory.give_back(self.kept.popitem(last=False)[1])
        self.cache_stats.evicted_segments += 1

    def _copy_to_host(self, places: Places) -> tuple[Tensor, Any]:
        """A copy in host memory, which the denoiser does not wait for, and the event after which it is."""
        kept = self.memory.read(places)
        if not kept.is_cuda:
            return kept.cpu(), None
        aside = torch.empty_like(kept, device="cpu", pin_memory=True)
        aside.copy_(kept, non_blocking=True)
        return aside, torch.cuda.current_stream(kept.device).record_event()

    def _run_new(self) -> None:
        """Runs the new segments in calls of their own, some at a time."""
        ends = accumulate(len(segment.ids) for segment in self._new)
        for _, pairs in groupby(zip(self._new, ends, strict=True), lambda pair: pair[1] // PREFILL_TOKENS):
            part = [segment for segment, _ in pairs]
            own = [self._new[segment] for segment in part]
            context = MemoryRows(self.memory, [NOWHERE] * len(part), own)
            read = [[0], *[()] * (len(part) - 1)]  # the last layer writes only if some state is read
            self._denoiser.encode(pack_rows(part, self._denoiser.device, read, context))

    def _spans(
        self, number: int, row: RowInput, in_place: bool
    ) -> Iterator[tuple[ForwardSpan, Places, Places]]:
        """What of a row has to run, the places of what it sees before itself, and its own."""
        laid, chain = row.laid_out_prompt, row.chain
        places, valid = self._extend_chain(row)
        context = [self._seen[segment] for segment in laid.context_segments]
        done = row.finished_tokens if laid.unseen_segments else valid  # else the window follows at once
        front = len(context) - laid.unseen_segments
        for start, stop, seen in ((valid, done, context[:front]), (done, len(chain.ids), context)):
            if start < stop:
                run = chain.slice_tokens(start, stop) if start or stop < len(chain.ids) else chain
                # Without masks each block is a run, which the next one sees as it is kept (int8).
                for piece in [run] if in_place else run.split_into_blocks():
                    begin = piece.start - chain.start
                    own = places[begin : begin + len(piece.ids)]
                    yield ForwardSpan(number, begin, piece), np.concatenate([*seen, places[:begin]]), own

    def _extend_chain(self, row: RowInput) -> tuple[Places, int]:
        """Places for all tokens of a chain, and how many in front need not run."""
        chain, done, held = row.chain, row.finished_tokens, self._chains.get(row.row)
        if not done and held is None:
            self._loose.append(places := self._take(len(chain.ids)))
            return places, 0
        context, valid = row.laid_out_prompt.counts_seen_by_blocks, 0
        if held is not None and held.context == context and held.first == chain.first:
            pairs = zip(held.ids, chain.ids[:done], strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            valid = chain.block_start(min([same, *row.states[:1].tolist()]))  # before what is read
        places = self._take(len(chain.ids) - valid)
        if held is not None:
            del self._chains[row.row]
            self.memory.give_back(held.places[valid:])
            places = np.concatenate([held.places[:valid], places])
        self._next[row.row] = _Chain(context, chain.first, chain.ids[:done], places[:done])
        self._loose.append(places[done:])
        return places, valid


class KVMemory:
    """Places for tokens, in one tensor for each run of layers on one device; taken at its first use.

    cache_dtype: as `engine.cache_dtype`. budget_bytes: what it has room for; it grows when more is taken.
    """

    def __init__(self, denoiser: Denoiser, cache_dtype: str = "auto", budget_bytes: int = 0) -> None:
        shape = denoiser.config
        self.denoiser, self.dtype = denoiser, denoiser.compute_dtype
        self.devices = denoiser.layer_devices
        self.is_compressed = cache_dtype == "int8"
        self.has_key_bias = self.is_compressed and shape.qkv_bias and not shape.qk_norm  # which scales it
        # Room for what is kept of a token in all layers, (N, 2, 1, Hk, D or a little more).
        heads = shape.num_key_value_heads, shape.head_dim + SCALE_BYTES * self.is_compressed
        kept_dtype = torch.int8 if self.is_compressed else self.dtype
        self.token = torch.empty((len(self.devices), 2, 1, *heads), dtype=kept_dtype, device="meta")
        self.token_bytes = self.token.nbytes
        self._runs = [(device, len([*same])) for device, same in groupby(self.devices)]
        self._part_of = [(part, n) for part, (_, layers) in enumerate(self._runs) for n in range(layers)]
        self._parts: list[Tensor] = []  # each (layers, 2, capacity + 1, Hk, D or a little more)
        self._positions: list[Tensor] = []  # of the tokens, (capacity,), where keys are kept without bias
        self.capacity = self.free = budget_bytes // self.token_bytes  # tokens in all, and without growing
        # Places: of these so many as are free, the last are taken first.
        self._free = np.arange(self.capacity)[::-1].copy()

    @property
    def taken(self) -> int:
        return self.capacity - self.free

    def take(self, tokens: int) -> Places:
        """Places for so many tokens; the memory grows where there are too few."""
        if tokens > self.free:
            self._grow((self.taken + tokens) * 9 // 8)
        self.free -= tokens
        return self._free[self.free : self.free + tokens][::-1].copy()

    def give_back(self, places: Places) -> None:
        self._free[self.free : self.free + len(places)] = places[::-1]
        self.free += len(places)

    def layer(self, number: int) -> Tensor:
        """What is kept in a layer, (2, capacity + 1, Hk, D or a little more), on its device."""
        part, number = self._part_of[number]
        return self._allocated()[part][number]

    def write_layer(self, layer: int, places: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Writes keys and values, each (n, Hk, D), of tokens at `positions` (n,) to their places (n,)."""
        held = self.layer(layer)
        if not self.is_compressed:
            held[0].index_copy_(0, places, k)
            held[1].index_copy_(0, places, v)
            return
        if self.has_key_bias:
            self._positions[self._part_of[layer][0]][places] = positions.int()
            k = k - self._key_bias(layer, positions)
        held.index_copy_(1, places, quantize_int8(torch.stack((k, v))))

    def read_layer(self, layer: int, places: Tensor) -> Tensor:
        """Keys and values (2, n, Hk, D) of the tokens at these places (n,)."""
        kept = self.layer(layer).index_select(1, places)
        if not self.is_compressed:
            return kept
        found = dequantize_int8(kept, self.dtype)
        if self.has_key_bias:
            found[0] += self._key_bias(layer, self._positions[self._part_of[layer][0]][places])
        return found

    def _key_bias(self, layer: int, positions: Tensor) -> Tensor:
        """(n, Hk, D)"""
        attention = self.denoiser.layers[layer].self_attn
        assert isinstance(attention, Attention) and attention.k_proj.bias is not None
        bias = attention.k_proj.bias.to(positions.device, self.dtype).view(1, -1, attention.head_dim)
        rope = self.denoiser.compute_rope(positions.to(self.denoiser.device))
        rope = tuple(part.to(positions.device) for part in rope)
        return apply_rope(bias.expand(len(positions), -1, -1), rope)

    def write(self, places: Places, kept: Tensor, start: int) -> None:
        """Writes what is kept of tokens at the positions from `start` on, (N, 2, n, ...), in all layers."""
        parts = self._allocated()
        for number, own in enumerate(kept.split([*map(len, parts)])):
            (at,) = to_device([places], parts[number].device)
            parts[number].index_copy_(2, at, own.to(at.device, non_blocking=True))
            if self.has_key_bias:
                positions = torch.arange(start, start + len(places), dtype=torch.int32, device=at.device)
                self._positions[number][at] = positions

    def read(self, places: Places) -> Tensor:
        """A copy of what is kept at these places, (N, 2, n, ...), on the first device."""
        first, *rest = (x.index_select(2, *to_device([places], x.device)) for x in self._allocated())
        return torch.cat([first, *(x.to(first.device) for x in rest)]) if rest else first

    def _allocated(self) -> list[Tensor]:
        """The tensors, which are taken at their first use."""
        if not self._parts:
            self._parts, self._positions = self._allocate(self.capacity)
        return self._parts

    def _allocate(self, capacity: int) -> tuple[list[Tensor], list[Tensor]]:
        shape = 2, capacity + 1, *self.token.shape[3:]
        kept = self.token.dtype
        parts = [torch.empty((n, *shape), device=device, dtype=kept) for device, n in self._runs]
        biased = self._runs if self.has_key_bias else []
        return parts, [torch.empty(capacity, device=device, dtype=torch.int32) for device, _ in biased]

    def _grow(self, capacity: int) -> None:
        """Takes more room; what is kept stays at its places. Where memory lacks, all stays as it was."""
        used = self.capacity
        if self._parts:
            parts, positions = self._allocate(capacity)
            for old, new in zip((*self._parts, *self._positions), (*parts, *positions), strict=True):
                axis = 2 if old.dim() > 1 else 0
                new.narrow(axis, 0, used).copy_(old.narrow(axis, 0, used))
            self._parts, self._positions = parts, positions
        more, none = np.arange(used, capacity)[::-1], np.zeros(self.taken, np.int64)
        self._free = np.concatenate((more, self._free[: self.free], none))
        self.free += capacity - used
        self.capacity = capacity


def quantize_int8(x: Tensor) -> Tensor:
    """x (..., D) -> int8 (..., D + 2): numbers from -127 to 127, then the bytes of their float16 scale."""
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=SMALLEST_SCALE).half()
    numbers = (x / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((numbers, scale.view(torch.int8)), dim=-1)


def dequantize_int8(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 (..., D + 2) -> (..., D) in `dtype`."""
    scale = kept[..., -SCALE_BYTES:].contiguous().view(torch.float16).float()
    found = torch.empty(*kept.shape[:-1], kept.shape[-1] - SCALE_BYTES, dtype=dtype, device=kept.device)
    return torch.mul(kept[..., :-SCALE_BYTES], scale, out=found)  # no copy in float32
