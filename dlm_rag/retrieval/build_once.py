"""Folders that are built once, by one process at a time, and again if they are damaged."""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from filelock import FileLock

from dlm_rag.errors import CorpusError
from dlm_rag.files.checked_json import read_json_or_empty
from dlm_rag.files.digest import digest_file
from dlm_rag.files.paths import get_cache_folder, resolve_path_inside, write_text_atomic

__all__ = ["INDEX_VERSION", "build_once", "get_cache_folder", "make_folder_name"]

log = logging.getLogger(__name__)

# Raise it when what is put into indexes changes: terms, passage texts, vectors.
INDEX_VERSION = 2
DIGESTS_FILE = "whole.json"  # the digest of every file of a folder, by its name


def build_once(folder: Path, build: Callable[[Path], None], resumable: bool = False) -> Path:
    """`folder`, after `build(scratch)` has filled it, unless it is there already and whole.

    The scratch folder gets its final name by one rename. A folder with a changed byte in any of its files
    is reported and built again; files added later are ignored. A second process waits for the first; the
    lock of a process that died is free, and its half-built folder is removed unless `resumable`.
    """
    if folder.is_dir() and not _find_damage(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            damage = _find_damage(folder) if folder.is_dir() else ""
            if damage or not folder.is_dir():
                if damage:
                    log.warning("%s in %s: it is built again", damage, folder)
                scratch = folder.with_name(f"{folder.name}.building")
                if not resumable:
                    shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir(exist_ok=resumable)
                build(scratch)
                write_text_atomic(scratch / DIGESTS_FILE, json.dumps(_digest_files(scratch)))
                shutil.rmtree(folder, ignore_errors=True)
                scratch.rename(folder)
    except OSError as error:
        raise CorpusError(
            f"no index can be written in {folder.parent} ({error.strerror}): set "
            "retrieval.index_dir, or DLM_RAG_CACHE in the environment, to a folder of yours"
        ) from None
    return folder


def _digest_files(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): digest_file(path) for path in files}


def _find_damage(folder: Path) -> str:
    """What is damaged in a folder, as a phrase; empty if nothing is."""
    digests = read_json_or_empty(folder / DIGESTS_FILE)
    try:
        for name, digest in digests.items():
            path = resolve_path_inside(folder, name, DIGESTS_FILE, CorpusError)
            if not path.is_file():  # a pipe would wait for ever
                return f"{name} is not a file any more"
            if digest_file(path) != digest:
                return f"{name} is damaged"
    except OSError as error:
        return f"{Path(error.filename or DIGESTS_FILE).name} cannot be read ({error.strerror})"
    except CorpusError:
        return f"{DIGESTS_FILE} is damaged"
    return "" if digests else f"{DIGESTS_FILE} is damaged"


def load_array(
    path: Path, dtype: type[np.generic], shape: tuple[int | None, ...], mode: Literal["r", "c"] = "r"
) -> np.ndarray:
    """An array of an index, mapped from disk; None in `shape` stands for any length.

    Raises `CorpusError` for what no build has written; a pickle is not opened.
    """
    try:
        # A plain array over the mapped file: a memmap is slow at single numbers.
        found = np.asarray(np.load(path, mmap_mode=mode))
    except Exception:  # its header is parsed as Python, which raises many unrelated types
        found = np.empty(0)
    fits = found.ndim == len(shape) and all(
        wanted in (None, length) for length, wanted in zip(found.shape, shape, strict=True)
    )
    if found.dtype != dtype or not fits:
        raise make_foreign_file_error(path)
    return found


def is_ascending(places: np.ndarray, least: int) -> bool:
    """Whether numbers begin at `least` or above, and none is below the one before it."""
    return bool(places[0] >= least and (places[1:] >= places[:-1]).all())


def make_foreign_file_error(path: Path) -> CorpusError:
    """The error for an index file that no build of this corpus has written."""
    return CorpusError(f"{path} is not of this corpus: remove {path.parent}, and it is built again")


def make_folder_name(*parts: object) -> str:
    """A folder name that tells `parts` apart: readable words, then a digest of all of them."""
    text = "\n".join(map(str, (INDEX_VERSION, *parts)))
    readable = re.sub(r"[^\w.-]+", "-", str(parts[0]))[-40:].strip("-")
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
