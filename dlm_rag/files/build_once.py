"""Folders that are built once, by one process at a time, and again if they are damaged."""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from errno import ENOSPC
from pathlib import Path

import numpy as np
from filelock import FileLock

from dlm_rag.errors import CorpusError
from dlm_rag.files.checked_json import read_json_or_empty
from dlm_rag.files.paths import digest_file, resolve_path_inside, write_text_atomic

log = logging.getLogger(__name__)

Shard = tuple[range, Path]  # rows of the corpus, and the folder of what is made of them
INDEX_VERSION = 3  # raise it when what is put into indexes changes: terms, passage texts, vectors
PARTS_FOLDER = "parts"  # what a resumable build keeps until it is finished
DIGESTS_FILE = "whole.json"  # the digest of every file of a folder, by its name


def build_once(folder: Path, build: Callable[[Path], None], resumable: bool = False) -> Path:
    """`folder`, after `build(scratch)` has filled it, unless it is there already and whole.

    The scratch folder gets its final name by one rename. A folder with a changed byte in any of its files
    is reported and built again; files added later are ignored. A second process waits for the first. Of one
    that died the lock is free, and its folder is removed unless `resumable`; at the end, `PARTS_FOLDER` is.
    """
    if _find_damage(folder) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if (damage := _find_damage(folder)) is None:
                return folder
            if folder.is_dir():
                log.warning("%s is damaged in %s: it is built again", damage, folder)
            scratch = folder.with_name(f"{folder.name}.building")
            if not resumable:
                shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(exist_ok=resumable)
            build(scratch)
            files = [path.relative_to(scratch) for path in sorted(scratch.rglob("*")) if path.is_file()]
            kept = [path for path in files if path.parts[0] != PARTS_FOLDER]
            digests = {str(path): digest_file(scratch / path) for path in kept}
            write_text_atomic(scratch / DIGESTS_FILE, json.dumps(digests))
            shutil.rmtree(folder, ignore_errors=True)
            scratch.rename(folder)
            shutil.rmtree(folder / PARTS_FOLDER, ignore_errors=True)
    except OSError as error:
        room = "make room there and give the same command again, or " if error.errno == ENOSPC else ""
        raise CorpusError(
            f"nothing can be written in {folder.parent} ({error.strerror}): {room}set "
            "retrieval.index_dir, or DLM_RAG_CACHE in the environment, to a folder of yours"
        ) from None
    return folder


def build_shard(compute: Callable[[range], Mapping[str, np.ndarray]], shard: Shard) -> int:
    """Saves the arrays of a shard, unless its folder is there and whole; gives the number of its rows."""
    rows, folder = shard

    def build(scratch: Path) -> None:
        for name, array in compute(rows).items():
            save_array(scratch / f"{name}.npy", array)

    build_once(folder, build)
    return len(rows)


def save_array(path: Path, array: np.ndarray) -> None:
    """As `np.save` of an array in C order, whose error does not say that the disk is full."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(np.ascontiguousarray(array).view(np.uint8).data)


def _find_damage(folder: Path) -> str | None:
    """The file of a folder that is damaged, or None."""
    digests = read_json_or_empty(folder / DIGESTS_FILE)
    for name, digest in digests.items():
        try:
            path = resolve_path_inside(folder, name, DIGESTS_FILE, CorpusError)
            if not path.is_file() or digest_file(path) != digest:  # a pipe would wait for ever
                return name
        except (OSError, CorpusError):
            return name
    return None if digests else DIGESTS_FILE


def make_folder_name(*parts: object) -> str:
    """A folder name that tells `parts` apart: readable words, then a digest of all of them."""
    text = "\n".join(map(str, (INDEX_VERSION, *parts)))
    readable = re.sub(r"[^\w.-]+", "-", str(parts[0]))[-40:].strip("-")
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
