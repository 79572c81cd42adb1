"""The field's data sets by name: where each file is, which split is meant, and how it is fetched.

Files keep their names in the repositories, below one folder (`data`). Nothing of a repository but these
files is fetched, by huggingface_hub.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import NamedTuple

import yaml

from dlm_rag.errors import ConfigError, UserError, suggest_nearest, summarize_error

DATA_FOLDER = "data"  # below the working folder
HUB_ANSWER_SECONDS = 10.0
_STATE = re.compile(r"[0-9a-f]{40} ([0-9a-f]{40}|[0-9a-f]{64}) [0-9]{1,18}")  # commit, digest, bytes
SPLIT_RULES = {
    "search_r1": "the test questions, else those of dev, else of train (Search-R1)",
    "flashrag_1000": "the first 1,000 of these (FlashRAG's table)",
    "sardi": "SARDI's own, with their corpus",
}
FIRST_QUESTIONS = 1000  # of flashrag_1000


class HubFile(NamedTuple):
    """A file of a data set repository, as in `hub_datasets.yaml`."""

    name: str
    repository: str
    path: str
    rows: int | None  # None where nothing says
    layout: str
    licence: str = "not said"


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FILES = [HubFile(**row) for row in _TABLE["files"]]
CORPORA = [file.name for file in FILES if file.layout == "passages"]


def list_dataset_files(name: str, rule: str) -> list[HubFile]:
    """Returns the files of a data set or corpus, questions first. Raises `ConfigError`."""
    if rule not in SPLIT_RULES:
        near = suggest_nearest(rule, SPLIT_RULES)
        raise ConfigError(f"'{rule}' is none of {', '.join(SPLIT_RULES)}{near}")
    other = "FlashRAG" if rule == "sardi" else "SARDI"
    known = [file for file in FILES if file.layout != other]
    if not (found := [file for file in known if file.name == name]):
        names = list(dict.fromkeys(file.name for file in known))
        raise ConfigError(
            f"'{name}' is no data set by the split rule {rule}, which has {', '.join(names)}"
            f"{suggest_nearest(name, names)}"
        )
    if found[0].layout == "SARDI":
        corpus = f"{Path(found[0].path).parent}/corpus/index_chunked/corpus.jsonl"
        found.append(found[0]._replace(path=corpus, rows=None, layout="passages"))
    return found


def get_local_path(file: HubFile, rule: str, folder: str | Path) -> Path:
    """Returns where what a split rule makes of a file is kept."""
    path = Path(folder) / file.path
    first = rule == "flashrag_1000" and file.layout == "FlashRAG"
    return path.with_name(f"{path.stem}.first_{FIRST_QUESTIONS}{path.suffix}") if first else path


def find_dataset(name: str, rule: str) -> Path:
    """Returns the file of a data set or corpus in `data`; raises `ConfigError` where it is not there."""
    path = get_local_path(list_dataset_files(name, rule)[0], rule, DATA_FOLDER)
    if not path.exists():
        command = f"dlm-rag data get {name}{f' --split {rule}' * (rule != 'search_r1')}"
        raise ConfigError(f"{path} is not there; `{command}` brings it")
    return path


def find_named_corpus(corpus: str | None) -> str | None:
    """Returns the file of a corpus named by a word, unless there is a file of that name; else the name."""
    if corpus is None or corpus not in CORPORA or Path(corpus).exists():
        return corpus
    return str(find_dataset(corpus, "search_r1"))


def read_file_state(file: HubFile) -> tuple[str, int]:
    """Returns the revision of a file on the hub and its bytes. Raises `ConfigError`."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    with explain_hub_errors(file):
        url = hf_hub_url(file.repository, file.path, repo_type="dataset")
        found = get_hf_file_metadata(url, timeout=HUB_ANSWER_SECONDS)
        if not _STATE.fullmatch(f"{found.commit_hash} {found.etag} {found.size}"):
            raise ConfigError(f"the hub does not say commit, digest and size of {file.path}")
        return str(found.commit_hash), int(found.size or 0)


def fetch_file(file: HubFile, commit: str, folder: Path) -> None:
    """Fetches a file into a folder, with a bar. Raises `ConfigError`."""
    from huggingface_hub import hf_hub_download

    with explain_hub_errors(file):
        hf_hub_download(file.repository, file.path, repo_type="dataset", revision=commit, local_dir=folder)


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
        said = f"{where}: {summarize_error(error)}; give the same command again"
        if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT):
            said = "the disk is full: make room, and give the same command again"
    raise ConfigError(said) from None
