"""Resumable journals: JSON lines that one process appends to, whole whenever that process is killed."""

import json
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dlm_rag.config import list_setting_fields
from dlm_rag.errors import ConfigError, RunError, UserError, summarize_error
from dlm_rag.files.checked_json import iter_lines, parse_json_object
from dlm_rag.files.paths import open_atomic_file


class Journal:
    """JSON lines that this process alone appends to; the first append creates the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._size = 0

    def open_existing(self) -> None:
        """Opens the file if it exists; from now on changes by others are noticed."""
        if self._path.is_file():
            self._open()

    def append(self, *records: Mapping[str, Any]) -> None:
        """Appends lines, unbuffered. Raises `OSError`, and `RunError` if another process changed it."""
        data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
        file = self._file or self._open()
        now = self._path.stat() if self._path.exists() else None
        if now is None or now.st_size != self._size or not os.path.samestat(now, os.fstat(file.fileno())):
            raise RunError(
                f"{self._path} was removed, replaced or cut short by another process while it was written: "
                "it is left as it is, and the same command adds what is missing"
            )
        while data:
            count = file.write(data)
            self._size, data = self._size + count, data[count:]

    def _open(self) -> FileIO:
        self._file = FileIO(self._path, "ab")
        self._size = os.fstat(self._file.fileno()).st_size
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_json_lines(path: Path, error: type[UserError]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a journal, each after its place, without a last line that a kill cut short; none where
    there is no file. Raises `error` naming file and line."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for place, _, line in iter_lines(file, str(path), error, blank=True):
            try:
                record = parse_json_object(line, place, error)
            except error:
                if line.endswith(b"\n"):
                    raise
                return  # no beginning of an object is an object
            yield place, record


def repair_last_line(path: Path) -> None:
    """Removes a last line that a kill cut short; adds a line break that is missing alone."""
    with path.open("rb+") as file:
        (last,) = deque(file, maxlen=1) or [b"\n"]
        if last.endswith(b"\n"):
            return
        try:
            json.loads(last)
            file.write(b"\n")
        except ValueError:
            file.truncate(file.tell() - len(last))


def drop_lines(path: Path, ids: Collection[str]) -> None:
    """Writes a journal again, atomically, without the lines that have these ids."""
    with open_atomic_file(path) as scratch, path.open("rb") as old, scratch.open("wb") as new:
        new.writelines(line for line in old if json.loads(line).get("id") not in ids)


def check_same_settings(then: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Raises `ConfigError` for the first setting in which a run differs from the one that began a journal.

    what: the journal and its contents (`out=a.jsonl holds answers`). A newer setting had its default there.
    """
    fields = list_setting_fields()
    for key in sorted({*then, *now}):
        newer = key not in then and key in fields
        before = fields[key].default if newer else then.get(key)
        if before != (given := now.get(key)):
            raise ConfigError(f"{what} with {key}={before}, this run has {given}: choose another --out")


@contextmanager
def explain_write_errors(out: Path) -> Iterator[None]:
    """Raises `RunError` for an `OSError`, as of a full disk, with what to do about it."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"out={out} cannot be written any more ({error.strerror or error}); what is there is kept: "
            "make room, and the same command goes on from there"
        ) from error


@contextmanager
def hold_file_lock(path: Path, what: str) -> Iterator[None]:
    """Holds the lock at `path`; raises `ConfigError` if another process does, or the disk has no locks."""
    lock = FileLock(path, timeout=0)
    try:
        if path.is_fifo():  # which would be locked, and removed at the end
            raise OSError("it is no regular file")
        lock.acquire()
    except Timeout:
        raise ConfigError(f"{what} is being written by another process") from None
    except (OSError, NotImplementedError) as error:  # a folder of that name; a disk that knows no locks
        reason = getattr(error, "strerror", None) or summarize_error(error)
        raise ConfigError(f"{what} cannot be locked by {path} ({reason}): name another") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the release: afterwards another process may hold it
        lock.release()
