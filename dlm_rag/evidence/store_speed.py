"""Whether keys and values of a passage are sooner read from a store than computed, measured once.

That differs by a factor of 100 between machines: a passage of a model of 8 B parameters is 50 MB, which a
large GPU computes sooner than a disk gives it.
"""

import json
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from dlm_rag.errors import UserError
from dlm_rag.evidence.encode_segments import encode_segments
from dlm_rag.files.checked_json import read_json_or_empty, validate_json_value
from dlm_rag.files.paths import write_text_atomic
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.packed_batch import Segment

MEASURED_PASSAGES = 8  # that are encoded in one call, and read at once
SPEED_FILES = "speed-*.json"  # in the folder of a store, one for each machine, device and model
WARM_UP_SECONDS = 1.0  # from which on the first call counts, as on a slow machine


@dataclass(frozen=True)
class StoreSpeed:
    """Seconds a passage on a machine: computed, and read from the disk."""

    encode_seconds: float
    read_seconds: float
    machine: str = ""  # in words, for people

    def __post_init__(self) -> None:
        if not all(0 < seconds < math.inf for seconds in (self.encode_seconds, self.read_seconds)):
            raise ValueError("seconds must be above 0")

    @classmethod
    def load(cls, path: Path) -> "StoreSpeed | None":
        """What `save` has written; None where there is nothing, or something else."""
        try:
            return validate_json_value(cls, read_json_or_empty(path), str(path), UserError)
        except UserError:
            return None

    def save(self, path: Path) -> None:
        """Raises `OSError`."""
        write_text_atomic(path, json.dumps(asdict(self)) + "\n")

    @property
    def reading_is_faster(self) -> bool:
        return self.read_seconds < self.encode_seconds

    def describe(self) -> str:
        """Both times, in words for a person."""
        read, encode = (f"{1000 * seconds:.2g} ms" for seconds in (self.read_seconds, self.encode_seconds))
        return f"reading a passage takes {read} and computing it {encode}"


@torch.inference_mode()
def encode_for_store(denoiser: Denoiser, segments: Sequence[Segment], cache_dtype: str) -> list[Tensor]:
    """The keys and values of segments as the evidence pool keeps them, in host memory."""

    def pack_for_cache(kept: Tensor, segment: Segment) -> Tensor:
        return kept  # as `cache_dtype` says

    encoded = zip(segments, encode_segments(denoiser, segments), strict=True)
    return [pack_for_cache(kept, segment).cpu() for segment, kept in encoded]


def time_encoding(denoiser: Denoiser, cache_dtype: str) -> tuple[float, dict[Segment, Tensor]]:
    """Seconds a passage, on the device alone; and some random passages with what was encoded of them."""
    length, rng = denoiser.config.passage_length, random.Random()
    vocabulary = denoiser.config.vocab_size
    segments = [
        Segment(tuple(rng.choices(range(vocabulary), k=length)), 0) for _ in range(MEASURED_PASSAGES)
    ]
    begin = time.perf_counter()
    kept = encode_for_store(denoiser, segments, cache_dtype)  # copies to the host, which waits for it
    seconds = time.perf_counter() - begin
    if seconds < WARM_UP_SECONDS:
        with torch.inference_mode():
            begin = time.perf_counter()
            encode_segments(denoiser, segments)
            synchronize(denoiser.device)
            seconds = time.perf_counter() - begin
    return seconds / len(segments), dict(zip(segments, kept, strict=True))


def synchronize(device: torch.device) -> None:
    """Waits for all that the device was asked."""
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).synchronize()


def drop_cached_pages(path: Path) -> None:
    """Puts a file on its disk and, where the system can, nowhere else. Raises `OSError`."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
