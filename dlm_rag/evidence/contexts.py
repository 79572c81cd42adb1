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

from dlm_rag.evidence.encode import encode_segments
from dlm_rag.evidence.layout import LAST, Arrangement
from dlm_rag.evidence.pool import EvidencePool, Reuse
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.rows import Segment
from dlm_rag.model.store import ContextStore, StoredRows, whole_pages

SCRATCH = 8192  # tokens, in whole pages, of new segments that may run in the same call as the rows


@dataclass(frozen=True)
class Shown:
    """A row that is to run: its slot, its prompt, the chain of lead and canvas as far as it is looked at.

    finished: tokens of the chain in whole blocks that change no more. needed: the first token of the
    chain whose state is read.
    """

    slot: int
    laid: Arrangement
    chain: Segment
    finished: int
    needed: int


@dataclass(frozen=True)
class Run:
    """A stretch of a row's chain that is to run, from token `begin` of it on; row: which of those shown.

    None: a segment that sees itself alone, of whose states none is read.
    """

    row: int | None
    begin: int
    segment: Segment


@dataclass(frozen=True)
class _Order:
    """What stands where in a slot.

    segments: with their places. stretches: of the finished chain, (from, up to, place); the last one, maybe
    empty, is where the window goes on.
    """

    segments: tuple[tuple[Segment, int], ...] = ()
    stretches: tuple[tuple[int, int, int], ...] = ((0, 0, 0),)
    chain: tuple[int, ...] = ()  # its finished tokens
    first: int = 0  # tokens of its first block

    question: tuple[Segment, ...] = ()

    @classmethod
    def of(cls, row: Shown) -> "_Order":
        segments, stretches, at, begin = [], [], 0, 0
        for behind, segment in (*((0, s) for s in row.laid.context), *row.laid.later):
            stop = max(begin, min(behind, row.finished))
            if stop > begin:
                stretches.append((begin, stop, at))
                at, begin = at + stop - begin, stop
            segments.append((segment, at))
            at += len(segment.ids)
        stretches.append((begin, row.finished, at))
        chain, question = row.chain.ids[: row.finished], row.laid.context[-1:]
        return cls(tuple(segments), tuple(stretches), chain, row.chain.first, question)

    def same_until(self, other: "_Order") -> int:
        """The first place where the segments differ."""
        pairs = zip_longest(self.segments, other.segments)
        return min(
            (at for pair in pairs if pair[0] != pair[1] for _, at in filter(None, pair)), default=LAST
        )


class Contexts:
    """The contexts of the rows in a batch, ready to be seen by their canvases.

    Without a `pool` everything is encoded anew at every step, as a plain implementation does.
    """

    def __init__(self, denoiser: Denoiser, pool: EvidencePool | None) -> None:
        config = denoiser.config
        self._denoiser, self._pool = denoiser, pool
        self._store = ContextStore(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, denoiser.device,
            denoiser.compute_dtype,
        )  # fmt: skip
        self._held: dict[int, _Order] = {}
        # Of the call under way: what it computes and where it puts it, and what the slots hold then.
        self._new: dict[Segment, int] = {}
        self._next: dict[int, _Order] = {}
        self.reuse = Reuse() if pool is None else pool.reuse

    def reserve(self, slots: int, tokens: int, scratch: int) -> None:
        """Makes room at once for so many rows of so many tokens, and for new segments of a call."""
        self._store.reserve(slots, tokens, scratch)

    def prefetch(self, laid: Arrangement) -> None:
        """Starts to bring what a row will need next from host memory."""
        if self._pool is not None:
            self._pool.prefetch((*laid.context, *(segment for _, segment in laid.later)))

    def release(self, slot: int) -> None:
        """A row has left its slot."""
        self._held.pop(slot, None)

    def load(self, shown: Sequence[Shown]) -> tuple[list[Run], StoredRows | None]:
        """Writes what changed into the slots of these rows.

        Returns what is left to run, first segments that nothing holds, then row by row; and what these runs
        see, None where no row sees anything. Rows that share a segment share its computation. After the
        call, `take_up` keeps what it computed.
        """
        self._new, self._next = {}, {}
        if all(row.laid.block is None and not row.laid.context for row in shown):
            return [Run(number, 0, row.chain) for number, row in enumerate(shown)], None
        store, orders = self._store, [_Order.of(row) for row in shown]
        before = [self._held.pop(row.slot, _Order()) for row in shown]  # until the call has been made
        self.reuse.wanted += sum(len(segment.ids) for order in orders for segment, _ in order.segments)
        room = [
            order.stretches[-1][2] + len(row.chain.ids) - order.stretches[-1][0]
            for row, order in zip(shown, orders, strict=True)
        ]
        store.reserve(max(row.slot for row in shown) + 1, max(room))
        valid, lacking = [], list[tuple[Segment, int]]()
        for row, order, there in zip(shown, orders, before, strict=True):
            held = there if self._pool is not None else _Order()
            valid.append(_valid(row, held, order))
            lacking += self._settle(row.slot, held, order, valid[-1])
            self._next[row.slot] = order
        self._new = self._fetch(lacking)
        runs = [Run(None, 0, segment) for segment in self._new]
        number = {segment: n for n, segment in enumerate(self._new)}
        copies = [(number[segment], place) for segment, place in lacking if segment in number]
        starts, seen = [*self._new.values()], [0] * len(runs)
        for n, (row, order, first) in enumerate(zip(shown, orders, valid, strict=True)):
            for begin, segment, place in self._left(row, order, first):
                runs.append(Run(n, begin, segment))
                starts.append(store.place(row.slot))
                seen.append(place)
        return runs, store.rows(starts, seen, copies)

    def take_up(self) -> None:
        """Keeps what the call has computed."""
        self._held |= self._next
        if self._pool is not None:
            for segment, place in self._new.items():
                self._pool.add(segment, self._store.get(place, len(segment.ids)))
        self._new, self._next = {}, {}

    def _settle(self, slot: int, held: _Order, order: _Order, valid: int) -> list[tuple[Segment, int]]:
        """Moves what the slot holds to its place; returns what it does not hold, with its place."""
        if held.segments == order.segments and held.stretches[-1][2] == order.stretches[-1][2]:
            return []
        there = dict(held.segments)
        slot = self._store.place(slot)
        lacking = [(segment, slot + place) for segment, place in order.segments if segment not in there]
        moves = [(there[s], place, len(s.ids)) for s, place in order.segments if s in there]
        for begin, stop, place in order.stretches:
            for first, last, at in held.stretches:
                low, high = max(begin, first), min(stop, last, valid)
                if low < high:
                    moves.append((at + low - first, place + low - begin, high - low))
        self._store.move([(slot + a, slot + b, count) for a, b, count in moves if a != b])
        return lacking

    def _left(self, row: Shown, order: _Order, valid: int) -> Iterator[tuple[int, Segment, int]]:
        """What of a chain has to run: where it begins in the chain, its tokens, its place in the slot."""
        split = self._denoiser.backend != "sdpa"  # the others take no masks
        *before, (begin, _, place) = order.stretches
        for first, stop, at in (*before, (begin, len(row.chain.ids), place)):
            start = max(first, valid)
            if start < stop:
                run = row.chain.part(start, stop)
                for piece in run.in_blocks() if split else [run]:
                    place_in_chain = piece.start - row.chain.start
                    yield place_in_chain, piece, at + place_in_chain - first

    def _fetch(self, lacking: Sequence[tuple[Segment, int]]) -> dict[Segment, int]:
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
        self.reuse.encoded += sum(len(segment.ids) for segment in new)
        sizes = [whole_pages(len(segment.ids)) for segment in new]
        if sum(sizes) > SCRATCH:
            for part in _parts(new):
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
            self._store.put(place, kept)


def _parts(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """In order, as many at a time as come to at most `SCRATCH` tokens; at least one."""
    part, tokens = list[Segment](), 0
    for segment in segments:
        if part and tokens + len(segment.ids) > SCRATCH:
            yield part
            part, tokens = [], 0
        part.append(segment)
        tokens += len(segment.ids)
    yield part


def _valid(row: Shown, held: _Order, order: _Order) -> int:
    """How many tokens of the chain need not run: they are whole blocks, and nothing before them changed."""
    question = row.laid.context[-1:]
    if held.first != order.first or (row.laid.kept and question != held.question):
        return 0  # other blocks, another question
    pairs = zip(held.chain, order.chain, strict=False)
    shorter = min(len(held.chain), len(order.chain))
    same = next((n for n, (one, other) in enumerate(pairs) if one != other), shorter)
    if not row.laid.kept:
        differ = order.same_until(held)
        for begin, stop, place in order.stretches:
            if place + stop - begin > differ:
                same = min(same, max(begin, begin + differ - place))
    return row.chain.block_start(min(same, row.needed) if row.needed < row.finished else same)
