"""Folders that are built once: complete or not there, whoever builds them and whenever they die."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from dlm_rag.errors import CorpusError
from dlm_rag.records import expand

# Raise it when what is put into indexes changes: terms, passage texts, vectors.
INDEX_VERSION = 1


def build_once(folder: Path, build: Callable[[Path], None], goes_on: bool = False) -> Path:
    """`folder`, after `build(scratch)` has filled it, unless it is there already.

    The scratch folder takes its final name in one rename, so a folder that exists is whole. A lock
    lets a second process wait for the first instead of building the same; the lock of a process
    that died is free, and what it left half-built is removed, unless `build` goes on with it.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                scratch = folder.with_name(f"{folder.name}.building")
                if not goes_on:
                    shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir(exist_ok=goes_on)
                build(scratch)
                scratch.rename(folder)
    except OSError as error:
        raise CorpusError(
            f"no index can be written in {folder.parent} ({error.strerror}): set "
            "retrieval.index_folder to a folder of yours"
        ) from None
    return folder


def default_index_folder() -> Path:
    """`$DLM_RAG_CACHE`, or `~/.cache/dlm_rag`."""
    return expand(os.environ.get("DLM_RAG_CACHE") or "~/.cache/dlm_rag", CorpusError)


def fingerprint_file(path: Path) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits; about a second for every gigabyte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def slug(*parts: object) -> str:
    """A folder name that tells `parts` apart: readable words, then a digest of all of them."""
    text = "\n".join(map(str, (INDEX_VERSION, *parts)))
    readable = re.sub(r"[^\w.-]+", "-", str(parts[0]))[-40:].strip("-")
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
