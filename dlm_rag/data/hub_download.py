"""Files of a hub repository, fetched by huggingface_hub; their digests are checked."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import NamedTuple

from dlm_rag.data.hub_datasets import HubFile
from dlm_rag.errors import ConfigError, UserError, summarize_error
from dlm_rag.text import replace_control_chars

HUB_ANSWER_SECONDS = 10.0
_STATE = re.compile(r"[0-9a-f]{40} ([0-9a-f]{40}|[0-9a-f]{64}) [0-9]{1,18}")  # commit, digest, bytes


class HubState(NamedTuple):
    """What the hub says of a file: commit, bytes, digest (SHA-256, or git's); is_here: in the folder."""

    revision: str
    size: int
    digest: str
    is_here: bool = False


def digest_like(path: Path, digest: str) -> str:
    """Returns the digest of a file, of the kind that `digest` is: git's of 40 digits, else SHA-256."""
    found = hashlib.sha256()
    if len(digest) == 40:
        found = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: found).hexdigest()


def find_file(file: HubFile, folder: Path) -> HubState:
    """Returns what the hub says of a file, and whether it is in the folder already; offline that is enough.

    Raises `ConfigError`, also for another file of that name.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    target = folder / file.path
    check_plain_files(folder, target)
    if constants.HF_HUB_OFFLINE and target.exists():
        return HubState("offline", target.stat().st_size, "", True)
    with explain_hub_errors(file):
        url = hf_hub_url(file.repository, file.path, repo_type="dataset")
        found = get_hf_file_metadata(url, timeout=HUB_ANSWER_SECONDS)
        if not _STATE.fullmatch(f"{found.commit_hash} {found.etag} {found.size}"):
            raise ConfigError(f"the hub does not say commit, digest and size of {file.path}")
    state = HubState(str(found.commit_hash), found.size or 0, str(found.etag), target.exists())
    if state.is_here and digest_like(target, state.digest) != state.digest:
        raise ConfigError(
            f"{target} is another file than the hub has at revision {state.revision[:12]}: keep yours, or "
            "delete it to fetch that"
        )
    return state


def fetch_file(file: HubFile, state: HubState, folder: Path) -> None:
    """Fetches a file into a folder, with a bar, and checks its digest. Raises `ConfigError`."""
    from huggingface_hub import hf_hub_download

    with explain_hub_errors(file):
        hf_hub_download(
            file.repository, file.path, repo_type="dataset", revision=state.revision, local_dir=folder
        )
        if digest_like(folder / file.path, state.digest) != state.digest:
            (folder / file.path).unlink()
            raise ConfigError(
                f"{file.path} of {file.repository} came with other bytes than the hub says: give the same "
                "command again"
            )


def check_plain_files(folder: Path, target: Path) -> None:
    """Raises `ConfigError` where a link, a pipe or a device stands where a download writes."""
    notes = folder / ".cache"  # of huggingface_hub
    for path in (target, notes, *notes.rglob("*")):
        plain = path.is_file() or (path.is_dir() and path != target) or not path.exists()
        if path.is_symlink() or not plain:
            raise ConfigError(f"{path} is no regular file: delete it, or name another --folder")


@contextmanager
def explain_hub_errors(file: HubFile) -> Iterator[None]:
    """Raises `ConfigError`, in a sentence, for whatever the hub or its client says, and for a full disk."""
    from huggingface_hub import constants, errors

    where = f"{constants.ENDPOINT}/datasets/{file.repository}"
    try:
        yield
        return
    except UserError:
        raise
    except errors.GatedRepoError:
        said = f"{where} is gated: ask for access there, then `hf auth login`"
    except errors.RepositoryNotFoundError:
        said = f"{where} is not there, or it is private (`hf auth login`)"
    except errors.EntryNotFoundError:
        said = f"{where} has no {file.path}"
    except errors.OfflineModeIsEnabled:
        said = f"HF_HUB_OFFLINE is set, and {file.path} of {file.repository} is not here"
    except Exception as error:  # the hub client raises a dozen unrelated types
        said = replace_control_chars(f"{where}: {summarize_error(error)}; give the same command again")
        if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT):
            said = "the disk is full: make room, and give the same command again"
    raise ConfigError(said) from None
