"""Paths as people name them, files that are written whole or not at all, and their digests."""

import errno
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from io import FileIO
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from blake3 import blake3

from dlm_rag.errors import ConfigError, UserError
from dlm_rag.files.checked_json import read_json_or_empty
from dlm_rag.progress import report_progress

READ_BLOCK_BYTES = 32 << 20  # bytes that are read at a time
MIN_CACHED_FILE_BYTES = 16 << 20  # bytes; a smaller file is read sooner than what is remembered of it
RACY_WINDOW_NS = 2 * 10**9  # nanoseconds within which a file may change and keep its times


def resolve_path_inside(folder: Path, name: Any, place: str, error: type[UserError]) -> Path:
    """The file in `folder` that a file names, as in `weights.safetensors` or `1_Pooling/config.json`.

    Raises `error`, its message beginning with `place`, for any name that leads elsewhere: an absolute path,
    `..`, a link out of the folder, what is no text. The file itself may be a link, as in the hub's cache.
    """
    plain = isinstance(name, str) and "\0" not in name and name == os.path.normpath(name)
    if plain and name.split("/")[0] not in ("", ".", ".."):
        path = folder / name
        if Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(folder)):
            return path
    raise error(f"{place} names {name!r:.60}, which is not the name of a file in {folder}")


def find_companion_folder(name: str) -> Path:
    """configs, examples or profiling: a wheel has them inside the package, a checkout beside it."""
    package = Path(__file__).resolve().parents[1]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def get_cache_folder() -> Path:
    """`$DLM_RAG_CACHE`, or `~/.cache/dlm_rag`."""
    return expand_path(os.environ.get("DLM_RAG_CACHE") or "~/.cache/dlm_rag", ConfigError, "DLM_RAG_CACHE")


@contextmanager
def open_atomic_file(path: Path) -> Iterator[Path]:
    """A scratch file in the folder of `path`, with its suffix, that replaces it when all is written. If
    that fails, or the process is killed, `path` is as it was. The target of a link is replaced."""
    path = Path(os.path.realpath(path))  # of a link to itself that link, which pathlib raises for
    scratch = path.with_name(f".part-{os.getpid()}{path.suffix}")
    scratch.unlink(missing_ok=True)  # a link there would be written through, a pipe waited for
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
    """A scratch folder that is renamed to `path` when all is written; where `path` exists, its files are
    replaced one by one, and others in it stay."""
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


def make_folder(path: Path, key: str = "") -> Path:
    """Makes a folder; raises `ConfigError` where it cannot be made. key: what names it, as in `out=`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key}{path} cannot be a folder: {error.strerror}") from None
    return path


def expand_path(path: str | Path, error: type[UserError], key: str = "") -> Path:
    """The path with `~` as the home folder; raises `error`, where `key` names it, if it cannot be one."""
    name = f"{key}{'=' * bool(key)}'{str(path)[:60]}'"
    if path == "":  # pathlib would read the working folder
        raise error("the name of a file is empty: is a variable of the shell unset?")
    try:
        found = Path(path).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            found.stat()
    except RuntimeError:
        raise error(f"{name}: no such home folder; write the whole path") from None
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or "no path"
        raise error(f"{name} cannot be read ({reason})") from None
    return found


def read_regular_file(path: Path, most: int) -> bytes:
    """What a regular file holds; raises `OSError` for anything else, or for more than `most` bytes."""
    with open(path, "rb", 0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")  # a pipe is not waited for
        if os.fstat(file.fileno()).st_size > most or len(data := file.read(most + 1) or b"") > most:
            raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes")
        return data


def resolve_regular_file(path: str | Path, what: str, error: type[UserError]) -> Path:
    """The path of a regular file; raises `error` for anything else."""
    found = expand_path(path, error)
    if not found.exists():
        raise error(f"{what} '{path}' was not found")
    if not found.is_file():
        kind = "a folder" if found.is_dir() else "a pipe or a device, and it is read more than once"
        raise error(f"{what} '{path}' is {kind}: name a file")
    return found


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
    if before[0] < MIN_CACHED_FILE_BYTES:
        return compute_file_digest(file, path)
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    record = get_cache_folder() / "digests" / f"{name}.json"
    known = read_json_or_empty(record)
    if known.get("state") == before and isinstance(digest := known.get("digest"), str):
        return digest
    found = compute_file_digest(file, path)
    _, *times = after = read_file_state(file.fileno())
    if after == before and time.time_ns() - max(times[:2]) > RACY_WINDOW_NS:
        with suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(record, json.dumps({"digest": found, "state": after}))
    return found


def compute_file_digest(file: FileIO, path: Path, draws: bool = True) -> str:
    """The digest of what is on the disk now: bits that flip change no time of a file; draws: a bar."""
    size = os.fstat(file.fileno()).st_size
    digest = create_hasher(size)
    block = memoryview(bytearray(min(READ_BLOCK_BYTES, size + 1)))
    file.seek(0)
    # Read, not mapped: a file that is cut short meanwhile ends the mapping's process.
    said = f"reading {path.name}"
    with report_progress(said, size, "bytes") if draws else nullcontext(lambda count: None) as advance:
        while count := file.readinto(block):
            digest.update(block[:count])
            advance(count)
    return digest.hexdigest()


def create_hasher(size: int) -> blake3:
    """BLAKE3 of so many bytes to come, on threads if they are many."""
    # A fork has not its parent's threads, and would wait for them: small files use none, nor do workers.
    uses_threads = size >= MIN_CACHED_FILE_BYTES and parent_process() is None
    return blake3(max_threads=blake3.AUTO if uses_threads else 1)


def read_file_state(file: Path | int) -> list[int]:
    """Size, times and identity of a file, or of an open one, whatever has taken its name since."""
    found = os.stat(file)  # noqa: PTH116 - a path cannot be a descriptor
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
