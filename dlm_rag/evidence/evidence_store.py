"""The evidence store: keys and values of segments in files, computed once for all processes and runs.

An entry is a safetensors file, named by a digest of all that its numbers depend on, so that a change of one
byte is another entry. It is written under another name and renamed: a kill or a full disk leaves no half
entry, and two writers of one entry write the same. Its checksum is verified at every read. An embedded
database would be one file to copy, but LMDB's tree has no checksums (a flipped bit can end the process),
its size is set ahead, and what leaves it gives no space back.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dlm_rag.files.digest import create_hasher
from dlm_rag.model.packed_batch import Segment

log = logging.getLogger(__name__)

MAX_PENDING_ENTRIES = 64  # that wait to be written; the next one waits for a place
EVICT_TO_SHARE = 0.9  # of the budget, so that not every entry has to look through the folder
STALE_SCRATCH_SECONDS = 3600  # after which an unfinished file was left by a process that was killed
SUFFIX = ".safetensors"


@dataclass
class StoreStats:
    """Counts of one process: bytes, and seconds that a caller or the writing thread spent on them."""

    read_entries: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_entries: int = 0
    written_bytes: int = 0
    damaged_entries: int = 0
    evicted_entries: int = 0


class EvidenceStore:
    """Keys and values (N, 2, n, Hk, D) of segments below `folder`, under a budget in bytes.

    context: what the numbers depend on besides the segment (digest of the weights, precision, kernel).
    Entries that were read or written longest ago leave first. Any number of processes may share a folder.
    """

    def __init__(self, folder: Path, context: str, budget_bytes: float) -> None:
        self.folder, self._context, self._budget = folder, context, budget_bytes
        self.stats = StoreStats()
        self._since_scan: float = budget_bytes  # bytes added since all were counted: the first adds count
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="evidence-store")
        self._places = threading.BoundedSemaphore(MAX_PENDING_ENTRIES)
        self._full = False  # whether the disk refused an entry

    def get(self, segment: Segment) -> Tensor | None:
        """The memory-mapped keys and values of a segment, or None; a damaged entry is removed."""
        path, begin = self._path(segment), time.perf_counter()
        try:
            with safe_open(path, framework="pt") as file:
                kept, stamp = file.get_tensor("keys_values"), (file.metadata() or {}).get("blake3")
            if stamp != _checksum(kept):
                raise SafetensorError("its checksum differs")
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as problem:
            log.warning("%s is damaged (%s); it is computed again", path, problem)
            self.stats.damaged_entries += 1
            with suppress(OSError):
                path.unlink()
            return None
        self.stats.read_entries += 1
        self.stats.read_bytes += kept.nbytes
        self.stats.read_seconds += time.perf_counter() - begin
        return kept

    def __contains__(self, segment: Segment) -> bool:
        return self._path(segment).exists()

    def add(self, segment: Segment, kept: Tensor, ready: torch.cuda.Event | None = None) -> None:
        """Writes an entry in a thread of its own; `kept` lies in host memory and no longer changes.

        ready: the event after which `kept` holds its numbers.
        """
        if not self._full:
            self._places.acquire()
            self._writer.submit(self._write, self._path(segment), kept, ready).add_done_callback(self._done)

    def flush(self) -> None:
        """Returns when all entries that were added are on the disk."""
        self._writer.submit(lambda: None).result()

    def _done(self, written: Future[None]) -> None:
        self._places.release()
        if (error := written.exception()) is not None:
            log.warning("the evidence store %s takes no more entries: %s", self.folder, error)
            self._full = True

    def _path(self, segment: Segment) -> Path:
        key = blake3(f"{self._context} {segment.start} {segment.first} {segment.block}".encode())
        name = key.update(np.array(segment.ids, dtype=np.int64).tobytes()).hexdigest()
        return self.folder / name[:2] / (name + SUFFIX)

    def _write(self, path: Path, kept: Tensor, ready: torch.cuda.Event | None) -> None:
        if path.exists():
            return
        if ready is not None:
            ready.synchronize()
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".part-{os.getpid()}-{path.name}")
        try:
            # Not forced to the disk: after a power cut the checksum tells what is missing.
            save_file({"keys_values": kept.contiguous()}, scratch, {"blake3": _checksum(kept)})
            size = scratch.stat().st_size
            scratch.replace(path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
        self.stats.written_entries += 1
        self.stats.written_bytes += size
        self._since_scan += size
        if self._since_scan > (1 - EVICT_TO_SHARE) * self._budget:
            self._evict()

    def _evict(self) -> None:
        """Removes the entries used longest ago if those of all processes are more than the budget."""
        entries = sorted(self._entries())
        total, self._since_scan = sum(size for _, size, _ in entries), 0.0
        if total <= self._budget:
            return
        for _, size, path in entries:
            if total <= EVICT_TO_SHARE * self._budget:
                break
            with suppress(OSError):  # another process removed it
                path.unlink()
                self.stats.evicted_entries += 1
            total -= size

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Time of the last use, bytes and path of each entry; removes what killed processes left."""
        for path in self.folder.glob("??/*"):
            with suppress(OSError):
                found = path.stat()
                if path.suffix == SUFFIX and not path.name.startswith(".part-"):
                    yield found.st_mtime, found.st_size, path
                elif time.time() - found.st_mtime > STALE_SCRATCH_SECONDS:
                    path.unlink()


def _checksum(kept: Tensor) -> str:
    hasher = create_hasher(kept.nbytes)
    hasher.update(kept.contiguous().view(torch.uint8).numpy().data)
    return hasher.hexdigest()
