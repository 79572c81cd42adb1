"""One file of a hub repository, fetched whole or not at all, and gone on with where it was stopped."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dlm_rag.data.hub_datasets import HubFile, digest_like
from dlm_rag.errors import ConfigError, UserError, suggest_nearest, summarize_error

HUB_ANSWER_SECONDS = 10.0


class HubState(NamedTuple):
    """What the hub says of a file: commit, bytes, digest (SHA-256, or git's), licence of the repository.

    cached: the file in the hub's cache on this machine.
    """

    revision: str
    size: int
    digest: str
    licence: str | None = None
    cached: Path | None = None


def ask_hub(file: HubFile, card: dict[str, Any] | None) -> HubState:
    """What the hub says of a file; offline what its card does, or the hub's cache. Raises `ConfigError`."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    def find_cached(revision: str) -> Path | None:
        found = try_to_load_from_cache(file.repository, file.path, revision=revision, repo_type="dataset")
        return Path(found) if isinstance(found, str) else None

    if constants.HF_HUB_OFFLINE and card and {"revision", "bytes", "sha256"} <= {*card}:
        return HubState(card["revision"], card["bytes"], card["sha256"], card.get("licence"))
    if constants.HF_HUB_OFFLINE:
        cached = find_cached("main")
        if cached is None:
            raise ConfigError(
                f"HF_HUB_OFFLINE is set, and {file.path} of {file.repository} is not in the hub's cache: "
                "unset it, or fetch it where there is a network"
            )
        revision = cached.parts[-1 - len(Path(file.path).parts)]
        return HubState(revision, cached.stat().st_size, digest_like(cached), None, cached)
    with explain_hub_errors(file.repository):
        info = HfApi().dataset_info(file.repository, files_metadata=True, timeout=HUB_ANSWER_SECONDS)
    names = {each.rfilename: each for each in info.siblings or ()}
    if file.path not in names:
        near = suggest_nearest(file.path, names)
        raise ConfigError(f"{file.repository} has no {file.path} at revision {info.sha}{near}")
    found = names[file.path]
    digest = found.lfs.sha256 if found.lfs else found.blob_id
    if not info.sha or found.size is None or not digest:
        raise ConfigError(f"{file.repository}: the hub says neither size nor digest of {file.path}")
    licence = getattr(info.card_data, "license", None)
    said = ", ".join(licence) if isinstance(licence, list) else licence
    return HubState(info.sha, found.size, digest, said, find_cached(info.sha))


def get_part_path(target: Path, state: HubState) -> Path:
    """Where a file is while it is being fetched: of these bytes alone, so that no others are added."""
    return target.with_name(f".{target.name}.{state.digest[:16]}.part")


def count_missing_bytes(target: Path, state: HubState) -> int:
    """Bytes that are still to be fetched."""
    part = get_part_path(target, state)
    return state.size - min(state.size, part.stat().st_size) if part.is_file() else state.size


def fetch_file(file: HubFile, state: HubState, target: Path) -> None:
    """Fetches a file, with a bar, and checks its digest. Raises `ConfigError`; what came is kept."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import get_hf_file_metadata, http_get
    from huggingface_hub.utils import build_hf_headers

    part = get_part_path(target, state)
    with explain_hub_errors(file.repository):
        part.parent.mkdir(parents=True, exist_ok=True)
        if state.cached:
            shutil.copyfile(state.cached, part)
        else:
            url = hf_hub_url(file.repository, file.path, repo_type="dataset", revision=state.revision)
            location, headers = get_hf_file_metadata(url).location, build_hf_headers()
            if urlsplit(location).netloc != urlsplit(url).netloc:  # a token is the hub's alone
                headers.pop("authorization", None)
            with part.open("ab") as copy:
                if copy.tell() > state.size:
                    copy.truncate(0)
                http_get(
                    location, copy, resume_size=copy.tell(), headers=headers, expected_size=state.size,
                    displayed_filename=file.path,
                )  # fmt: skip
        if digest_like(part, state.digest) != state.digest:
            part.unlink()
            raise ConfigError(
                f"{file.path} of {file.repository} came with other bytes than the hub says: give the same "
                "command again"
            )
        part.replace(target)


@contextmanager
def explain_hub_errors(repository: str) -> Iterator[None]:
    """Raises `ConfigError`, in a sentence, for whatever the hub or its client says, and for a full disk."""
    from huggingface_hub import constants, errors

    where = f"{constants.ENDPOINT}/datasets/{repository}"
    try:
        yield
        return
    except UserError:
        raise
    except errors.GatedRepoError:
        said = f"{where} is gated: ask for access there, then `hf auth login`"
    except errors.RepositoryNotFoundError:
        said = f"{where} is not there, or it is private (`hf auth login`)"
    except Exception as error:  # the hub client raises a dozen unrelated types
        said = f"{where}: {summarize_error(error)}; the same command goes on from there"
        if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT):
            said = "the disk is full: make room, and the same command goes on from there"
    raise ConfigError(said) from None
