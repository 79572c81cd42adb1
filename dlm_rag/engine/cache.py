"""The cache of keys and values: what rows see, each segment computed once, in one memory.

A segment that sees itself alone (a passage, a question) is kept under its tokens for whichever row asks
next, the least recently used leaving first; with a store, all that was computed goes to its files, too.
Finished blocks of the chain of lead and canvas, which see what stands before them, are kept for their row
alone, until something before them changes. What nothing holds runs in the same call as the windows that see
it.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlm_rag.engine.memory import KVFormat, KVMemory, concatenate_places
from dlm_rag.engine.store import EvidenceStore
from dlm_rag.evidence.prompt_segments import LaidOutPrompt
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.packed_batch import MemoryRows, Places, Segment, pack_rows
from dlm_rag.progress import format_bytes

PREFILL_TOKENS = 8192  # of new segments that may run in the same call as the rows


class CacheRequest(NamedTuple):
    """A row that is to run: its number, its prompt, the chain of lead and canvas as far as it is looked at.

    finished_tokens: tokens of the chain in whole blocks that change no more. first_read_token: the first
    token of the chain whose state is read.
    """

    row: int
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


@dataclass
class CacheStats:
    """Counts over a run: of context tokens, and of segments by the tier that they came from."""

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

    def describe_tiers(self) -> str:
        """Which tiers passages came from, in words."""
        read = f"{format_bytes(self.store_bytes)}, {self.store_seconds:.1f} s"
        tiers = {
            "on the device": self.device_segments,
            f"from files ({read})": self.store_segments,
        }
        found = [f"{count:,} {tier}" for tier, count in tiers.items() if count]
        return ", ".join([*found, f"{self.encoded_segments:,} encoded"])


@dataclass(frozen=True)
class _Chain:
    """The finished blocks of a row; context: what they saw before them, in any order."""

    context: Counter[Segment]
    first: int  # tokens of the first block
    ids: tuple[int, ...]
    places: Places


class KVCache:
    """The keys and values that rows see, under a budget in bytes on the denoiser's device.

    A call may take more than the budget; after it, what was used longest ago leaves until the rest fits.
    Without a budget nothing is kept, and every step computes everything, as a plain implementation does.
    """

    def __init__(
        self, denoiser: Denoiser, format: KVFormat, budget_bytes: int, store: EvidenceStore | None = None
    ) -> None:
        self.cache_stats, self.store = CacheStats(), store
        self.kept: OrderedDict[Segment, Places] = OrderedDict()  # the least recently used first
        self.budget_tokens = budget_bytes // format.token_bytes
        self._denoiser, self.memory = denoiser, KVMemory(format, self.budget_tokens)
        self._chains: dict[int, _Chain] = {}  # by row
        # Of the call under way: segments that it sees, those it computes, chains after it, other places.
        self._seen: dict[Segment, Places] = {}
        self._new: dict[Segment, Places] = {}
        self._next: dict[int, _Chain] = {}
        self._loose: list[Places] = []

    @property
    def used_bytes(self) -> int:
        """The bytes on the device that hold something."""
        return self.memory.taken * self.memory.format.token_bytes

    @property
    def budget_bytes(self) -> int:
        return self.budget_tokens * self.memory.format.token_bytes

    def prefetch(self, laid: LaidOutPrompt) -> None:
        """Starts to read from files what a row will need next."""
        if self.store is not None:
            segments = (*laid.context_segments, *laid.later_segments)
            self.store.prefetch([s for s in segments if s not in self.kept])

    def release(self, row: int) -> None:
        """A row has gone, and its finished blocks with it."""
        if (chain := self._chains.pop(row, None)) is not None:
            self.memory.give_back(chain.places)

    def prepare_rows(self, shown: Sequence[CacheRequest]) -> tuple[list[ForwardSpan], MemoryRows | None]:
        """Finds out what of these rows has to run: first segments that nothing holds, then row by row.

        Returns these runs, and what they see; None where no row sees or keeps anything. After the call,
        `store_computed` keeps what it computed. Rows that share a segment share its computation.
        """
        self._give_up()
        prompts = [row.laid_out_prompt for row in shown]
        if all(laid.block_size is None and not laid.context_segments for laid in prompts):
            return [ForwardSpan(n, 0, row.canvas_segment) for n, row in enumerate(shown)], None
        wanted = [(*laid.context_segments, *laid.later_segments) for laid in prompts]
        self.cache_stats.requested_tokens += sum(len(segment.ids) for row in wanted for segment in row)
        self._locate(dict.fromkeys(segment for row in wanted for segment in row))
        runs, seen, own = list[ForwardSpan](), list[Places](), list[Places]()
        for segment in self._run_ahead():
            runs.append(ForwardSpan(None, 0, segment))
            seen.append(concatenate_places([]))
            own.append(self._new[segment])
        for number, row in enumerate(shown):
            for run, before, places in self._spans(number, row):
                runs.append(run)
                seen.append(before)
                own.append(places)
        by_row = self._denoiser.backend == "sdpa" and self._denoiser.device.type == "cpu"
        by_row = by_row and not self.memory.format.is_compressed
        return runs, MemoryRows(self.memory, seen, own, by_row)

    def store_computed(self) -> None:
        """Keeps what the call has computed."""
        if not self.budget_tokens:
            self._give_up()
            return
        for segment, places in self._new.items():
            self.kept[segment] = places
            if self.store is not None:
                self.store.add(segment, *self._copy_to_host(places))
        self._chains |= self._next
        self._new, self._next = {}, {}
        self._give_up()
        while self.memory.taken > self.budget_tokens and self.kept:
            self._evict()

    def _give_up(self) -> None:
        """Frees what the call under way has taken and nobody keeps."""
        chains = [chain.places for chain in self._next.values()]
        for places in (*self._new.values(), *chains, *self._loose):
            self.memory.give_back(places)
        self._seen, self._new, self._next, self._loose = {}, {}, {}, []

    def _locate(self, wanted: dict[Segment, None]) -> None:
        """Gives each segment its places; `_new` are those that have to run."""
        for segment in wanted:
            if segment in self.kept:
                self.kept.move_to_end(segment)
                self.cache_stats.device_segments += 1
        self._seen = {segment: self.kept[segment] for segment in wanted if segment in self.kept}
        for segment in wanted:
            if segment in self._seen:
                continue
            kept, places = self._bring(segment), self._take(len(segment.ids))
            self._seen[segment] = places
            if kept is None:
                self._new[segment] = places
            else:
                self.memory.write(places, kept, segment.start)
                self.kept[segment] = places
        self.cache_stats.encoded_tokens += sum(len(segment.ids) for segment in self._new)
        self.cache_stats.encoded_segments += len(self._new)

    def _bring(self, segment: Segment) -> Tensor | None:
        """A segment from the store, or None where it is not there."""
        begin = time.perf_counter()
        if self.store is None or (kept := self.store.get(segment)) is None:
            return None
        self.cache_stats.store_segments += 1
        self.cache_stats.store_bytes += kept.nbytes
        self.cache_stats.store_seconds += time.perf_counter() - begin
        return kept

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
        """A copy in host memory, made while the denoiser runs on, and the event after which it is there."""
        kept = self.memory.read(places)
        if not kept.is_cuda:
            return kept.cpu(), None
        aside = torch.empty_like(kept, device="cpu", pin_memory=True)
        aside.copy_(kept, non_blocking=True)
        return aside, torch.cuda.current_stream(kept.device).record_event()

    def _run_ahead(self) -> list[Segment]:
        """Runs new segments here if they are too many for the call of the rows; returns those left."""
        new = [*self._new]
        if sum(len(segment.ids) for segment in new) <= PREFILL_TOKENS:
            return new
        for part in _split_by_tokens(new):
            own = [self._new[segment] for segment in part]
            context = MemoryRows(self.memory, [concatenate_places([])] * len(part), own)
            read = [[0], *[()] * (len(part) - 1)]  # the last layer writes only if some state is read
            self._denoiser.encode(pack_rows(part, self._denoiser.device, read, context))
        return []

    def _spans(self, number: int, row: CacheRequest) -> Iterator[tuple[ForwardSpan, Places, Places]]:
        """What of a row has to run, the places of what it sees before itself, and its own."""
        laid, chain = row.laid_out_prompt, row.canvas_segment
        places, valid = self._extend_chain(row)
        context = [self._seen[segment] for segment in laid.context_segments]
        later = [self._seen[segment] for segment in laid.later_segments]
        # Only SDPA takes masks, and on a GPU it is fast without them alone. A block that is kept as int8 is
        # seen like that by the next one at once.
        split = self._denoiser.backend != "sdpa" or self._denoiser.device.type == "cuda"
        split = split or self.memory.format.is_compressed
        done = row.finished_tokens if later else valid  # else the window follows without a gap
        for start, stop, more in ((valid, done, []), (done, len(chain.ids), later)):
            if start < stop:
                run = chain.slice_tokens(start, stop)
                for piece in run.split_into_blocks() if split else [run]:
                    begin = piece.start - chain.start
                    seen = concatenate_places([*context, *more, places[:begin]])
                    own = places[begin : begin + len(piece.ids)]
                    yield ForwardSpan(number, begin, piece), seen, own

    def _extend_chain(self, row: CacheRequest) -> tuple[Places, int]:
        """Places for all tokens of a chain, and how many in front need not run."""
        chain, done, held = row.canvas_segment, row.finished_tokens, self._chains.get(row.row)
        context = Counter(row.laid_out_prompt.context_segments)
        valid = 0 if held is None else _count_reusable_tokens(row, held, context)
        places = self._take(len(chain.ids) - valid)
        if held is not None:
            del self._chains[row.row]
            self.memory.give_back(held.places[valid:])
            places = concatenate_places([held.places[:valid], places])
        self._next[row.row] = _Chain(context, chain.first, chain.ids[:done], places[:done])
        self._loose.append(places[done:])
        return places, valid


def _count_reusable_tokens(row: CacheRequest, held: _Chain, context: Counter[Segment]) -> int:
    """How many tokens of the chain need not run: they are whole blocks, and nothing before them changed."""
    done = row.canvas_segment.ids[: row.finished_tokens]
    if held.context != context or held.first != row.canvas_segment.first:
        return 0
    pairs = enumerate(zip(held.ids, done, strict=False))
    same = next((n for n, (one, other) in pairs if one != other), min(len(held.ids), len(done)))
    if row.first_read_token < row.finished_tokens:
        same = min(same, row.first_read_token)
    return row.canvas_segment.block_start(same)


def _split_by_tokens(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """In order, as many at a time as come to at most `PREFILL_TOKENS` tokens; at least one."""
    part, tokens = list[Segment](), 0
    for segment in segments:
        if part and tokens + len(segment.ids) > PREFILL_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(segment)
        tokens += len(segment.ids)
    yield part
