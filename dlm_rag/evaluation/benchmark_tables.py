"""The table of a benchmark, all cells in one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dlm_rag.evaluation.metrics import Estimate
from dlm_rag.evaluation.stored_results import StoredResult, read_result
from dlm_rag.evaluation.tables import (
    ResultTable,
    format_metric,
    format_metrics,
    print_tables,
    render_markdown_table,
)
from dlm_rag.files.checked_json import read_json_or_empty
from dlm_rag.files.paths import write_text_atomic

CELL_FILE = "cell.json"  # beside a cell's results: the words that it was run with
HEADINGS = (
    "data set", "model", "precision", "seed", "policy", "questions", "exact match %", "above the first",
    "F1 %", "evidence recall %", "forwards", "searches", "answers/s", "J/answer",
)  # fmt: skip
NAMES = 5  # headings that tell cells apart
SHOWN_METRICS = ("exact_match", "f1", "recall_last", "forwards", "searches", "answers/s")


@dataclass(frozen=True)
class Cell:
    """One evaluation: its folder, its words, and what tells it apart in the table."""

    folder: Path
    words: tuple[str, ...]
    model: str
    dataset: str
    precision: str
    seed: int

    @property
    def is_done(self) -> bool:
        done = read_json_or_empty(self.folder / CELL_FILE).get("words") == [*self.words]
        return done and (self.folder / "scores.json").is_file()

    @property
    def name(self) -> str:
        return " ".join((self.dataset, self.model, self.precision, f"seed {self.seed}"))


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
        shown = format_metrics(setting.groups["all"], SHOWN_METRICS)
        less = result.scores.first_minus.get(policy, {}).get("all", {}).get("exact_match")
        above = less and Estimate(0 - less.mean, 0 - less.high, 0 - less.low)
        shown.insert(1, format_metric("exact_match", above, signed=True))
        joules = (result.record["settings"][policy].get("energy") or {}).get("joules_per_answer")
        names = (cell.dataset, cell.model, cell.precision, str(cell.seed), policy)
        spent = "-" if joules is None else f"{joules:.3g}"
        rows.append([*names, f"{result.scores.questions['all']:,}", *shown, spent])
    return rows
