"""Tables of an evaluation, on the screen and in Markdown."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlm_rag.energy.meter import format_three_digits
from dlm_rag.evaluation.compare import GroupSummary, QuestionGroups
from dlm_rag.evaluation.metrics import Estimate
from dlm_rag.text import replace_control_chars

if TYPE_CHECKING:
    pass

SettingMetrics = Mapping[str, Estimate | None]  # of one setting in one group of questions
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


def compute_plot_costs(metrics: SettingMetrics) -> dict[str, Estimate | None]:
    """What the two pictures have along their lower edge."""
    return {"answers/s": compute_answers_per_second(metrics["seconds"]), "forwards": metrics["forwards"]}


def compute_pareto_front(summaries: Mapping[str, SettingMetrics], cost: str) -> list[str]:
    """The settings that no other beats, cheapest first; of settings that are equal all stay.

    To beat is to be more exact at no more cost, or cheaper and no less exact. cost: "answers/s", of which
    more is cheaper, or "forwards".
    """
    points = {}
    for name, metrics in summaries.items():
        match, price = metrics["exact_match"], compute_plot_costs(metrics)[cost]
        if match is not None and price is not None:
            points[name] = (-price.mean if cost == "forwards" else price.mean, match.mean)

    def beaten(point: tuple[float, float]) -> bool:
        return any(o != point and o[0] >= point[0] and o[1] >= point[1] for o in points.values())

    kept = [name for name, point in points.items() if not beaten(point)]
    return sorted(kept, key=lambda name: -points[name][0])


def split_setting_name(name: str, swept: Iterable[str]) -> list[str]:
    """The parts of a setting's name, those of swept keys by their values: `["static", "0.9"]`."""
    keys = {*swept}
    return [part.partition("=")[2] if part.partition("=")[0] in keys else part for part in name.split("+")]


def build_overview_table(
    count: int,
    summaries: Mapping[str, SettingMetrics],
    against: Mapping[str, SettingMetrics],
    swept: Iterable[str] = (),
) -> ResultTable:
    """All settings in one table, a row each.

    count: of the questions. against: the first minus each of the others, paired. swept: keys, of which the
    rows have the values alone.
    """
    swept = list(swept)
    fronts = {cost: compute_pareto_front(summaries, cost) for cost in ("answers/s", "forwards")}
    rows = []
    for name, metrics in summaries.items():
        less = against.get(name, {}).get("exact_match")
        rows.append(
            [
                ", ".join(split_setting_name(name, swept)),
                format_percent(metrics["exact_match"]),
                format_percent(less and Estimate(0 - less.mean, 0 - less.high, 0 - less.low), signed=True),
                format_percent(metrics["f1"]),
                format_percent(metrics["recall_last"]),
                format_estimate(metrics["forwards"]),
                format_estimate(metrics["searches"]),
                format_estimate(compute_answers_per_second(metrics["seconds"])),
                ", ".join(cost for cost, names in fronts.items() if name in names) or "-",
            ]
        )
    headings = ["setting", "exact match %", "above the first", "F1 %", "evidence recall %", "forwards",
                "searches", "answers/s", "Pareto front"]  # fmt: skip
    return ResultTable(", ".join(["All settings", *swept]) + f": {count} questions", headings, rows)


def format_percent(estimate: Estimate | None, signed: bool = False) -> str:
    """`85.0 [80, 89]`: a share in percent with its interval."""
    return _format_interval(estimate, 100, (1, 0), signed)


def format_estimate(estimate: Estimate | None, signed: bool = False) -> str:
    """`2.41 [2.30, 2.52]`: a quantity with its interval."""
    return _format_interval(estimate, 1, (2, 2), signed)


def _format_interval(estimate: Estimate | None, scale: int, digits: tuple[int, int], signed: bool) -> str:
    if estimate is None:
        return "-"
    sign, (fine, coarse) = "+" if signed else "", digits
    mean, low, high = (scale * value for value in (estimate.mean, estimate.low, estimate.high))
    return f"{mean:{sign}.{fine}f} [{low:{sign}.{coarse}f}, {high:{sign}.{coarse}f}]"


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
    lines = escape_markdown_cells([replace_control_chars(line) for line in notes])
    listed = ["".join(f"- {line}\n" for line in lines)] if lines else []
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
