"""Append-only files of JSON lines that survive a kill, and the lock of the one process that writes them."""

import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.errors import ConfigError, RunError, UserError, summarize_error
from dlm_rag.files.checked_json import parse_json_object
from dlm_rag.files.paths import open_atomic_file

if TYPE_CHECKING:
    from filelock import FileLock

log = logging.getLogger(__name__)


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


class AppendOnlyFile:
    """A file that this process alone appends to; it is created by the first append.

    Before each append it is checked: a file that was removed or renamed is restored, one that was
    replaced or cut short is left as it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._size = 0

    def open_existing(self) -> None:
        """Opens the file if it exists; from now on changes by others are noticed."""
        if self._path.is_file():
            self._open()

    def append(self, data: bytes) -> None:
        """Appends, unbuffered. Raises `OSError`, and `RunError` if another process changed the file."""
        file = self._file or self._open()
        try:
            now = self._path.stat()
        except FileNotFoundError:
            file = self._put_back(file)
        else:
            if now.st_size != self._size or not os.path.samestat(now, os.fstat(file.fileno())):
                raise RunError(
                    f"{self._path} was cut short or replaced by another process while it was written: it "
                    "is left as it is, and the same command adds what is missing"
                )
        while data:
            count = file.write(data)
            self._size, data = self._size + count, data[count:]

    def _open(self) -> FileIO:
        self._file = FileIO(self._path, "ab+")
        self._size = os.fstat(self._file.fileno()).st_size
        return self._file

    def _put_back(self, file: FileIO) -> FileIO:
        log.warning("%s was removed or renamed while it was written: it is restored", self._path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file.seek(0)
        with open_atomic_file(self._path) as scratch, scratch.open("wb") as copy:
            shutil.copyfileobj(file, copy)
        file.close()
        return self._open()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def acquire_file_lock(path: Path, what: str) -> "FileLock":
    """The lock at `path`, until `release_file_lock`; raises `ConfigError` if another process has it, or
    the file system has no locks.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"{what} is being written by another process") from None
    except (OSError, NotImplementedError) as error:  # a folder of that name; a disk that knows no locks
        reason = getattr(error, "strerror", None) or summarize_error(error)
        raise ConfigError(f"{what} cannot be locked by {path} ({reason}): name another") from None
    return lock


def release_file_lock(lock: "FileLock") -> None:
    """Ends what `acquire_file_lock` began; a lock that was given back already may be another process's."""
    if lock.is_locked:
        # Before the release: afterwards it might be another process that holds it.
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def read_json_lines(path: Path, error: type[UserError]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines and the place of each, without what a kill has left of the last.

    Raises `error` naming file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            try:
                record = parse_json_object(line, place, error)
            except error:
                if line.endswith(b"\n"):
                    raise
                return  # no beginning of an object is an object
            yield place, record


def append_json_lines(file: AppendOnlyFile, records: Iterable[Mapping[str, Any]]) -> None:
    """Adds JSON lines to a file, out at once."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    file.append("".join(lines).encode())
