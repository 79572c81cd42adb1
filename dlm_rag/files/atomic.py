"""Atomic writes of files and folders, append-only files, locks, and the cache folder."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from dlm_rag.errors import ConfigError, RunError, summarize_error
from dlm_rag.files.record_readers import expand_path

if TYPE_CHECKING:
    from filelock import FileLock

log = logging.getLogger(__name__)


def get_cache_folder() -> Path:
    """`$DLM_RAG_CACHE`, or `~/.cache/dlm_rag`."""
    return expand_path(os.environ.get("DLM_RAG_CACHE") or "~/.cache/dlm_rag", ConfigError, "DLM_RAG_CACHE")


@contextmanager
def open_atomic_file(path: Path) -> Iterator[Path]:
    """A scratch file in the folder of `path`, with its suffix, that replaces it when all is written.

    If that fails, or the process is killed, `path` is as it was. The target of a link is replaced.
    """
    path = Path(os.path.realpath(path))  # of a link to itself that link, which pathlib raises for
    scratch = path.with_name(f".part-{os.getpid()}{path.suffix}")
    try:
        yield scratch
        with scratch.open("rb") as file:
            os.fsync(file.fileno())  # else the name could outlive a power cut and the content not
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def write_text_atomic(path: Path, text: str) -> None:
    """Writes a text file as `open_atomic_file` does."""
    with open_atomic_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextmanager
def open_atomic_folder(path: Path) -> Iterator[Path]:
    """A scratch folder that is renamed to `path` when all is written.

    If `path` exists its files are replaced one by one; others in it stay.
    """
    scratch = path.with_name(f"{path.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    yield scratch
    if not path.exists():
        scratch.rename(path)
        return
    for file in scratch.iterdir():
        file.replace(path / file.name)
    scratch.rmdir()


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
