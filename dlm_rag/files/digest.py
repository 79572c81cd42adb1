"""Digests of whole files, computed on all cores and remembered for as long as a file does not change."""

import hashlib
import json
import os
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path

from blake3 import blake3

from dlm_rag.files.jsonl import read_note
from dlm_rag.files.whole import default_index_folder, write_whole
from dlm_rag.progress import progress
from dlm_rag.text import visible

BLOCK = 32 << 20  # bytes that are read at a time
REMEMBERED_FROM = 16 << 20  # bytes; a smaller file is read sooner than what is remembered of it
RACY = 2 * 10**9  # nanoseconds within which a file may change and keep its times (git calls it racy)


def digest_file(path: Path) -> str:
    """BLAKE3 of all bytes of a file, as 64 hex digits; raises `OSError`.

    It is remembered in the cache folder under path, size, times and inode, so that a file that has not
    changed is not read again. A cache that cannot be read or written costs only time.
    """
    with path.open("rb", buffering=0) as file:
        return digest_open(file, path)


def digest_open(file: FileIO, path: Path) -> str:
    """As `digest_file`, of an open file, whatever has taken its name since; no other thread may read it."""
    before = state_of(file.fileno())
    record = default_index_folder() / "digests" / f"{_name(path)}.json"
    large = before["size"] >= REMEMBERED_FROM
    if large and (known := _remembered(record, before)):
        return known
    found = read_digest(file, path)
    after = state_of(file.fileno())
    settled = time.time_ns() - max(after["mtime"], after["ctime"]) > RACY
    if large and settled and after == before:
        with suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            write_whole(record, json.dumps({"digest": found, **after}))
    return found


def read_digest(file: FileIO, path: Path) -> str:
    """The same of what the disk gives now: one that loses a bit changes no time of the file."""
    size = state_of(file.fileno())["size"]
    digest = begin_digest(size)
    block = memoryview(bytearray(min(BLOCK, size + 1)))
    file.seek(0)
    # Read, not mapped: a file that is cut short meanwhile ends the mapping's process.
    with progress(visible(f"reading {path.name}"), size, "bytes") as advance:
        while count := file.readinto(block):
            digest.update(block[:count])
            advance(count)
    return digest.hexdigest()


def begin_digest(size: int) -> blake3:
    """BLAKE3 of so many bytes to come, on threads where they are many.

    A fork lacks the threads that its parent began, and waits for them: small files need none.
    """
    return blake3(max_threads=blake3.AUTO if size >= REMEMBERED_FROM else 1)


def _name(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]


def state_of(file: Path | int) -> dict[str, int]:
    """What changes with the content of a file; of one that is open, whatever has taken its name since."""
    found = os.stat(file)  # noqa: PTH116 - a path cannot be a descriptor
    return {
        "size": found.st_size, "mtime": found.st_mtime_ns, "ctime": found.st_ctime_ns,
        "inode": found.st_ino, "device": found.st_dev,
    }  # fmt: skip


def _remembered(record: Path, state: dict[str, int]) -> str | None:
    """The digest in a record, if it is of a file in this state."""
    found = read_note(record)
    digest = found.pop("digest", None)
    return digest if found == state and isinstance(digest, str) else None
