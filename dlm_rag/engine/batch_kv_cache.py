"""The contexts of the rows in a batch: only what changed is written, or computed.

A slot holds what a row sees in the order in which it stands: segments that see themselves alone, the
finished part of the chain of lead and canvas, whose blocks see what stands before them, and segments that
only the window after them sees. What an earlier call left there stays where nothing before it has changed;
else segments are moved or come from the pool, and the chain runs again, in the same call as the window.
What the window alone sees stands in front of all, where it stays as the chain grows.

With a ragged kernel (varlen, flash), the pool is an arena from which all rows gather the same segments; a
slot holds the chain alone, and without blocks there are no slots.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from dlm_rag.engine.kv_format import KVFormat
from dlm_rag.engine.kv_tiers import count_arena_tokens
from dlm_rag.engine.segment_kv_cache import CacheStats, EvidencePool
from dlm_rag.errors import RunError
from dlm_rag.evidence.encode_segments import encode_segments
from dlm_rag.evidence.prompt_segments import LaidOutPrompt
from dlm_rag.model.attention import RAGGED_KERNELS
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.kv_store import CachedRows, SharedSegments, SlotKVCache, round_up_to_page
from dlm_rag.model.packed_batch import Segment

PREFILL_SCRATCH_TOKENS = 8192  # in whole pages: of new segments that may run in the same call as the rows


class CacheRequest(NamedTuple):
    """A row that is to run: its slot, its prompt, the chain of lead and canvas as far as it is looked at.

    finished_tokens: tokens of the chain in whole blocks that change no more. first_read_token: the first
    token of the chain whose state is read.
    """

    slot: int
    laid_out_prompt: LaidOutPrompt
    canvas_segment: Segment
    finished_tokens: int
    first_read_token: int


class ForwardSpan(NamedTuple):
    """A stretch of a row's chain that is to run, from token `begin` of it on; row: which of those shown.

    None: a segment that sees itself alone, of whose states none is read.
    """

    row: int | None
    begin: int
    segment: Segment


@dataclass(frozen=True)
class _SlotLayout:
    """What stands in a slot; first: tokens of the first block of the chain."""

    context: tuple[Segment, ...] = ()
    first: int = 0
    chain: tuple[int, ...] = ()  # its finished tokens
    later: tuple[Segment, ...] = ()
    shared: bool = False  # whether segments lie in the arena

    @cached_property
    def places(self) -> tuple[int, list[tuple[Segment, int]], int]:
        """Where the chain begins, where each segment stands, and where the window goes on."""
        ahead = () if self.shared else (*self.later, *self.context)
        *at, chain = accumulate((len(segment.ids) for segment in ahead), initial=0)
        return chain, list(zip(ahead, at, strict=True)), chain + len(self.chain)

    def visible_segments(self, token: int) -> tuple[Segment, ...]:
        """What a token of the chain sees: one of a finished block nothing of what stands after it."""
        return self.context if token < len(self.chain) else (*self.context, *self.later)


class KVCacheManager:
    """The contexts of the rows in a batch, ready to be seen by their canvases.

    Without a `pool` everything is encoded again at every step, as a plain implementation does.
    """

    def __init__(self, denoiser: Denoiser, pool: EvidencePool | None, format: KVFormat) -> None:
        config = denoiser.config
        self._denoiser, self._pool, self._format = denoiser, pool, format
        self._arena = None if pool is None else pool.arena
        self._store = SlotKVCache(
            config.num_key_value_heads, config.head_dim, denoiser.compute_dtype, denoiser.layer_devices
        )
        self._held: dict[int, _SlotLayout] = {}
        # Of the call under way: what it computes and where it puts it, and what the slots hold then.
        self._new: dict[Segment, int] = {}
        self._next: dict[int, _SlotLayout] = {}
        self.cache_stats = CacheStats() if pool is None else pool.cache_stats

    def prefetch(self, laid: LaidOutPrompt) -> None:
        """Starts to bring what a row will need next from host memory."""
        if self._pool is not None:
            self._pool.prefetch((*laid.context_segments, *laid.later_segments))

    def release(self, slot: int) -> None:
        """A row has left its slot."""
        self._held.pop(slot, None)

    def split_rows(self, prompts: Sequence[LaidOutPrompt]) -> list[slice]:
        """Rows in parts whose segments fit into the arena together, as few as come in this order.

        Raises `RunError` for a row whose segments do not.
        """
        if self._arena is None:
            return [slice(0, len(prompts))]
        parts, seen, start, left = list[slice](), set[Segment](), 0, self._arena.tokens
        for row, laid in enumerate(prompts):
            own = {*laid.context_segments, *laid.later_segments}
            if (new := count_arena_tokens(own - seen)) > left and seen:
                parts.append(slice(start, row))
                seen, start, left, new = set(), row, self._arena.tokens, count_arena_tokens(own)
            if new > left:
                raise RunError(
                    f"a prompt has {sum(len(segment.ids) for segment in own):,} tokens, and the cache of "
                    f"evidence holds {self._arena.tokens:,}: raise engine.prefix_cache_gib"
                )
            seen |= own
            left -= new
        return [*parts, slice(start, len(prompts))]

    def prepare_rows(
        self, shown: Sequence[CacheRequest]
    ) -> tuple[list[ForwardSpan], CachedRows | SharedSegments | None]:
        """Writes what changed into the slots of these rows.

        Returns what is left to run, first segments that nothing holds, then row by row; and what these runs
        see, None where no row sees anything. Rows that share a segment share its computation. After the
        call, `store_computed` keeps what it computed.
        """
        self._new, self._next = {}, {}
        prompts = [row.laid_out_prompt for row in shown]
        if all(laid.block_size is None and not laid.context_segments for laid in prompts):
            return [ForwardSpan(number, 0, row.canvas_segment) for number, row in enumerate(shown)], None
        before = [self._held.pop(row.slot, _SlotLayout()) for row in shown]  # until the call has been made
        if self._pool is None:
            before = [_SlotLayout()] * len(shown)
        orders = [
            _SlotLayout(
                _order_by_arrival(held.context, laid.context_segments), row.canvas_segment.first,
                row.canvas_segment.ids[: row.finished_tokens],
                _order_by_arrival(held.later, laid.later_segments), self._arena is not None,
            )
            for laid, row, held in zip(prompts, shown, before, strict=True)
        ]  # fmt: skip
        self.cache_stats.requested_tokens += sum(
            len(segment.ids) for order in orders for segment in (*order.context, *order.later)
        )
        uses_slots = self._arena is None or any(laid.block_size is not None for laid in prompts)
        if uses_slots:
            room = [
                order.places[2] + len(row.canvas_segment.ids) - len(order.chain)
                for row, order in zip(shown, orders, strict=True)
            ]
            self._store.reserve(max(row.slot for row in shown) + 1, max(room))
        lacking, spans = list[tuple[Segment, int]](), []
        for number, (row, order, held) in enumerate(zip(shown, orders, before, strict=True)):
            valid = _count_reusable_tokens(row, held, order)
            lacking += self._move_kept_segments(row.slot, held, order, valid)
            spans += [(number, *span) for span in self._remaining_spans(row, order, valid)]
            self._next[row.slot] = order
        new = self._fetch_from_pool(lacking) if self._arena is None else self._fetch_into_arena(orders)
        sizes = [round_up_to_page(len(segment.ids)) * uses_slots for segment in new]
        self._store.reserve(0, 0, sum(sizes))
        scratch = self._store.slots * self._store.capacity
        self._new = dict(zip(new, accumulate(sizes, initial=scratch), strict=False))
        runs = [ForwardSpan(None, 0, segment) for segment in self._new]
        runs += [ForwardSpan(n, begin, segment) for n, begin, segment, *_ in spans]
        slots = [row.slot * self._store.capacity for row in shown]
        starts = [*self._new.values(), *(slots[n] + first for n, _, _, first, _ in spans)]
        seen = [*[0] * len(self._new), *(tokens for *_, tokens in spans)]
        number_of = {segment: n for n, segment in enumerate(self._new)}
        copies = [(number_of[segment], place) for segment, place in lacking if segment in number_of]
        gathered = self._denoiser.backend in RAGGED_KERNELS
        cached = CachedRows(self._store, starts, seen, copies, gathered) if uses_slots else None
        if self._arena is None:
            return runs, cached
        read = [orders[n].visible_segments(begin) for n, begin, *_ in spans]
        ranges = [*[()] * len(new), *(tuple(map(self._arena.range_of, row)) for row in read)]
        written = [(n, self._arena.range_of(segment).start) for segment, n in number_of.items()]
        return runs, SharedSegments(self._arena, ranges, written, cached)

    def store_computed(self) -> None:
        """Keeps what the call has computed."""
        self._held |= self._next
        if self._pool is not None and self._arena is not None:
            if self._next:  # else this call has not asked for room, and one before it may have failed
                self._pool.commit()
        elif self._pool is not None:
            for segment, place in self._new.items():
                self._pool.add(segment, self._store.read_tokens(place, len(segment.ids)))
        self._new, self._next = {}, {}

    def _move_kept_segments(
        self, slot: int, held: _SlotLayout, order: _SlotLayout, chain: int
    ) -> list[tuple[Segment, int]]:
        """Moves what the slot holds to its place, and as many tokens of the chain as are kept.

        Returns what it does not hold, with its place.
        """
        start = slot * self._store.capacity
        there, wanted = dict(held.places[1]), order.places[1]
        moves = [(start + there[s], start + at, len(s.ids)) for s, at in wanted if s in there]
        self._store.move_tokens([*moves, (start + held.places[0], start + order.places[0], chain)])
        return [(segment, start + at) for segment, at in wanted if segment not in there]

    def _remaining_spans(
        self, row: CacheRequest, order: _SlotLayout, valid: int
    ) -> Iterator[tuple[int, Segment, int, int]]:
        """What of a chain has to run: where it begins in the chain, its tokens, and what of the slot stands
        before them and is seen: from where on, how many.
        """
        # Only SDPA takes masks, and on a GPU it is fast without them alone.
        split = self._denoiser.backend != "sdpa" or self._denoiser.device.type == "cuda"
        chain, (place, _, window) = row.canvas_segment, order.places
        done = len(order.chain) if order.later else valid  # else the window follows without a gap
        # From where on a finished block sees: not what stands in front for the window alone.
        finished = valid, done, place, 0 if order.shared else sum(len(s.ids) for s in order.later)
        for start, stop, ahead, first in (finished, (done, len(chain.ids), window - len(order.chain), 0)):
            if start < stop:
                run = chain.slice_tokens(start, stop)
                for piece in run.split_into_blocks() if split else [run]:
                    begin = piece.start - chain.start
                    yield begin, piece, first, begin + ahead - first

    def _fetch_from_pool(self, lacking: Sequence[tuple[Segment, int]]) -> list[Segment]:
        """Puts segments from the pool where they are lacking; returns those that are left to run."""
        wanted: dict[Segment, list[int]] = {}
        for segment, place in lacking:
            wanted.setdefault(segment, []).append(place)

        def put(segment: Segment, kept: Tensor) -> None:
            for place in wanted[segment]:
                self._store.write_tokens(place, self._format.unpack(kept, segment.start))

        new = []
        for segment in wanted:
            kept = None if self._pool is None else self._pool.get(segment)
            if kept is None:
                new.append(segment)
            else:
                put(segment, kept)
        return self._run_ahead(new, put)

    def _fetch_into_arena(self, orders: Sequence[_SlotLayout]) -> list[Segment]:
        """Brings what the rows see into the arena; returns the segments that are left to run."""
        assert self._pool is not None and self._arena is not None
        seen = dict.fromkeys(segment for order in orders for segment in (*order.context, *order.later))
        new = self._run_ahead(self._pool.locate(list(seen)), self._arena.write)
        if not new:
            self._pool.commit()
        return new

    def _run_ahead(self, new: list[Segment], put: Callable[[Segment, Tensor], None]) -> list[Segment]:
        """Runs new segments here where they are too many for the call of the rows, or are kept compressed.

        Then the rows see the same numbers now and later. Returns what is left to run in that call.
        """
        self.cache_stats.encoded_tokens += sum(len(segment.ids) for segment in new)
        self.cache_stats.encoded_segments += len(new)
        tokens = sum(round_up_to_page(len(segment.ids)) for segment in new)
        if not new or (tokens <= PREFILL_SCRATCH_TOKENS and not self._format.is_compressed):
            return new
        for part in _scratch_batches(new):
            for segment, computed in zip(part, encode_segments(self._denoiser, part), strict=True):
                kept = self._format.pack(computed, segment.start)
                put(segment, kept)
                if self._pool is not None and self._arena is None:
                    self._pool.add(segment, kept)
        return []


def _order_by_arrival(held: Sequence[Segment], now: Sequence[Segment]) -> tuple[Segment, ...]:
    """Those of `now` with what was there before in its old order in front: attention asks for no order."""
    wanted = dict.fromkeys(now)
    if len(wanted) < len(now):  # one is there twice
        return tuple(now)
    return tuple(dict.fromkeys([*(segment for segment in held if segment in wanted), *now]))


def _scratch_batches(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """In order, as many at a time as come to at most `PREFILL_SCRATCH_TOKENS` tokens; at least one."""
    part, tokens = list[Segment](), 0
    for segment in segments:
        if part and tokens + len(segment.ids) > PREFILL_SCRATCH_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(segment)
        tokens += len(segment.ids)
    yield part


def _count_reusable_tokens(row: CacheRequest, held: _SlotLayout, order: _SlotLayout) -> int:
    """How many tokens of the chain need not run: they are whole blocks, and nothing before them changed."""
    if held.context != order.context or held.first != order.first:
        return 0
    pairs = enumerate(zip(held.chain, order.chain, strict=False))
    shorter = min(len(held.chain), len(order.chain))
    same = next((n for n, (one, other) in pairs if one != other), shorter)
    if row.first_read_token < row.finished_tokens:
        same = min(same, row.first_read_token)
    return row.canvas_segment.block_start(same)
