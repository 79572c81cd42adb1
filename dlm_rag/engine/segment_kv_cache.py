"""The evidence pool: keys and values of segments, each computed once, in two tiers under byte budgets."""

import math
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlm_rag.engine.kv_tiers import KVArena, Tier
from dlm_rag.model.packed_batch import Segment
from dlm_rag.progress import format_bytes

if TYPE_CHECKING:
    from dlm_rag.engine.store import EvidenceStore

_CGROUP = Path("/sys/fs/cgroup")
CGROUP_MEMORY_FILES = (  # limit and usage of a container, in version 2 and in version 1
    (_CGROUP / "memory.max", _CGROUP / "memory.current"),
    (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes"),
)
POOL_SHARE_OF_FREE_MEMORY = {"cuda": 0.5, "cpu": 0.25}  # of the memory that is free when a decoder begins


@dataclass
class CacheStats:
    """Counts over a run: of context tokens, and of segments by the tier that they came from."""

    requested_tokens: int = 0  # tokens that rows saw, summed over steps
    encoded_tokens: int = 0  # tokens that the denoiser had to run for
    host_tokens: int = 0  # tokens that came back from host memory
    evicted_segments: int = 0  # segments that had to make room
    device_segments: int = 0  # that were asked for and lay on the device
    host_segments: int = 0  # that came back from host memory
    host_bytes: int = 0
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
            f"from host memory ({format_bytes(self.host_bytes)})": self.host_segments,
            f"from files ({read})": self.store_segments,
        }
        found = [f"{count:,} {tier}" for tier, count in tiers.items() if count]
        return ", ".join([*found, f"{self.encoded_segments:,} encoded"])


def measure_free_bytes(device: torch.device) -> float:
    """Bytes that could be allocated on a device now: on CUDA with what the allocator holds unused.

    A device without memory of its own, as a GB10, has the host's, of which the driver counts what caches
    files as taken.
    """
    unused = 0
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if not has_unified_memory(device):
            return torch.cuda.mem_get_info(device)[0] + unused
    listed = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", listed.read_text()) if listed.is_file() else None
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = int(found[1]) * 1024 if found else physical // 2
    return unused + min(free, *map(_count_container_bytes_left, CGROUP_MEMORY_FILES))


def has_unified_memory(device: torch.device) -> bool:
    """Whether a device has the host's memory and no other, as a CPU and a GB10."""
    if device.type != "cuda":
        return True
    return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def _count_container_bytes_left(group: tuple[Path, Path]) -> float:
    try:
        limit, used = (int(path.read_text()) for path in group)
    except (OSError, ValueError):  # no such file; "max"
        return math.inf
    return max(0, limit - used)


def default_pool_bytes(device: torch.device, limit: float | None = None, weight_bytes: int = 0) -> int:
    """Bytes of a pool whose size nobody has named: a share of the memory that is free.

    limit: bytes that weights, pool and all else may take together.
    """
    free = measure_free_bytes(device)
    if limit is not None:
        free = max(0.0, min(free, limit - weight_bytes))
    return int(POOL_SHARE_OF_FREE_MEMORY.get(device.type, 0.25) * free)


class EvidencePool:
    """Keys and values of segments, as a `KVFormat` keeps them, the least recently used leaving first.

    The first tier lies on the denoiser's device: tensors, or a `KVArena` that rows read in place. What
    leaves it goes to a second one in host memory, pinned for CUDA. A `store` of files holds all that was
    computed. No tier ever holds more than its budget in bytes. Copies between the tiers run on a stream of
    their own, while the denoiser runs.
    """

    def __init__(
        self, device: torch.device, near: "int | KVArena", host_bytes: int = 0,
        store: "EvidenceStore | None" = None,
    ) -> None:  # fmt: skip
        """near: bytes on the device, or an arena there."""
        self._device, self.store = device, store
        self.arena = near if isinstance(near, KVArena) else None
        self._near: Tier = Tier(near) if isinstance(near, int) else near
        self._far = Tier(host_bytes, pinned=device.type == "cuda")
        self._copies = (
            torch.cuda.Stream(device) if device.type == "cuda" and (host_bytes or store) else None
        )
        self._arriving: dict[Segment, Any] = {}  # events: after which a segment is on the device
        self.cache_stats = CacheStats()

    @property
    def used_bytes(self) -> tuple[int, int]:
        return self._near.bytes, self._far.bytes

    @property
    def capacity_bytes(self) -> int:
        return self._near.budget

    def prefetch(self, segments: Iterable[Segment]) -> None:
        """Starts to bring what lies in host memory or in files, so that `get` need not wait."""
        away = [segment for segment in segments if segment not in self._near.kept]
        if self.store is not None:
            self.store.prefetch([segment for segment in away if segment not in self._far.kept])
        for segment in away:
            kept = self._far.kept.get(segment)
            if kept is not None and self._near.can_hold(segment, self._near.cost(kept)):
                self._onload(segment)

    def get(self, segment: Segment) -> Tensor | None:
        """What is kept of a segment, on the device, or None."""
        found = self._near.kept.get(segment)
        if found is None:
            found = self._onload(segment)
        else:
            self._near.kept.move_to_end(segment)
            self.cache_stats.device_segments += 1
        if found is not None and (event := self._arriving.pop(segment, None)):
            here = torch.cuda.current_stream(self._device)
            here.wait_event(event)
            found.record_stream(here)
        return found

    def add(self, segment: Segment, kept: Tensor) -> None:
        """Keeps what was computed of a segment, at the cost of what was used longest ago."""
        self._keep(segment, kept)
        self._write_to_store(segment, kept)

    def locate(self, segments: Sequence[Segment]) -> list[Segment]:
        """Gives each of these segments a range of the arena; returns the new ones, which are to be written.

        They must fit together. All of them stay there until the next `locate`; new ones are kept if
        `commit` follows.
        """
        assert self.arena is not None
        self.arena.protect(segments)
        new = [segment for segment in segments if self.get(segment) is None]
        for event in self._arriving.values():  # of what was prefetched: it comes into the same memory
            torch.cuda.current_stream(self._device).wait_event(event)
        self._arriving.clear()
        for segment in new:
            self._make_room(self.arena.bytes_of(len(segment.ids)))
            self.arena.take(segment)
        return new

    def commit(self) -> None:
        """The call has written what `locate` said is new."""
        assert self.arena is not None
        for segment, kept in self.arena.commit():
            self._write_to_store(segment, kept)

    def _keep(self, segment: Segment, kept: Tensor) -> Tensor:
        """Takes it into the first tier; returns what lies there, or `kept` where there is no room."""
        self._near.drop(segment)
        cost = self._near.cost(kept)
        if not self._near.can_hold(segment, cost):
            return kept
        self._make_room(cost)
        return self._near.put(segment, kept)

    def _make_room(self, cost: int) -> None:
        gone = self._near.make_room(cost)
        for old, tensor in gone:
            self._arriving.pop(old, None)
            self.cache_stats.evicted_segments += 1
            if (taken := self._far.cost(tensor)) <= self._far.budget:
                self._far.make_room(taken)
                self._far.put(old, self._to_host(tensor)[0])
        if self._copies is None or self.arena is None:
            return
        if gone or not self.arena.has_hole(cost):  # copies are made where others will be written or moved
            torch.cuda.current_stream(self._device).wait_stream(self._copies)

    def _onload(self, segment: Segment) -> Tensor | None:
        """A segment from host memory or a file to the device, or None where it is not there."""
        stats, begin = self.cache_stats, time.perf_counter()
        if (aside := self._far.drop(segment)) is not None:
            stats.host_tokens += aside.shape[2]
            stats.host_segments += 1
            stats.host_bytes += aside.nbytes
        elif self.store is not None and (aside := self.store.get(segment)) is not None:
            stats.store_segments += 1
            stats.store_bytes += aside.nbytes
            stats.store_seconds += time.perf_counter() - begin
        if aside is None:
            return None
        room = aside if self.arena is not None else torch.empty_like(aside, device=self._device)
        found = self._keep(segment, room)
        if (event := self._copy(aside, found)) is not None:
            self._arriving[segment] = event
        return found

    def _write_to_store(self, segment: Segment, kept: Tensor) -> None:
        if self.store is not None:
            self.store.add(segment, *self._to_host(kept))

    def _to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """A copy in host memory, and the event after which it is there."""
        contiguous = torch.contiguous_format
        aside = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, memory_format=contiguous)
        return aside, self._copy(tensor, aside)

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        """Copies between the tiers, after all that the denoiser has been asked until now.

        It may still be writing the source, or reading what lay in the target's memory before. Returns the
        event after which the copy is made; None: it is made.
        """
        if self._copies is None:
            target.copy_(source)
            return None
        here = torch.cuda.current_stream(self._device)
        self._copies.wait_event(here.record_event())
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            event = self._copies.record_event()
        for tensor in (source, target):
            if tensor.is_cuda:  # its memory is not given away before the copy is over
                tensor.record_stream(self._copies)
        return event
