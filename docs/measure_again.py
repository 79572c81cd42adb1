"""Measures again what docs/measurements/inputs.json lists, and writes every place that shows it.

    python docs/measure_again.py              what has changed since it was measured
    python docs/measure_again.py --all        everything
    python docs/measure_again.py --check      says what has changed; exit status 2 where something has

inputs.json has, by command, a digest of every file of this repository that the result depends on (weights,
configs, tokenizer, corpus, questions) and the settings that it ran with. An entry of results/*.yaml with
the key `table` is made of the result of its command; `table` says how. A command without settings needs
data that is not here: it is checked, and run by hand.
"""

import json
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from dlm_rag.cli import run_program
from dlm_rag.commands.arguments import CommandParser
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.evaluation.compare import SettingMetrics
from dlm_rag.evaluation.tables import StoredResult, build_result_table, format_metrics, read_result
from dlm_rag.files.paths import digest_file

ROOT = Path(__file__).parents[1]
INPUTS = ROOT / "docs/measurements/inputs.json"
AGAIN = "run python docs/measure_again.py, and commit what it writes"
BY_HAND = "run it, write its figures to results/*.yaml and its digests to inputs.json"
README_COMMAND = "python evaluate.py --out runs/shipped --compare all decode.batch_size=16"
README_COLUMNS = ("questions", "interleaved", "static", "two_rounds", "oracle")
README_ROWS = re.compile(r"(\| hops \(questions\) \|[^\n]*\n\|[-|]*\|\n)(?:\|[^\n]*\n)+")
README_DATE = re.compile(rf"(?<=`{re.escape(README_COMMAND)}`, 2 CPU cores, )[\d-]+")
Entry = dict[str, Any]


def read_inputs() -> dict[str, Any]:
    """The files and settings of each command that is checked."""
    return json.loads(INPUTS.read_text())


def list_changes(command: str, then: dict[str, Any], root: Path = ROOT) -> list[str]:
    """What has changed of a command's files and settings since it was measured, a sentence each."""
    changes = []
    for name, digest in then["files"].items():
        found = root / name
        if not found.is_file() or digest_file(found) != digest:
            changes.append(f"{name} has changed")
    folders = {str(Path(name).parent) for name in then["files"] if name.endswith("/config.json")}
    for folder in sorted(folders):
        news = [path for path in sorted((root / folder).glob("*.json")) if is_read(path)]
        names = [f"{folder}/{path.name}" for path in news]
        changes += [f"{name} is new" for name in names if name not in then["files"]]
    if not changes and then["settings"]:  # these are looked up with the files as they are
        for name, settings in resolve_settings(command).items():
            stored = then["settings"]  # where one setting is run, it has no name yet
            old = stored.get(name, {}) if name else next(iter(stored.values()))
            for key in sorted(old.keys() & settings):
                if old[key] != settings[key]:
                    changes.append(f"{key} of '{name}' was {old[key]}, and is {settings[key]}")
    return changes


def is_read(path: Path) -> bool:
    """Whether a JSON file of a checkpoint's folder counts as one of the checkpoint."""
    from dlm_rag.model.checkpoint import FINGERPRINT_EXCLUDED_GLOBS

    return not any(map(path.match, FINGERPRINT_EXCLUDED_GLOBS))


def resolve_settings(command: str) -> dict[str, dict[str, Any]]:
    """What answers depend on under each setting of a command of evaluate, as it would run now."""
    from dlm_rag.commands.answer_job import parse_answer_command_line
    from dlm_rag.commands.evaluate import EVALUATE_OPTIONS, EVALUATE_READS, plan_from_command_line
    from dlm_rag.commands.prepare_decoder import ResourceCache, fill_in_shipped_files, prepare_decoder

    argv = [*shlex.split(command)[2:], "model.device=cpu"]  # whatever is here
    words = parse_answer_command_line("", argv, EVALUATE_READS, options=EVALUATE_OPTIONS)
    once, found = ResourceCache(), {}
    for name, config in plan_from_command_line(words).settings.items():
        prepared = prepare_decoder(fill_in_shipped_files(config, []), [], once)
        found[name] = json.loads(json.dumps(prepared.answers_depend_on()))
    return found


def check_inputs(inputs: dict[str, Any] | None = None) -> None:
    """Raises `ConfigError` where what a stored result depends on has changed since it was measured."""
    inputs = read_inputs() if inputs is None else inputs
    for command, then in inputs.items():
        if changes := list_changes(command, then):
            more = f" (and {len(changes) - 1} more)" * (len(changes) > 1)
            raise ConfigError(
                f"a stored result is out of date: {changes[0]}{more} since `{command}` was measured on "
                f"{then['date']}: {AGAIN if then['settings'] else BY_HAND}"
            )


def record_inputs(result: StoredResult) -> dict[str, Any]:
    """What inputs.json keeps of a result: its day, files and settings."""
    files: dict[str, str] = {}
    settings = {}
    for name in result.settings:
        stamp = result.settings[name].stamp
        for path, digest in stamp["files"].items():
            if Path(path).is_relative_to(ROOT):
                files[Path(path).relative_to(ROOT).as_posix()] = digest
        settings[name] = stamp["answers_depend_on"]
    day = str(result.settings[next(iter(settings))].stamp["date"])[:10]
    return {"date": day, "files": dict(sorted(files.items())), "settings": settings}


def measure(command: str) -> StoredResult:
    """Runs a command of evaluate in a new folder; returns what it left."""
    words = shlex.split(command)
    out = ROOT / words[words.index("--out") + 1]
    if out.exists():
        raise ConfigError(f"{out} is in the way: move it, so that everything is measured anew")
    print(f"== {command}", file=sys.stderr)
    if subprocess.run([sys.executable, *words[1:]], cwd=ROOT).returncode:
        raise RunError(f"{command} failed")
    return read_result(out)


def build_rows(table: dict[str, Any], result: StoredResult) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of an entry, as its `table` says.

    metric and groups: a row for each group of questions; minus: of the first setting minus the others.
    columns: metrics over all questions, a row for each setting. overview: all settings of a sweep.
    """
    if "overview" in table:
        headings, rows = build_result_table(result)[1:]
        names = {"above the first": "difference from the first", "Pareto front": "on the Pareto front"}
        columns = [table["overview"], *(names.get(each, each) for each in headings[1:])]
        # Answers a second are those of a machine that may be shared.
        kept = [n for n, name in enumerate(columns) if name not in ("answers/s", "on the Pareto front")]
        return [columns[n] for n in kept], [[row[n] for n in kept] for row in rows]
    if "columns" in table:
        rows = [
            [name, *format_metrics(setting.groups["all"], table["columns"].values())]
            for name, setting in result.settings.items()
        ]
        return ["setting", *table["columns"]], rows
    minus = bool(table.get("minus"))
    plain = {name: setting.groups for name, setting in result.settings.items()}
    shown: dict[str, Any] = result.first_minus if minus else plain
    rows = [
        [
            f"{table['groups'][group]} ({result.questions[group]})",
            *(format_cell(of[group], table["metric"], minus) for of in shown.values()),
        ]
        for group in table["groups"]
    ]
    return ["questions", *shown], rows


def format_cell(metrics: SettingMetrics, name: str, signed: bool) -> str:
    """One metric with its interval."""
    return format_metrics(metrics, [name], signed)[0]


def fill_cell(text: str, entries: list[Entry]) -> str:
    """A text in which `{title|row|column}` stands for a cell of another entry."""

    def look_up(found: re.Match[str]) -> str:
        title, row, column = found[1].split("|")
        (entry,) = (entry for entry in entries if entry["title"] == title)
        (cells,) = (cells for cells in entry["rows"] if cells[0] == row or cells[0].startswith(f"{row} ("))
        return cells[entry["columns"].index(column)]

    return re.sub(r"\{([^{}]*\|[^{}]*\|[^{}]*)\}", look_up, text)


def update_entries(entries: list[Entry], results: dict[str, StoredResult]) -> None:
    """Fills the entries of one page that are made of these results, then those that quote others."""
    from docs.build_measurements import list_commands

    for entry in entries:
        commands = list_commands(entry)
        measured = [results[command] for command in commands if command in results]
        if "table" not in entry or not measured:
            continue
        if "fill" not in entry["table"]:
            entry["columns"], entry["rows"] = build_rows(entry["table"], measured[0])
        stamp = next(iter(measured[0].settings.values())).stamp
        entry |= {"date": str(stamp["date"])[:10], "commit": stamp["commit"], "seed": stamp["seed"]}
        entry["machine"] = f"{stamp['device'].removeprefix('cpu: ')}, threads: {stamp['threads']}"
    for entry in entries:
        if "fill" in entry.get("table", {}):
            fill = partial(fill_cell, entries=entries)
            entry["rows"] = [[*map(fill, row)] for row in entry["table"]["fill"]]


def write_readme(path: Path, entries: list[Entry]) -> str:
    """README with the rows of its table, and the day, as the store has them."""
    (entry,) = (entry for entry in entries if entry["title"] == "Exact match by number of hops")
    places = [entry["columns"].index(name) for name in README_COLUMNS]
    rows = [
        re.sub(r" hops?(?=[ ,(])", "", row[0], count=1).replace("held-out wordings", "new wordings")
        for row in entry["rows"]
    ]
    cells = [
        f"| {' | '.join([name, *(row[place] for place in places[1:])])} |\n"
        for name, row in zip(rows, entry["rows"], strict=True)
    ]
    text, count = README_ROWS.subn(lambda found: found[1] + "".join(cells), path.read_text())
    dated, again = README_DATE.subn(entry["date"], text)
    if (count, again) != (1, 1):
        raise ConfigError(f"{path} has {count} tables of hops and {again} dates of it, not one each")
    return dated


def main(argv: list[str]) -> None:
    """Measures, and writes inputs.json, the stored entries, all pages, README and RESULTS.md."""
    from docs import build_measurements as store

    parser = CommandParser(__doc__ or "")
    parser.add_argument("--all", action="store_true", help="also what has not changed")
    parser.add_argument("--check", action="store_true", help="measure nothing, say what has changed")
    taken = "a run of one of the commands: take it, and measure nothing"
    parser.add_argument("--result", type=Path, action="append", default=[], metavar="DIR", help=taken)
    given, inputs = parser.parse_args(argv), read_inputs()
    if given.check:
        check_inputs(inputs)
        return
    found = [read_result(path) for path in given.result]
    started = "dlm-rag evaluate"
    results = {f"python evaluate.py{r.command.removeprefix(started)}": r for r in found}
    if unknown := sorted(results.keys() - inputs):
        raise ConfigError(f"{INPUTS.name} has no command {unknown[0]!r}")
    if not results:
        here = {command: then for command, then in inputs.items() if then["settings"]}
        check_inputs({command: then for command, then in inputs.items() if command not in here})
        wanted = [command for command, then in here.items() if given.all or list_changes(command, then)]
        results = {command: measure(command) for command in wanted}
    for command, result in results.items():
        inputs[command] = record_inputs(result)
    INPUTS.write_text(json.dumps(inputs, indent=1) + "\n")
    for page in store.PAGES:
        entries = store.read_entries(page)
        if any("table" in entry for entry in entries):
            update_entries(entries, results)
            text = "\n".join(map(store.dump_entry, entries))
            (store.FOLDER / "results" / f"{page}.yaml").write_text(text)
    if README_COMMAND in results:
        shown = given.result[[*results].index(README_COMMAND)] if given.result else ROOT / "runs/shipped"
        report = (shown / "scores.md").read_text()
        (ROOT / "dlm_rag/shipped/model/RESULTS.md").write_text(report)
    (ROOT / "README.md").write_text(write_readme(ROOT / "README.md", store.read_entries("world")))
    store.main([])


if __name__ == "__main__":
    run_program(main)
