"""Download the field's data sets by name.

    dlm-rag data list                       # names, sizes, sources
    dlm-rag data get hotpotqa 2wiki musique bamboogle wiki18
    dlm-rag data get hotpotqa nq --split flashrag_1000
    dlm-rag data get 2wiki --split sardi    # with its corpus

Files come from the Hugging Face hub (HF_ENDPOINT, HF_HUB_OFFLINE and `hf auth login` apply) and are kept
below --folder, each with a card. Run the same command again to resume. Then:

    dlm-rag evaluate --dataset hotpotqa,2wiki --corpus wiki18 --model DIR_OR_HUB_ID --out runs/first
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dlm_rag.cli import CommandParser, print_note
from dlm_rag.data import hub_datasets, hub_download
from dlm_rag.data.hub_datasets import DATASETS, SARDI_SETS, SPLIT_RULES, HubFile
from dlm_rag.errors import ConfigError, UserError
from dlm_rag.files.paths import expand_path, get_cache_folder, make_folder
from dlm_rag.progress import format_bytes


class PlannedFile(NamedTuple):
    """A file of the hub that is wanted here; missing: bytes, None where all of it is here."""

    file: HubFile
    target: Path
    state: hub_download.HubState
    missing: int | None


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "", prog="dlm-rag data")
    parser.add_argument("action", choices=("list", "get"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="of `dlm-rag data list`")
    rules = "; ".join(f"{rule}: {what}" for rule, what in SPLIT_RULES.items())
    parser.add_argument("--split", default="search_r1", metavar="RULE", help=f"which questions. {rules}")
    parser.add_argument("--folder", default=hub_datasets.DATA_FOLDER, help="where files are kept (data)")
    given = parser.parse_intermixed_args(argv)
    if bool(given.names) != (given.action == "get"):
        raise ConfigError("get takes names, list takes none: `dlm-rag data list` has them")
    if given.action == "list":
        list_datasets()
    else:
        get_datasets(given.names, given.split, expand_path(given.folder, ConfigError, "folder"))


def list_datasets() -> None:
    rows = [("name", "split", "rows", "bytes", "layout", "licence", "file")]
    named = [(name, split, file) for name, splits in DATASETS.items() for split, file in splits.items()]
    sardi = [(name, "sardi", file) for name in SARDI_SETS
             for file in hub_datasets.list_dataset_files(name, "sardi")]  # fmt: skip
    others = {name: [file] for name, file in hub_datasets.CORPORA.items()}
    others |= {name: parts for name, (_, parts) in hub_datasets.INDEXES.items()}
    named += [*sardi, *((name, "-", file) for name, files in others.items() for file in files)]
    for name, split, file in named:
        count = "-" if file.rows is None else f"{file.rows:,}"
        size = "-" if file.size is None else format_bytes(file.size)
        where = f"{file.repository}: {file.path}"
        rows.append((name, split, count, size, file.layout, file.licence or "-", where))
    print_columns(rows)


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def get_datasets(names: Sequence[str], rule: str, folder: Path) -> None:
    """Fetches what is not here, after saying what that is. Raises `ConfigError`."""
    names = [name for name in dict.fromkeys(names) if not is_index_here(name, folder)]
    files = [file for name in names for file in hub_datasets.list_dataset_files(name, rule)]
    planned = [plan_file(file, folder) for file in files]
    rows = [("file", "bytes", "to fetch", "licence", "from")]
    for file, target, state, missing in planned:
        sizes = format_bytes(state.size), "-" if missing is None else format_bytes(missing)
        source = f"{file.repository} @ {state.revision[:12]}"
        rows.append((str(target), *sizes, state.licence or file.licence or "not said", source))
    print_columns(rows)
    check_disk(planned, folder)
    make_folder(folder, "--folder ")
    for wanted in planned:
        if wanted.missing is not None:
            hub_download.fetch_file(wanted.file, wanted.state, wanted.target)
        if not wanted.file.is_index_part:
            describe_file(wanted, rule, folder)
    for name in {*names} & {*hub_datasets.INDEXES}:
        parts = [each for each in planned if each.file in hub_datasets.INDEXES[name][1]]
        states = {each.file.path: each.state for each in parts}
        said = {path: {"revision": s.revision, "digest": s.digest} for path, s in states.items()}
        whole = hub_datasets.join_parts(name, folder)
        hub_datasets.write_card(whole, {"repository": parts[0].file.repository}, {"parts": said})
        print(f"{whole} is there: retrieval.faiss_index={whole} reads it")


def is_index_here(name: str, folder: Path) -> bool:
    """Whether a name is that of an index whose joined file is in the folder already."""
    if name not in hub_datasets.INDEXES or not (whole := folder / hub_datasets.INDEXES[name][0]).is_file():
        return False
    print(f"{whole} is there: retrieval.faiss_index={whole} reads it")
    return True


def plan_file(file: HubFile, folder: Path) -> PlannedFile:
    """What the hub says of a file and what of it is here. Raises `ConfigError` for another file there."""
    target = folder / file.path
    card = hub_datasets.read_card(target) if target.is_file() else None
    state = hub_download.ask_hub(file, card)
    if file.is_index_part and target.is_file() and target.stat().st_size > state.size:
        os.truncate(target, state.size)  # joining was stopped
    if not target.exists():
        return PlannedFile(file, target, state, hub_download.count_missing_bytes(target, state))
    if hub_datasets.digest_like(target, state.digest) != state.digest:
        own = f"of revision {str(card.get('revision'))[:12]}" if card else "not from the hub"
        raise ConfigError(
            f"{target} is {own}, and the hub has another one at revision {state.revision[:12]}: keep "
            "yours, or delete it and its card to fetch that"
        )
    return PlannedFile(file, target, state, None)


def check_disk(planned: Sequence[PlannedFile], folder: Path) -> None:
    """Says what is needed and free; raises `ConfigError` where it is not enough."""
    need = sum(wanted.missing or 0 for wanted in planned)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    print(f"to fetch: {format_bytes(need)}; free in {folder}: {format_bytes(free)}")
    if packed := sum(each.state.size for each in planned if each.target.suffix == ".gz"):
        later = format_bytes(packed * hub_datasets.UNPACKED_RATIO)
        print(f"later, for the unpacked corpus: about {later} in {get_cache_folder()}, and its index")
    if need > free:
        raise ConfigError(f"{folder} has {format_bytes(free)}, {format_bytes(need)} are needed: make room")


def describe_file(wanted: PlannedFile, rule: str, folder: Path) -> None:
    """Makes of a file what the rule says, and writes the cards. Raises `UserError` for another layout."""
    file, target, state, missing = wanted
    try:
        counts = hub_datasets.count_contents(target, file)
    except UserError as error:
        if missing is not None:  # nothing stays that cannot be read
            target.unlink()
        raise ConfigError(f"{file.repository} @ {state.revision[:12]}: {error}") from None
    source = {
        "repository": file.repository, "path": file.path, "revision": state.revision,
        "licence": state.licence or file.licence,
    }  # fmt: skip
    if hub_datasets.read_card(target) is None:
        hub_datasets.write_card(target, source, counts)
    own, found = hub_datasets.get_local_path(file, rule, folder), counts.get("questions")
    if own != target:
        left = hub_datasets.take_first_questions(target, own)
        counts = hub_datasets.count_contents(own, file)
        counts["dropped"]["after the first"] = left
        hub_datasets.write_card(own, source | {"rule": rule}, counts)
    if found not in (None, file.rows):
        print_note(f"warning: {target} has {found:,} questions, {file.rows:,} were published")
    print(f"{own} is there, and {hub_datasets.get_card_path(own).name}")
