"""Files and folders that are whole or as they were, the locks of those that grow, and the cache folder."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dlm_rag.errors import ConfigError, fold_message
from dlm_rag.files.records import expand

if TYPE_CHECKING:
    from filelock import FileLock


def default_index_folder() -> Path:
    """`$DLM_RAG_CACHE`, or `~/.cache/dlm_rag`."""
    return expand(os.environ.get("DLM_RAG_CACHE") or "~/.cache/dlm_rag", ConfigError)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A scratch file beside `path`, with its suffix, that takes its place at once when all is written.

    Where that fails, or the process is killed, `path` is as it was. A link stays one: what it leads to
    is replaced.
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


def write_whole(path: Path, text: str) -> None:
    """Writes a text file as `new_file` does."""
    with new_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A scratch folder beside `path` that takes its name when all is written.

    Where `path` is there already its files are replaced one by one, each whole; others in it stay.
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


def take_lock(path: Path, what: str) -> "FileLock":
    """The lock at `path`, until `give_back`; raises `ConfigError` where another has it, or none can be."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"{what} is being written by another process") from None
    except (OSError, NotImplementedError) as error:  # a folder of that name; a disk that knows no locks
        reason = getattr(error, "strerror", None) or fold_message(error)
        raise ConfigError(f"{what} cannot be locked by {path} ({reason}): name another") from None
    return lock


def give_back(lock: "FileLock") -> None:
    """Ends what `take_lock` began; a lock that was given back already may be another process's."""
    if lock.is_locked:
        # Before the release: afterwards it might be another process that holds it.
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
