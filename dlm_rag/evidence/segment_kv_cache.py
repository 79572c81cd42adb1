"""The evidence pool: keys and values of segments, each computed once, in two tiers under byte budgets."""

import math
import os
import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlm_rag.model.packed_batch import Segment

_CGROUP = Path("/sys/fs/cgroup")
CGROUP_MEMORY_FILES = (  # limit and usage of a container, in version 2 and in version 1
    (_CGROUP / "memory.max", _CGROUP / "memory.current"),
    (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes"),
)
POOL_SHARE_OF_FREE_MEMORY = {"cuda": 0.5, "cpu": 0.25}  # of the memory that is free when a decoder begins


@dataclass
class CacheStats:
    """Counts over a run: of context tokens, and of segments that left the device."""

    requested_tokens: int = 0  # tokens that rows saw, summed over steps
    encoded_tokens: int = 0  # tokens that the denoiser had to run for
    host_tokens: int = 0  # tokens that came back from host memory
    evicted_segments: int = 0  # segments that had to make room

    @property
    def reused_share(self) -> float:
        """The share of the wanted tokens that needed no run of their own."""
        return 1 - self.encoded_tokens / self.requested_tokens if self.requested_tokens else 0.0


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


def default_pool_bytes(device: torch.device) -> int:
    """Bytes of a pool whose size nobody has named: a share of the memory that is free."""
    return int(POOL_SHARE_OF_FREE_MEMORY.get(device.type, 0.25) * measure_free_bytes(device))


class EvidencePool:
    """Keys and values (N, 2, n, Hk, D) of segments, the least recently used leaving first.

    The first tier lies on the denoiser's device; what leaves it goes to a second one in host memory,
    pinned for CUDA. No tier ever holds more than its budget in bytes. Copies between the tiers run on a
    stream of their own, while the denoiser runs.
    """

    def __init__(self, device: torch.device, device_bytes: int, host_bytes: int = 0) -> None:
        self._device = device
        self._near, self._far = _Tier(device_bytes), _Tier(host_bytes, pinned=device.type == "cuda")
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" and host_bytes else None
        self._done: dict[Segment, Any] = {}  # events: of the last copy of a segment
        self.cache_stats = CacheStats()

    @property
    def used_bytes(self) -> tuple[int, int]:
        """Bytes held now, on the device and in host memory."""
        return self._near.bytes, self._far.bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes that may be held on the device."""
        return self._near.budget

    def prefetch(self, segments: Iterable[Segment]) -> None:
        """Starts the copies of what lies in host memory, so that `get` need not wait for them."""
        for segment in segments:
            self._onload(segment)

    def get(self, segment: Segment) -> Tensor | None:
        """The keys and values of a segment on the device, or None."""
        found = self._near.kept.get(segment)
        if found is None:
            found = self._onload(segment)
        else:
            self._near.kept.move_to_end(segment)
        if found is not None and self._copies is not None and (done := self._done.pop(segment, None)):
            here = torch.cuda.current_stream(self._device)
            here.wait_event(done)
            found.record_stream(here)
        return found

    def add(self, segment: Segment, kept: Tensor) -> None:
        """Keeps a segment's keys and values, at the cost of what was used longest ago."""
        for old, tensor in self._near.add(segment, kept):
            self.cache_stats.evicted_segments += 1
            if self._far.cost(tensor) > self._far.budget:
                self._done.pop(old, None)
                continue
            aside = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._copy(old, tensor, aside)
            for lost, _ in self._far.add(old, aside):
                self._done.pop(lost, None)

    def _onload(self, segment: Segment) -> Tensor | None:
        """A segment from host memory to the device, or None where it is not there."""
        aside = self._far.drop(segment)
        if aside is None:
            return None
        self.cache_stats.host_tokens += aside.shape[2]
        found = self._copy(segment, aside, torch.empty_like(aside, device=self._device))
        self.add(segment, found)
        return found

    def _copy(self, segment: Segment, source: Tensor, target: Tensor) -> Tensor:
        """Copies between the tiers, after all that the denoiser has been asked until now.

        It may still be writing the source, or reading what lay in the target's memory before.
        """
        if self._copies is None:
            return target.copy_(source)
        here = torch.cuda.current_stream(self._device)
        self._copies.wait_event(here.record_event())
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            self._done[segment] = self._copies.record_event()
        for tensor in (source, target):
            if tensor.is_cuda:  # its memory is not given away before the copy is over
                tensor.record_stream(self._copies)
        return target


class _Tier:
    """Tensors under a byte budget, in the order of their last use."""

    def __init__(self, budget: int, pinned: bool = False) -> None:
        self.budget, self.bytes, self._pinned = budget, 0, pinned
        self.kept: OrderedDict[Segment, Tensor] = OrderedDict()

    def cost(self, tensor: Tensor) -> int:
        """Bytes that a tensor takes here: torch rounds pinned blocks up to a power of two."""
        return 1 << (tensor.nbytes - 1).bit_length() if self._pinned else tensor.nbytes

    def add(self, segment: Segment, tensor: Tensor) -> list[tuple[Segment, Tensor]]:
        """Takes a tensor in; returns what had to leave, the tensor itself where it is too large."""
        self.drop(segment)
        self.kept[segment] = tensor
        self.bytes += self.cost(tensor)
        gone = []
        while self.bytes > self.budget:
            gone.append(self.kept.popitem(last=False))
            self.bytes -= self.cost(gone[-1][1])
        return gone

    def drop(self, segment: Segment) -> Tensor | None:
        """Takes a tensor out, where it is here."""
        if (found := self.kept.pop(segment, None)) is not None:
            self.bytes -= self.cost(found)
        return found
