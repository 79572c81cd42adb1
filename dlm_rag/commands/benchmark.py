"""Evaluate models x data sets x seeds, and put all of it into one table.

    dlm-rag benchmark laptop --out runs/laptop            # what ships, in minutes on two cores
    dlm-rag benchmark my.yaml --out runs/mine --plan      # the command of each cell

A benchmark is a YAML file, here or in configs/benchmarks/:

    models:     {llada: --model GSAI-ML/LLaDA-8B-Instruct, shipped: "", int8: model.quantize=int8}
    datasets:   {hotpotqa: --dataset hotpotqa --corpus wiki18, own: questions=q.jsonl --corpus c.jsonl}
    policies:   [interleaved, static]            # as in evaluate --compare
    seeds:      [0, 1]                           # of decode.seed; may be left out
    settings:   limit=200                        # of all cells; may be left out

A model can also be openai://HOST:PORT/v1/NAME, behind a server. Each model gets the policies and settings
of its kind: of [interleaved, static, ircot], a denoiser gets the first two, a model behind a server the
last two. In a data set, $NAME is an environment variable.

Each cell is a `dlm-rag evaluate` of its own, one after another; workers=auto takes all GPUs. A cell that
fails is reported, and the others continue. The same command runs cells that are missing, or whose questions
or files have changed; other settings want another --out.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import field
from itertools import product
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from dlm_rag.baselines import POLICIES, is_model_url, is_read_when_served
from dlm_rag.cli import CommandParser, print_note
from dlm_rag.config import CONFIG_FOLDER, find_config_file, read_config_file
from dlm_rag.config.fields import explain_validation_error
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.evaluation.compare import SERVED_PRESETS, SETTING_PRESETS, complete_key
from dlm_rag.evaluation.tables import CELL_FILE, Cell, read_result, write_benchmark_table
from dlm_rag.files.paths import make_folder, write_text_atomic
from dlm_rag.progress import report_progress

BENCHMARK_FOLDER = CONFIG_FOLDER / "benchmarks"
MAX_CELLS = 10_000  # combinations of a benchmark


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Benchmark:
    """What is compared; models and data sets by name, each with words for evaluate."""

    models: dict[str, str]
    datasets: dict[str, str]
    policies: list[str]
    seeds: list[int] = field(default_factory=lambda: [0])
    settings: str = ""


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "", prog="dlm-rag benchmark")
    parser.add_argument("file", metavar="FILE", help="a YAML file, or the name of one that ships")
    parser.add_argument("--out", metavar="PATH", required=True, help="folder of results and tables")
    parser.add_argument("--plan", action="store_true", help="print the command of each cell, run nothing")
    given = parser.parse_args(argv)
    out = Path(given.out).expanduser()
    cells = list(list_cells(read_benchmark(given.file), out))
    if given.plan:
        for cell in cells:
            state, command = "done" if cell.is_done else "left", ["dlm-rag", "evaluate", *cell.words]
            print(f"{state}  {shlex.join(command)}")
        return
    make_folder(out, "out=")
    left, failed = [cell for cell in cells if not cell.is_done], dict[str, str]()
    with report_progress("cells", len(cells), done=len(cells) - len(left)) as advance:
        for cell in left:
            if error := run_cell(cell):
                failed[cell.name] = error
                print_note(f"{cell.name} failed: {error}")
            advance(1)
    write_benchmark_table(out, [cell for cell in cells if cell.has_scores], failed)
    if failed:
        raise RunError(f"{len(failed)} of {len(cells)} cells failed; the same command asks them again")


def read_benchmark(name: str) -> Benchmark:
    """The benchmark in a file, or of one that ships. Raises `ConfigError`, naming file and key."""
    path = find_config_file(name, BENCHMARK_FOLDER)
    try:
        found = TypeAdapter(Benchmark).validate_python(read_config_file(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain_validation_error(error)[1]}") from None
    if not (found.models and found.datasets and found.policies and found.seeds):
        raise ConfigError(f"{path} compares nothing: name models, datasets and policies")
    if (count := len(found.datasets) * len(found.models) * len(found.seeds)) > MAX_CELLS:
        raise ConfigError(f"{path} has {count:,} cells, more than {MAX_CELLS:,}: leave some out")
    return found


def list_cells(benchmark: Benchmark, out: Path) -> Iterator[Cell]:
    """Every combination, data set by data set. Raises `ConfigError` for names that make no folder."""
    common = split_words("settings", benchmark.settings)
    models = {name: split_words(f"models.{name}", text) for name, text in benchmark.models.items()}
    datasets = {
        name: split_words(f"datasets.{name}", os.path.expandvars(text))
        for name, text in benchmark.datasets.items()
    }
    for dataset, model, seed in product(datasets, models, benchmark.seeds):
        names = (dataset, model, str(seed))
        if any(not part or "/" in part or part.startswith(".") for part in names):
            raise ConfigError(f"'{'/'.join(names)}' makes no folder: names have no / and no . in front")
        named, folder = models[model], out.joinpath(*names)
        if named and is_model_url(named[0]):
            named = ["--model", *named]
        served = any(is_model_url(word.removeprefix("model.path=")) for word in named)
        policies = [p for p in benchmark.policies if all(is_for_kind(w, served) for w in p.split("+"))]
        own = [word for word in common if "=" not in word or is_for_kind(word, served, policies)]
        if not policies:
            raise ConfigError(f"no policy of the benchmark is for the model '{model}'")
        last = [f"decode.seed={seed}", "--compare", ",".join(policies), "--out", str(folder)]
        yield Cell(folder, (*named, *datasets[dataset], *own, *last), model, dataset, seed)


def is_for_kind(word: str, served: bool, policies: Sequence[str] = ("static",)) -> bool:
    """Whether a policy's name or KEY=VALUE is for models behind a server, or for others; or for neither."""
    key, equals, _ = complete_key(word).partition("=")
    if equals:
        words = ([word.rpartition("=")[2] for word in policy.split("+")] for policy in policies)
        named = [next((word for word in each if word in POLICIES), "static") for each in words]
        return is_read_when_served(key, named) if served else not key.startswith("remote.")
    own, other = (SERVED_PRESETS, SETTING_PRESETS) if served else (SETTING_PRESETS, SERVED_PRESETS)
    return word in own or word not in other


def split_words(key: str, text: str) -> list[str]:
    """Returns the words of a value as a shell would; raises `ConfigError` for what no shell would take."""
    if not text.isprintable():
        raise ConfigError(f"{key} of the benchmark has a line end or a control character")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{key} of the benchmark cannot be read: {str(error).lower()}") from None


def run_cell(cell: Cell) -> str:
    """Evaluates a cell in a process of its own, which what it breaks breaks alone; the error, if any."""
    make_folder(cell.folder, "out=")
    inputs = cell.list_inputs()
    (cell.folder / CELL_FILE).unlink(missing_ok=True)  # its scores may be of other words, or files
    done = subprocess.run(
        [sys.executable, "-m", "dlm_rag", "evaluate", *cell.words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        found = read_result(cell.folder).settings.values()
        failed = max(each.groups["all"]["failed"].mean for each in found)  # type: ignore[union-attr]
        noted = {"words": cell.words, "inputs": inputs, "failed": failed}
        write_text_atomic(cell.folder / CELL_FILE, json.dumps(noted) + "\n")
        return f"{100 * failed:.2g} % of the questions failed, counted as wrong" if failed else ""
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return said[-1].removeprefix("error: ") if said else f"it ended with status {done.returncode}"
