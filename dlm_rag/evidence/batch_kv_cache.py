"""The contexts of the rows in a batch, each in its slot: only what changed is written, or computed.

A slot holds what a row sees in the order in which it stands: segments that see themselves alone, and the
finished part of the chain of lead and canvas, whose blocks see what stands before them. What an earlier
call left there stays where nothing before it has changed; else segments are moved or come from the pool,
and the chain runs again, in the same call as the window behind it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

from torch import Tensor

from dlm_rag.evidence.encode_segments import encode_segments
from dlm_rag.evidence.prompt_segments import UNBOUNDED_POSITION, LaidOutPrompt
from dlm_rag.evidence.segment_kv_cache import CacheStats, EvidencePool
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.kv_store import CachedRows, SlotKVCache, round_up_to_page
from dlm_rag.model.packed_batch import Segment

PREFILL_SCRATCH_TOKENS = (
    8192  # tokens, in whole pages, of new segments that may run in the same call as the rows
)


@dataclass(frozen=True)
class CacheRequest:
    """A row that is to run: its slot, its prompt, the chain of lead and canvas as far as it is looked at.

    finished_tokens: tokens of the chain in whole blocks that change no more. first_read_token: the first
    token of the chain whose state is read.
    """

    slot: int
    laid_out_prompt: LaidOutPrompt
    canvas_segment: Segment
    finished_tokens: int
    first_read_token: int


@dataclass(frozen=True)
class ForwardSpan:
    """A stretch of a row's chain that is to run, from token `begin` of it on; row: which of those shown.

    None: a segment that sees itself alone, of whose states none is read.
    """

    row: int | None
    begin: int
    segment: Segment


@dataclass(frozen=True)
class _SlotLayout:
    """What stands where in a slot.

    segments: with their places. stretches: of the finished chain, (from, up to, place); the last one, maybe
    empty, is where the window goes on.
    """

    segments: tuple[tuple[Segment, int], ...] = ()
    stretches: tuple[tuple[int, int, int], ...] = ((0, 0, 0),)
    chain: tuple[int, ...] = ()  # its finished tokens
    first: int = 0  # tokens of its first block

    @classmethod
    def from_request(cls, row: CacheRequest) -> "_SlotLayout":
        segments, stretches, at, begin = [], [], 0, 0
        for behind, segment in (
            *((0, s) for s in row.laid_out_prompt.context_segments),
            *row.laid_out_prompt.inserted_segments,
        ):
            stop = max(begin, min(behind, row.finished_tokens))
            if stop > begin:
                stretches.append((begin, stop, at))
                at, begin = at + stop - begin, stop
            segments.append((segment, at))
            at += len(segment.ids)
        stretches.append((begin, row.finished_tokens, at))
        chain = row.canvas_segment.ids[: row.finished_tokens]
        return cls(tuple(segments), tuple(stretches), chain, row.canvas_segment.first)

    def first_difference(self, other: "_SlotLayout") -> int:
        """The first place where the segments differ."""
        pairs = zip_longest(self.segments, other.segments)
        return min(
            (at for pair in pairs if pair[0] != pair[1] for _, at in filter(None, pair)),
            default=UNBOUNDED_POSITION,
        )


class KVCacheManager:
    """The contexts of the rows in a batch, ready to be seen by their canvases.

    Without a `pool` everything is encoded anew at every step, as a plain implementation does.
    """

    def __init__(self, denoiser: Denoiser, pool: EvidencePool | None) -> None:
        config = denoiser.config
        self._denoiser, self._pool = denoiser, pool
        self._store = SlotKVCache(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, denoiser.device,
            denoiser.compute_dtype,
        )  # fmt: skip
        self._held: dict[int, _SlotLayout] = {}
        # Of the call under way: what it computes and where it puts it, and what the slots hold then.
        self._new: dict[Segment, int] = {}
        self._next: dict[int, _SlotLayout] = {}
        self.cache_stats = CacheStats() if pool is None else pool.cache_stats

    def reserve(self, slots: int, tokens: int, scratch: int) -> None:
        """Makes room at once for so many rows of so many tokens, and for new segments of a call."""
        self._store.reserve(slots, tokens, scratch)

    def prefetch(self, laid: LaidOutPrompt) -> None:
        """Starts to bring what a row will need next from host memory."""
        if self._pool is not None:
            self._pool.prefetch(
                (*laid.context_segments, *(segment for _, segment in laid.inserted_segments))
            )

    def release(self, slot: int) -> None:
        """A row has left its slot."""
        self._held.pop(slot, None)

    def prepare_rows(self, shown: Sequence[CacheRequest]) -> tuple[list[ForwardSpan], CachedRows | None]:
        """Writes what changed into the slots of these rows.

        Returns what is left to run, first segments that nothing holds, then row by row; and what these runs
        see, None where no row sees anything. Rows that share a segment share its computation. After the
        call, `store_computed` keeps what it computed.
        """
        self._new, self._next = {}, {}
        if all(
            row.laid_out_prompt.block_size is None and not row.laid_out_prompt.context_segments
            for row in shown
        ):
            return [ForwardSpan(number, 0, row.canvas_segment) for number, row in enumerate(shown)], None
        store, orders = self._store, [_SlotLayout.from_request(row) for row in shown]
        before = [self._held.pop(row.slot, _SlotLayout()) for row in shown]  # until the call has been made
        self.cache_stats.requested_tokens += sum(
            len(segment.ids) for order in orders for segment, _ in order.segments
        )
        room = [
            order.stretches[-1][2] + len(row.canvas_segment.ids) - order.stretches[-1][0]
            for row, order in zip(shown, orders, strict=True)
        ]
        store.reserve(max(row.slot for row in shown) + 1, max(room))
        valid, lacking = [], list[tuple[Segment, int]]()
        for row, order, there in zip(shown, orders, before, strict=True):
            held = there if self._pool is not None else _SlotLayout()
            valid.append(_count_reusable_tokens(row, held, order))
            lacking += self._move_kept_segments(row.slot, held, order, valid[-1])
            self._next[row.slot] = order
        self._new = self._fetch_from_pool(lacking)
        runs = [ForwardSpan(None, 0, segment) for segment in self._new]
        number = {segment: n for n, segment in enumerate(self._new)}
        copies = [(number[segment], place) for segment, place in lacking if segment in number]
        starts, seen = [*self._new.values()], [0] * len(runs)
        for n, (row, order, first) in enumerate(zip(shown, orders, valid, strict=True)):
            for begin, segment, place in self._remaining_spans(row, order, first):
                runs.append(ForwardSpan(n, begin, segment))
                starts.append(store.token_index(row.slot))
                seen.append(place)
        return runs, store.select_rows(starts, seen, copies)

    def store_computed(self) -> None:
        """Keeps what the call has computed."""
        self._held |= self._next
        if self._pool is not None:
            for segment, place in self._new.items():
                self._pool.add(segment, self._store.read_tokens(place, len(segment.ids)))
        self._new, self._next = {}, {}

    def _move_kept_segments(
        self, slot: int, held: _SlotLayout, order: _SlotLayout, valid: int
    ) -> list[tuple[Segment, int]]:
        """Moves what the slot holds to its place; returns what it does not hold, with its place."""
        if held.segments == order.segments and held.stretches[-1][2] == order.stretches[-1][2]:
            return []
        there = dict(held.segments)
        slot = self._store.token_index(slot)
        lacking = [(segment, slot + place) for segment, place in order.segments if segment not in there]
        moves = [(there[s], place, len(s.ids)) for s, place in order.segments if s in there]
        for begin, stop, place in order.stretches:
            for first, last, at in held.stretches:
                low, high = max(begin, first), min(stop, last, valid)
                if low < high:
                    moves.append((at + low - first, place + low - begin, high - low))
        self._store.copy_tokens([(slot + a, slot + b, count) for a, b, count in moves if a != b])
        return lacking

    def _remaining_spans(
        self, row: CacheRequest, order: _SlotLayout, valid: int
    ) -> Iterator[tuple[int, Segment, int]]:
        """What of a chain has to run: where it begins in the chain, its tokens, its place in the slot."""
        # Only SDPA takes masks, and on a GPU it is fast without them alone.
        split = self._denoiser.backend != "sdpa" or self._denoiser.device.type == "cuda"
        *before, (begin, _, place) = order.stretches
        for first, stop, at in (*before, (begin, len(row.canvas_segment.ids), place)):
            start = max(first, valid)
            if start < stop:
                run = row.canvas_segment.slice_tokens(start, stop)
                for piece in run.split_into_blocks() if split else [run]:
                    place_in_chain = piece.start - row.canvas_segment.start
                    yield place_in_chain, piece, at + place_in_chain - first

    def _fetch_from_pool(self, lacking: Sequence[tuple[Segment, int]]) -> dict[Segment, int]:
        """Puts segments from the pool where they are lacking.

        Returns those that the pool does not hold, each with its place in the scratch room: they run in the
        same call as the rows, or, where they are too many, here.
        """
        wanted: dict[Segment, list[int]] = {}
        for segment, place in lacking:
            wanted.setdefault(segment, []).append(place)
        new = []
        for segment, places in wanted.items():
            kept = None if self._pool is None else self._pool.get(segment)
            if kept is None:
                new.append(segment)
            else:
                self._put(places, kept)
        self.cache_stats.encoded_tokens += sum(len(segment.ids) for segment in new)
        sizes = [round_up_to_page(len(segment.ids)) for segment in new]
        if sum(sizes) > PREFILL_SCRATCH_TOKENS:
            for part in _scratch_batches(new):
                for segment, tensor in zip(part, encode_segments(self._denoiser, part), strict=True):
                    self._put(wanted[segment], tensor)
                    if self._pool is not None:
                        self._pool.add(segment, tensor)
            new, sizes = [], []
        self._store.reserve(0, 0, sum(sizes))
        scratch = self._store.slots * self._store.capacity
        return dict(zip(new, accumulate(sizes, initial=scratch), strict=False))

    def _put(self, places: Sequence[int], kept: Tensor) -> None:
        for place in places:
            self._store.write_tokens(place, kept)


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
    if held.first != order.first:
        return 0  # other blocks
    pairs = zip(held.chain, order.chain, strict=False)
    shorter = min(len(held.chain), len(order.chain))
    same = next((n for n, (one, other) in enumerate(pairs) if one != other), shorter)
    differ = order.first_difference(held)
    for begin, stop, place in order.stretches:
        if place + stop - begin > differ:
            same = min(same, max(begin, begin + differ - place))
    return row.canvas_segment.block_start(
        min(same, row.first_read_token) if row.first_read_token < row.finished_tokens else same
    )
