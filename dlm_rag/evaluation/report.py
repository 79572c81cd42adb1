"""An evaluation as a person reads it: tables on the screen and in Markdown, a picture."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlm_rag.energy.meter import format_three_digits
from dlm_rag.evaluation.compare import Estimate, GroupSummary, QuestionGroups, format_hops
from dlm_rag.files.atomic import open_atomic_file
from dlm_rag.text import replace_control_chars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COST_METRICS = ("forwards", "searches")
CELL_FRAME_CHARS = 3  # characters that a table puts around a cell


@dataclass(frozen=True)
class ResultTable:
    """A table: its title, the headings, and rows of as many cells, all without control characters."""

    title: str
    headings: list[str]
    rows: list[list[str]]

    def __post_init__(self) -> None:
        for cells in (self.headings, *self.rows):
            cells[:] = map(replace_control_chars, cells)

    def split_to_width(self, width: int) -> Iterator["ResultTable"]:
        """The grid cut between columns into grids that a terminal of so many characters shows unfolded."""
        columns = list(zip(self.headings, *self.rows, strict=True))
        needed = [max(map(cell_len, column)) + CELL_FRAME_CHARS for column in columns]
        begin = 1
        while begin < len(columns):
            end = begin + 1
            while end < len(columns) and needed[0] + sum(needed[begin : end + 1]) <= width:
                end += 1
            headings, *rows = zip(columns[0], *columns[begin:end], strict=True)
            yield ResultTable(self.title, list(headings), [list(row) for row in rows])
            begin = end


def format_percent(estimate: Estimate | None, signed: bool = False) -> str:
    """`85.0 [80, 89]`: a share in percent with its interval."""
    if estimate is None:
        return "-"
    sign = "+" if signed else ""
    mean, low, high = (100 * value for value in (estimate.mean, estimate.low, estimate.high))
    return f"{mean:{sign}.1f} [{low:{sign}.0f}, {high:{sign}.0f}]"


def format_estimate(estimate: Estimate | None, signed: bool = False) -> str:
    """`2.41 [2.30, 2.52]`: a quantity with its interval."""
    if estimate is None:
        return "-"
    sign = "+" if signed else ""
    return f"{estimate.mean:{sign}.2f} [{estimate.low:{sign}.2f}, {estimate.high:{sign}.2f}]"


def compute_answers_per_second(seconds: Estimate | None) -> Estimate | None:
    """The inverse of seconds an answer."""
    if seconds is None or min(seconds.mean, seconds.low, seconds.high) <= 0:
        return None
    return Estimate(1 / seconds.mean, 1 / seconds.high, 1 / seconds.low)


def build_comparison_tables(
    groups: QuestionGroups,
    summaries: Mapping[str, GroupSummary],
    against: Mapping[str, GroupSummary],
    f1_rule: str,
) -> list[ResultTable]:
    """Exact match and recall by group, what it took, and the paired differences from the first."""
    counted = {group: f"{group} ({len(places)})" for group, places in groups.items()}

    def by_group(
        title: str, of: Mapping[str, GroupSummary], metric: str, signed: bool = False
    ) -> ResultTable:
        rows = [
            [label, *(format_percent(summary[group][metric], signed) for summary in of.values())]
            for group, label in counted.items()
        ]
        return ResultTable(title, ["questions", *of], rows)

    costs = [
        [
            name,
            format_percent(summary["all"]["f1"]),
            *(format_estimate(summary["all"][cost]) for cost in COST_METRICS),
            format_estimate(summary["all"]["tokens_per_forward"]),
            format_estimate(compute_answers_per_second(summary["all"]["seconds"])),
        ]
        for name, summary in summaries.items()
    ]
    headings = ["setting", f"F1 ({f1_rule}) %", *COST_METRICS, "tokens/forward", "answers/s"]
    found = [
        by_group("Exact match %, with 95 % intervals", summaries, "exact_match"),
        ResultTable("All questions", headings, costs),
        by_group("Evidence recall after the search with the question, %", summaries, "recall_first"),
        by_group("Evidence recall after the last step, %", summaries, "recall_last"),
    ]
    if against:
        title = f"Exact match, points by which {next(iter(summaries))} is above (paired)"
        found.append(by_group(title, against, "exact_match", signed=True))
        took = [
            [name, *(format_estimate(less["all"][cost], signed=True) for cost in COST_METRICS)]
            for name, less in against.items()
        ]
        title = f"All questions, by which {next(iter(summaries))} takes more (paired)"
        found.append(ResultTable(title, ["setting", *COST_METRICS], took))
    return found


def build_energy_table(energy: Mapping[str, Mapping[str, Any] | None]) -> list[ResultTable]:
    """What each setting has spent (`summarise_energy`), in a table; none where nothing was measured.

    Of a run in parts only those that were measured count, with their own answers.
    """
    if not any(energy.values()):
        return []
    headings = ["setting", "J/answer", "tokens/J", "W", "J", "±", "above idle", "s", "answers", "of"]
    rows = []
    for name, found in energy.items():
        if found is None:
            rows.append([name, *["-"] * (len(headings) - 2), "not measured"])
            continue
        joules, idle, each = found["joules"], found["idle_joules"], found["joules_per_answer"]
        above = None if idle is None else joules - idle
        values = (each, found["tokens_per_joule"], found["watts"], joules, found["error"], above)
        cells = [
            "-" if value is None else format_three_digits(value) for value in (*values, found["seconds"])
        ]
        rows.append([name, *cells, f"{found['answers']:,.0f}", f"{found['sensor']}: {found['scope']}"])
    return [ResultTable("Energy, measured (tokens: committed before the end)", headings, rows)]


def print_tables(console: Console, found: Sequence[ResultTable]) -> None:
    """The tables on a terminal, the first at the end, where the eyes are; names are no markup."""
    for grid in (part for whole in reversed(found) for part in whole.split_to_width(console.width - 1)):
        table = Table(title=Text(grid.title), title_justify="left")
        for number, heading in enumerate(grid.headings):
            table.add_column(Text(heading), justify="right" if number else "left")
        for row in grid.rows:
            table.add_row(*map(Text, row))
        console.print(table)


def render_markdown_report(
    found: Sequence[ResultTable], stamp: Mapping[str, Any], notes: Sequence[str] = ()
) -> str:
    """The tables, notes and where they come from."""
    listed = (
        ["".join(f"- {escape_markdown_cells([replace_control_chars(line)])[0]}\n" for line in notes)]
        if notes
        else []
    )
    return "\n".join([*map(render_markdown_table, found), *listed, format_provenance(stamp)])


def render_markdown_table(grid: ResultTable) -> str:
    """The grid in Markdown, under its title."""
    rule = ["---", *["---:"] * (len(grid.headings) - 1)]
    lines = [escape_markdown_cells(grid.headings), rule, *map(escape_markdown_cells, grid.rows)]
    rows = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    return f"**{grid.title}**\n\n{rows}\n"


def format_provenance(stamp: Mapping[str, Any]) -> str:
    """A line that says where a result comes from."""
    keys = ("commit", "date", "device", "threads", "attention", "seed")
    said = {key: stamp.get(key, "unknown") for key in keys}  # another version may have begun the run
    return (
        f"Commit {said['commit']}, {said['date']}, {said['device']}, {said['threads']} threads, "
        f"attention {said['attention']}, seed {said['seed']}.\n"
    )


def escape_markdown_cells(cells: Sequence[str]) -> list[str]:
    """Cells of Markdown that show their texts as they are."""
    return [re.sub(r"([\\`*<|])", r"\\\1", cell) for cell in cells]


@contextmanager
def open_two_panels(path: Path, size: tuple[float, float]) -> Iterator[tuple["Figure", Any]]:
    """A figure of two panels with one y axis, saved as `path` at the end of the block."""
    import matplotlib

    matplotlib.use("agg")
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box is drawn instead
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
        for axis in axes:
            axis.spines[["top", "right"]].set_visible(False)
        yield figure, axes
        with open_atomic_file(path) as scratch:
            figure.savefig(scratch, dpi=150)
        pyplot.close(figure)


def plot_by_hops(path: Path, groups: QuestionGroups, summaries: Mapping[str, GroupSummary]) -> None:
    """Exact match and last evidence recall of every setting, by hops if they are known."""
    shown = [format_hops(n) for n in range(1, 100) if format_hops(n) in groups] or ["all"]
    below = max(map(len, summaries)) > 30  # names that would leave no room for the axes
    size = (11, 4.2 + 0.25 * len(summaries) * below)
    panels = {"exact_match": "exact match", "recall_last": "evidence recall after the last step"}
    with open_two_panels(path, size) as (figure, axes):
        for axis, (metric, title) in zip(axes, panels.items(), strict=True):
            for number, (name, summary) in enumerate(summaries.items()):
                points = [
                    (place, e) for place, g in enumerate(shown) if (e := summary[g][metric]) is not None
                ]
                if not points:
                    continue
                shift = 0.06 * (number - (len(summaries) - 1) / 2)
                axis.errorbar(
                    [place + shift for place, _ in points],
                    [100 * e.mean for _, e in points],
                    yerr=[
                        [100 * (e.mean - e.low) for _, e in points],
                        [100 * (e.high - e.mean) for _, e in points],
                    ],
                    marker="o", markersize=5, linewidth=1.6, capsize=2, label=replace_control_chars(name),
                )  # fmt: skip
            axis.set_title(title, loc="left", fontsize=11)
            axis.set_xticks(range(len(shown)), shown)
            axis.set_ylim(-3, 103)
            axis.grid(axis="y", color="0.9")
        axes[0].set_ylabel("%")
        figure.legend(
            *axes[0].get_legend_handles_labels(),
            loc="outside lower left" if below else "outside right center",
            frameon=False,
        )
