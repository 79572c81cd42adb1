"""The tables of a benchmark: all cells in one, in Markdown, LaTeX and HTML."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dlm_rag.evaluation.metrics import Estimate
from dlm_rag.evaluation.stored_results import StoredResult, read_result
from dlm_rag.evaluation.tables import (
    PLOT_COSTS,
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
SHOWN_METRICS = ("exact_match", "f1", "recall_last", "forwards", "searches", "answers/s")
_LATEX = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "^": r"\^{}"})


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
    """Writes table.md, table.tex and table.html, and prints the table; failed: cells with their errors."""
    rows = [row for dataset in dict.fromkeys(cell.dataset for cell in cells)
            for row in build_rows([cell for cell in cells if cell.dataset == dataset])]  # fmt: skip
    table = ResultTable("Benchmark, with 95 % intervals; above the first: paired", HEADINGS, rows)
    brief = [[" ".join(row[:NAMES]), *row[NAMES:]] for row in rows]
    print_tables(Console(), [ResultTable(table.title, ["cell", *HEADINGS[NAMES:]], brief)])
    errors = [ResultTable("Failed", ("cell", "error"), [*map(list, failed.items())])] if failed else []
    write_text_atomic(out / "table.md", "\n".join(map(render_markdown_table, [table, *errors])))
    write_text_atomic(out / "table.tex", render_latex_table(table))
    write_text_atomic(out / "table.html", render_html_tables([table, *errors]))
    print(f"table.md, table.tex and table.html are in {out}")


def build_rows(cells: Sequence[Cell]) -> list[list[str]]:
    """The rows of one data set: a policy each, of every cell."""
    results = {cell: read_result(cell.folder) for cell in cells}
    summaries = {
        (cell, policy): setting.groups["all"]
        for cell, result in results.items()
        for policy, setting in result.scores.settings.items()
    }
    named = {str(n): metrics for n, metrics in enumerate(summaries.values())}
    fronts = {cost: {*compute_pareto_front(named, cost)} for cost in PLOT_COSTS}
    rows = []
    for n, ((cell, policy), metrics) in enumerate(summaries.items()):
        scores = results[cell].scores
        shown = format_metrics(metrics, SHOWN_METRICS)
        less = scores.first_minus.get(policy, {}).get("all", {}).get("exact_match")
        above = less and Estimate(0 - less.mean, 0 - less.high, 0 - less.low)
        shown.insert(1, format_metric("exact_match", above, signed=True))
        front = ", ".join(cost for cost, names in fronts.items() if str(n) in names) or "-"
        names = (cell.dataset, cell.model, cell.precision, str(cell.seed), policy)
        asked, joules = f"{scores.questions['all']:,}", _format_joules(results[cell], policy)
        rows.append([*names, asked, *shown, joules, front])
    return rows


def _format_joules(result: StoredResult, policy: str) -> str:
    energy = result.record["settings"][policy].get("energy") or {}
    joules = energy.get("joules_per_answer")
    return "-" if joules is None else f"{joules:.3g}"


def render_latex_table(table: ResultTable) -> str:
    """The table for LaTeX with booktabs."""
    lines = [
        " & ".join(str(cell).translate(_LATEX) for cell in row) + r" \\"
        for row in (table.headings, *table.rows)
    ]
    columns = "l" * NAMES + "r" * (len(table.headings) - NAMES)
    head, *body = lines
    begin, end = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"], [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join([*begin, head, r"\midrule", *body, *end])


def render_html_tables(tables: Sequence[ResultTable]) -> str:
    """A page with the tables."""
    parts = [
        "<!doctype html><meta charset=utf-8><title>Benchmark</title>",
        "<style>body{font:15px system-ui;margin:2em}td,th{padding:.2em .7em;text-align:right}",
        "td:nth-child(-n+5),th:nth-child(-n+5){text-align:left}tr:nth-child(even){background:#f4f4f4}",
        "</style>",
    ]
    for table in tables:
        parts.append(f"<h2>{html.escape(table.title)}</h2><table>")
        for tag, row in (("th", table.headings), *(("td", row) for row in table.rows)):
            cells = "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row)
            parts.append(f"<tr>{cells}</tr>")
        parts.append("</table>")
    return "\n".join(parts) + "\n"
