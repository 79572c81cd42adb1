"""Digests of whole files, computed on all cores and remembered for as long as a file does not change."""

import hashlib
import json
import os
import time
from contextlib import nullcontext, suppress
from io import FileIO
from multiprocessing import parent_process
from pathlib import Path

from blake3 import blake3

from dlm_rag.files.checked_json import read_json_or_empty
from dlm_rag.files.paths import get_cache_folder, write_text_atomic
from dlm_rag.progress import report_progress
from dlm_rag.text import replace_control_chars

READ_BLOCK_BYTES = 32 << 20  # bytes that are read at a time
MIN_CACHED_FILE_BYTES = 16 << 20  # bytes; a smaller file is read sooner than what is remembered of it
# nanoseconds within which a file may change and keep its times (git calls it racy)
RACY_WINDOW_NS = 2 * 10**9


def digest_file(path: Path) -> str:
    """BLAKE3 of all bytes of a file, as 64 hex digits; raises `OSError`.

    It is remembered in the cache folder under path, size, times and inode, so that a file that has not
    changed is not read again. A cache that cannot be read or written costs only time.
    """
    with path.open("rb", buffering=0) as file:
        return digest_open_file(file, path)


def digest_open_file(file: FileIO, path: Path) -> str:
    """As `digest_file`, of an open file, whatever has taken its name since; no other thread may read it."""
    before = read_file_state(file.fileno())
    if before["size"] < MIN_CACHED_FILE_BYTES:
        return compute_file_digest(file, path)
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    record = get_cache_folder() / "digests" / f"{name}.json"
    known = read_json_or_empty(record)
    digest = known.pop("digest", None)
    if known == before and isinstance(digest, str):
        return digest
    found = compute_file_digest(file, path)
    after = read_file_state(file.fileno())
    settled = time.time_ns() - max(after["mtime"], after["ctime"]) > RACY_WINDOW_NS
    if settled and after == before:
        with suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(record, json.dumps({"digest": found, **after}))
    return found


def compute_file_digest(file: FileIO, path: Path, draws: bool = True) -> str:
    """The same of what the disk gives now: one that loses a bit changes no time of the file.

    draws: a progress bar.
    """
    size = read_file_state(file.fileno())["size"]
    digest = create_hasher(size)
    block = memoryview(bytearray(min(READ_BLOCK_BYTES, size + 1)))
    file.seek(0)
    # Read, not mapped: a file that is cut short meanwhile ends the mapping's process.
    words = replace_control_chars(f"reading {path.name}")
    with report_progress(words, size, "bytes") if draws else nullcontext(lambda count: None) as advance:
        while count := file.readinto(block):
            digest.update(block[:count])
            advance(count)
    return digest.hexdigest()


def create_hasher(size: int) -> blake3:
    """BLAKE3 of so many bytes to come, on threads if they are many.

    A fork has not its parent's threads, and would wait for them: small files use none, nor do workers.
    """
    uses_threads = size >= MIN_CACHED_FILE_BYTES and parent_process() is None
    return blake3(max_threads=blake3.AUTO if uses_threads else 1)


def read_file_state(file: Path | int) -> dict[str, int]:
    """What changes with the content of a file; of one that is open, whatever has taken its name since."""
    found = os.stat(file)  # noqa: PTH116 - a path cannot be a descriptor
    return {
        "size": found.st_size, "mtime": found.st_mtime_ns, "ctime": found.st_ctime_ns,
        "inode": found.st_ino, "device": found.st_dev,
    }  # fmt: skip
