"""Whether keys and values of a passage are sooner read from a store than computed, measured once.

That differs by a factor of 100 between machines: a passage of a model of 8 B parameters is 50 MB, which a
large GPU computes sooner than a disk gives it.
"""

import json
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
from dlm_rag.model.kv_format import KVFormat
from dlm_rag.model.packed_batch import Segment

SPEED_FILES = "speed-*.json"  # in the folder of a store, one for each machine, device and model
MEASURED_PASSAGES = 8  # that are encoded in one call, and read at once
WARM_UP_SECONDS = 1.0  # from which on the first call counts, as on a slow machine


@dataclass(frozen=True)
class StoreSpeed:
    """Seconds a passage on a machine: computed, and read from the disk."""

    encode_seconds: float
    read_seconds: float
    machine: str  # in words, for people

    @classmethod
    def load(cls, path: Path) -> "StoreSpeed | None":
        """What `save` has written; None where there is nothing, or something else."""
        try:
            found = validate_json_value(cls, read_json_or_empty(path), str(path), UserError)
        except UserError:
            return None
        return found if min(found.encode_seconds, found.read_seconds) > 0 else None

    def save(self, path: Path) -> None:
        """Raises `OSError`."""
        write_text_atomic(path, json.dumps(asdict(self)) + "\n")

    def describe(self) -> str:
        read, encode = (f"{1000 * seconds:.2g} ms" for seconds in (self.read_seconds, self.encode_seconds))
        return f"reading a passage takes {read} and computing it {encode}"


@torch.inference_mode()
def encode_for_store(denoiser: Denoiser, segments: Sequence[Segment], cache_dtype: str) -> list[Tensor]:
    """The keys and values of segments as the evidence pool keeps them, in host memory."""
    form, encoded = KVFormat(denoiser, cache_dtype), encode_segments(denoiser, segments)
    return [form.pack(kept, each.start).cpu() for each, kept in zip(segments, encoded, strict=True)]


def time_encoding(denoiser: Denoiser, cache_dtype: str) -> tuple[float, dict[Segment, Tensor]]:
    """Seconds a passage on the device; and some random passages with what was encoded of them."""
    rng, shape = random.Random(), denoiser.config
    texts = [rng.choices(range(shape.vocab_size), k=shape.passage_length) for _ in range(MEASURED_PASSAGES)]
    segments, begin = [Segment(tuple(ids), 0) for ids in texts], time.perf_counter()
    kept = encode_for_store(denoiser, segments, cache_dtype)
    seconds = time.perf_counter() - begin
    if seconds < WARM_UP_SECONDS or denoiser.compilations is not None:  # else compiling would count
        begin = time.perf_counter()
        with torch.inference_mode():
            encode_segments(denoiser, segments)
        synchronize(denoiser.device)
        seconds = time.perf_counter() - begin
    return seconds / len(segments), dict(zip(segments, kept, strict=True))


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def drop_cached_pages(path: Path) -> None:
    """Puts a file on its disk and, where the system can, nowhere else. Raises `OSError`."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
