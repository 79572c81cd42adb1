"""The table of a benchmark, all cells in one, and pictures of the fronts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dlm_rag.evaluation.compare import SettingMetrics
from dlm_rag.evaluation.metrics import Estimate
from dlm_rag.evaluation.plots import plot_fronts
from dlm_rag.evaluation.stored_results import StoredResult, read_result
from dlm_rag.evaluation.tables import (
    ResultTable,
    compute_pareto_front,
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
    "F1 %", "evidence recall %", "forwards", "searches", "answers/s", "J/answer", "front",
)  # fmt: skip
NAMES = 5  # headings that tell cells apart
FRONT_COSTS = ("forwards", "searches", "joules")  # of an answer
Summaries = Mapping[tuple["Cell", str], SettingMetrics]  # of each policy of the cells of a data set
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


def write_benchmark_tables(out: Path, cells: Sequence[Cell], failed: Mapping[str, str]) -> None:
    """Writes table.md and a picture of each data set's fronts; prints the table.

    failed: cells with their errors.
    """
    rows, pictures = list[list[str]](), list[Path]()
    for dataset in dict.fromkeys(cell.dataset for cell in cells):
        results = {cell: read_result(cell.folder) for cell in cells if cell.dataset == dataset}
        summaries = summarise_cells(results)
        rows += build_rows(results, summaries)
        if number_candidates(summaries):
            pictures.append(out / f"fronts_{dataset}.png")
            plot_cells(pictures[-1], summaries)
    table = ResultTable("Benchmark, with 95 % intervals; above the first: paired", HEADINGS, rows)
    brief = [[" ".join(row[:NAMES]), *row[NAMES:]] for row in table.rows]
    print_tables(Console(), [ResultTable(table.title, ["cell", *table.headings[NAMES:]], brief)])
    found = [table]
    if failed:
        found.append(ResultTable("Failed", ("cell", "error"), [*map(list, failed.items())]))
    shown = [f"![exact match by cost, {path.stem}]({path.name})\n" for path in pictures]
    write_text_atomic(out / "table.md", "\n".join([*map(render_markdown_table, found), *shown]))
    print(f"table.md and pictures are in {out}")


def summarise_cells(results: Mapping[Cell, StoredResult]) -> Summaries:
    """The means of all questions; "joules" are those an answer, None where not measured."""
    found = {}
    for cell, result in results.items():
        for policy, setting in result.scores.settings.items():
            joules = (result.record["settings"][policy].get("energy") or {}).get("joules_per_answer")
            known = None if joules is None else Estimate(joules, joules, joules)
            found[cell, policy] = setting.groups["all"] | {"joules": known}
    return found


def number_candidates(summaries: Summaries) -> dict[str, SettingMetrics]:
    """Those that may be on a front, by their number: an oracle, which knows the support, is no rival."""
    named = enumerate(summaries.items())
    return {str(n): metrics for n, ((_, policy), metrics) in named if "oracle" not in policy}


def build_rows(results: Mapping[Cell, StoredResult], summaries: Summaries) -> list[list[str]]:
    """The rows of one data set: a policy each, of every cell."""
    named = number_candidates(summaries)
    fronts = {cost: {*compute_pareto_front(named, cost)} for cost in FRONT_COSTS}
    rows = []
    for n, ((cell, policy), metrics) in enumerate(summaries.items()):
        scores, joules = results[cell].scores, metrics["joules"]
        shown = format_metrics(metrics, SHOWN_METRICS)
        less = scores.first_minus.get(policy, {}).get("all", {}).get("exact_match")
        above = less and Estimate(0 - less.mean, 0 - less.high, 0 - less.low)
        shown.insert(1, format_metric("exact_match", above, signed=True))
        front = ", ".join(cost for cost, names in fronts.items() if str(n) in names) or "-"
        names = (cell.dataset, cell.model, cell.precision, str(cell.seed), policy)
        spent = "-" if joules is None else f"{joules.mean:.3g}"
        rows.append([*names, f"{scores.questions['all']:,}", *shown, spent, front])
    return rows


def plot_cells(path: Path, summaries: Summaries) -> None:
    """Exact match against what an answer takes: a colour each model and precision, a marker each policy."""
    several = len({cell.precision for cell, _ in summaries}) > 1
    labels = {
        str(n): (f"{cell.model}, {cell.precision}" if several else cell.model, policy)
        for n, (cell, policy) in enumerate(summaries)
    }
    named = number_candidates(summaries)
    labels = {n: labels[n] for n in named}
    costs = [cost for cost in FRONT_COSTS if any(metrics[cost] for metrics in named.values())]
    plot_fronts(path, named, labels, costs or FRONT_COSTS[:1], "")
