"""The evidence store: keys and values of segments in files, computed once for all processes and runs.

An entry is a safetensors file, named by a digest of all that its numbers depend on, so that a change of one
byte is another entry. Its checksum covers that name, its dtype and its shape, and is verified at every
read. It is written under another name and renamed: a kill or a full disk leaves no half entry, and two
writers of one entry write the same. It is read, not mapped: a truncated file would end such a process.
"""

import json
import logging
import os
import secrets
import shutil
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dlm_rag.config import EngineConfig
from dlm_rag.errors import ConfigError
from dlm_rag.files.paths import create_hasher, expand_path, make_folder, read_regular_file
from dlm_rag.model.checkpoint import DLM_RAG_FIELDS
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.layers import is_autocast
from dlm_rag.model.packed_batch import Segment
from dlm_rag.progress import format_bytes

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 2**30  # that wait to be written
MAX_HEADER_BYTES = 2**12  # of an entry, besides its numbers
READER_THREADS = 8
MIN_FREE_BYTES = 2 * 2**30  # of the disk, which are left to others
KEYS_VALUES_VERSION = 2  # raise it when the same weights compute others, or keep them otherwise


class EvidenceStore:
    """Keys and values of segments below `folder`; it takes no more once its disk is nearly full.

    context: what the numbers depend on besides the segment (`describe_context`). token: what is kept of
    one token, (N, 2, 1, Hk, D). Any number of processes may share a folder.
    """

    def __init__(self, folder: Path, context: str, token: Tensor) -> None:
        self.folder = folder
        self._context, self._token = blake3(context.encode()).hexdigest(), token
        self.damaged_entries = 0  # that this process has met
        self.is_full = False  # whether the disk has no room for an entry
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="evidence-store")
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="evidence-store-reader")
        self._writing: deque[tuple[int, Future[None]]] = deque()  # bytes that wait to be written

    def get_all(self, segments: Sequence[Segment]) -> list[Tensor | None]:
        """Returns what `get` does of each of these, which are read in threads."""
        return [*self._readers.map(self.get, segments)]

    def add(self, segment: Segment, kept: Tensor, ready: torch.cuda.Event | None = None) -> None:
        """Writes an entry in a thread of its own; `kept` lies in host memory and no longer changes.

        ready: the event after which `kept` holds its numbers.
        """
        if self.is_full:
            return
        writing, most = self._writing, MAX_PENDING_BYTES - kept.nbytes
        while writing and (writing[0][1].done() or sum(size for size, _ in writing) > most):
            writing.popleft()[1].result()
        writing.append((kept.nbytes, self._writer.submit(self._write, self.path(segment), kept, ready)))

    def flush(self) -> None:
        """Returns when all entries that were added are on the disk."""
        self._writer.submit(lambda: None).result()

    def path(self, segment: Segment) -> Path:
        """Returns the file of a segment. Tokenizer and layout show in its ids, its start and its blocks."""
        key = blake3(f"{self._context} {segment.start} {segment.first} {segment.block}".encode())
        name = key.update(np.array(segment.ids, dtype=np.int64).tobytes()).hexdigest()
        return self.folder / name[:2] / f"{name}.safetensors"

    def describe(self) -> str:
        """Says in words for a person that it is used, and what is wrong with it."""
        damaged = f", {self.damaged_entries:,} damaged" if self.damaged_entries else ""
        return f"engine.store is read{damaged}{', the disk takes no more' if self.is_full else ''}"

    def get(self, segment: Segment) -> Tensor | None:
        """Returns a segment's tensor in host memory; None where it is missing or damaged (then removed)."""
        path, shape = self.path(segment), [*self._token.shape]
        shape[2] = len(segment.ids)
        try:
            found = load(read_regular_file(path, self._token.nbytes * shape[2] + MAX_HEADER_BYTES))
            kept: Tensor = found["keys_values"]
            if kept.dtype != self._token.dtype or [*kept.shape] != shape:
                raise SafetensorError(f"it holds {kept.dtype} {[*kept.shape]}")
            if found["blake3"].tolist() != _checksum(path, kept):
                raise SafetensorError("its checksum differs")
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None
        except (OSError, SafetensorError, LookupError, ValueError, TypeError) as problem:
            log.warning("%s is damaged (%s); it is computed again", path, problem)
            self.damaged_entries += 1
            with suppress(OSError):
                path.unlink()
            return None
        return kept

    def _write(self, path: Path, kept: Tensor, ready: torch.cuda.Event | None) -> None:
        # Processes of other machines have the same numbers, and a process may have two stores.
        scratch = path.with_name(f".part-{secrets.randbits(64)}-{path.name}")
        try:
            if path.exists():
                return
            if shutil.disk_usage(self.folder).free < MIN_FREE_BYTES + kept.nbytes:
                raise OSError(f"its disk has less than {format_bytes(MIN_FREE_BYTES)} left")
            if ready is not None:
                ready.synchronize()
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = kept.contiguous()
            checksum = torch.tensor(_checksum(path, kept), dtype=torch.uint8)
            # Not forced to the disk: after a power cut the checksum tells what is missing.
            scratch.write_bytes(save({"keys_values": kept, "blake3": checksum}))
            scratch.replace(path)
        except (FileExistsError, NotADirectoryError):
            log.warning("%s is no folder: the entries of its name are not kept", path.parent)
        except OSError as error:
            log.warning("the evidence store %s takes no more entries: %s", self.folder, error)
            self.is_full = True
            with suppress(OSError):
                scratch.unlink(missing_ok=True)


def _checksum(path: Path, kept: Tensor) -> list[int]:
    hasher = create_hasher(kept.nbytes)
    hasher.update(f"{path.name} {kept.dtype} {[*kept.shape]}".encode())
    hasher.update(kept.view(torch.uint8).numpy().data)
    return [*hasher.digest()]


def check_store(engine: EngineConfig) -> Path | None:
    """Returns the store's folder, None without a store; raises `ConfigError` where it cannot be written."""
    if engine.store is None:
        return None
    folder = make_folder(expand_path(engine.store, ConfigError, "engine.store"), "engine.store=")
    probe = folder / f".part-{os.getpid()}"
    try:
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may have removed it
    except OSError as error:
        raise ConfigError(f"engine.store={folder} cannot be written: {error.strerror}") from None
    return folder


def describe_context(denoiser: Denoiser, cache_dtype: str) -> str:
    """Says what keys and values depend on besides the segment; raises `ConfigError` for changed weights.

    What a config says of decoding alone does not count.
    """
    left_out = {*DLM_RAG_FIELDS.values(), "excluded_token_ids", "mask_token_id"}
    left_out |= {"decode_settings", "retrieval_settings"}
    shape = {name: value for name, value in asdict(denoiser.config).items() if name not in left_out}
    how = {
        "weights": denoiser.weights_fingerprint, "dtype": str(denoiser.dtype), "cache_dtype": cache_dtype,
        "compute_dtype": str(denoiser.compute_dtype), "autocast": is_autocast(denoiser.embed_tokens.weight),
        "compiled": denoiser.compilations is not None, "kernel": denoiser.backend,
        "device": denoiser.device.type, "quantize": denoiser.quantize, "version": KEYS_VALUES_VERSION,
    }  # fmt: skip
    return json.dumps(shape | how, sort_keys=True)


def open_evidence_store(engine: EngineConfig, denoiser: Denoiser, token: Tensor) -> EvidenceStore | None:
    """Returns the store that the settings name, if any; token: as of `EvidenceStore`.

    Raises `ConfigError` for weights that are not those of their checkpoint.
    """
    if (folder := check_store(engine)) is None:
        return None
    return EvidenceStore(folder, describe_context(denoiser, engine.cache_dtype), token)
