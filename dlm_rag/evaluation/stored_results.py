"""Stored results of evaluations: read again, their table, and that of a benchmark's cells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from dlm_rag.errors import ConfigError
from dlm_rag.evaluation.compare import GroupSummary
from dlm_rag.evaluation.metrics import SCORE_METRICS
from dlm_rag.evaluation.tables import (
    OVERVIEW,
    ResultTable,
    build_overview_table,
    format_overview,
    print_tables,
    render_markdown_table,
)
from dlm_rag.files.checked_json import parse_json_object, read_json_or_empty, validate_json_value
from dlm_rag.files.paths import write_text_atomic

CELL_FILE = "cell.json"  # beside a cell's results: the words that it was run with
HEADINGS = ("data set", "model", "seed", "policy", "questions", *OVERVIEW, "J/answer")
NAMES = 4  # headings that tell cells apart


@dataclass(frozen=True)
class _Setting:
    groups: GroupSummary
    stamp: dict[str, Any]


@dataclass(frozen=True)
class StoredScores:
    """What is read again of a scores.json: the means of each setting by group, and how many questions."""

    questions: dict[str, int]
    settings: dict[str, _Setting]
    first_minus: dict[str, GroupSummary]
    swept: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredResult:
    """What `evaluate` left in a folder; record: its scores.json; scores: what of it is shown again."""

    record: dict[str, Any]
    scores: StoredScores

    def get_stamp(self, name: str) -> dict[str, Any]:
        """The stamp of a setting's answers."""
        return self.scores.settings[name].stamp


def read_result(path: Path) -> StoredResult:
    """The result in a folder, or of its scores.json. Raises `ConfigError` for anything else."""
    file = path / "scores.json" if path.is_dir() else path
    none = f"{path} is not a result: name a folder of evaluate's --out that has a scores.json"
    if not file.is_file():
        raise ConfigError(none)
    record = parse_json_object(file.read_bytes(), str(file), ConfigError)
    found = validate_json_value(StoredScores, record, none, ConfigError)
    grouped: list[Mapping[str, Any]] = [found.questions, *found.first_minus.values()]
    grouped += [setting.groups for setting in found.settings.values()]
    whole = bool(found.settings) and all("all" in groups for groups in grouped)
    if not whole:
        raise ConfigError(none)
    return StoredResult(record, found)


def build_result_table(result: StoredResult) -> ResultTable:
    """The table of all questions, a row for each setting."""
    scores, none = result.scores, dict.fromkeys(SCORE_METRICS)
    summaries = {name: none | setting.groups["all"] for name, setting in scores.settings.items()}
    against = {name: groups["all"] for name, groups in scores.first_minus.items()}
    return build_overview_table(scores.questions["all"], summaries, against, scores.swept)


@dataclass(frozen=True)
class Cell:
    """One evaluation: its folder, its words, and what tells it apart in the table."""

    folder: Path
    words: tuple[str, ...]
    model: str
    dataset: str
    seed: int

    @property
    def is_done(self) -> bool:
        done = read_json_or_empty(self.folder / CELL_FILE).get("words") == [*self.words]
        return done and (self.folder / "scores.json").is_file()

    @property
    def name(self) -> str:
        return " ".join((self.dataset, self.model, f"seed {self.seed}"))


def write_benchmark_table(out: Path, cells: Sequence[Cell], failed: Mapping[str, str]) -> None:
    """Writes table.md and prints the table. failed: cells with their errors."""
    rows = [row for cell in cells for row in build_rows(cell, read_result(cell.folder))]
    table = ResultTable("Benchmark, with 95 % intervals; above the first: paired", HEADINGS, rows)
    brief = [[" ".join(row[:NAMES]), *row[NAMES:]] for row in table.rows]
    print_tables(Console(), [ResultTable(table.title, ["cell", *table.headings[NAMES:]], brief)])
    found = [table]
    if failed:
        found.append(ResultTable("Failed", ("cell", "error"), [*map(list, failed.items())]))
    write_text_atomic(out / "table.md", "\n".join(map(render_markdown_table, found)))
    print(f"table.md is in {out}")


def build_rows(cell: Cell, result: StoredResult) -> list[list[str]]:
    """Returns the rows of a cell, a policy each."""
    rows = []
    for policy, setting in result.scores.settings.items():
        shown = format_overview(
            setting.groups["all"], result.scores.first_minus.get(policy, {}).get("all", {})
        )
        joules = (result.record["settings"][policy].get("energy") or {}).get("joules_per_answer")
        names = (cell.dataset, cell.model, str(cell.seed), policy)
        spent = "-" if joules is None else f"{joules:.3g}"
        rows.append([*names, f"{result.scores.questions['all']:,}", *shown, spent])
    return rows
