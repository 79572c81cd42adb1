"""Tables of an evaluation and of a benchmark's cells, and the picture of a sweep; results read again."""

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlm_rag.config import load_config
from dlm_rag.config.fields import flatten_settings
from dlm_rag.data.hub_datasets import DATA_FOLDER, FILES, SPLIT_RULES, get_local_path, list_dataset_files
from dlm_rag.energy import format_three_digits
from dlm_rag.errors import ConfigError
from dlm_rag.evaluation import compare
from dlm_rag.evaluation.compare import GroupSummary, MetricsBySetting, SettingMetrics, SummaryBySetting
from dlm_rag.evaluation.metrics import SCORE_METRICS, SHARE_METRICS, Estimate
from dlm_rag.files.checked_json import parse_json_object, read_json_or_empty, validate_json_value
from dlm_rag.files.hub import ADAPTER_CONFIG
from dlm_rag.files.paths import open_atomic_file, read_file_state, write_text_atomic
from dlm_rag.text import replace_control_chars

COST_METRICS = ("forwards", "searches")
OVERVIEW = ("exact match %", "above the first", "F1 %", "evidence recall %", *COST_METRICS, "answers/s")
USAGE_METRICS = {"requests": "requests", "prompt_tokens": "prompt tokens", "tokens": "tokens of replies",
                 "cut_replies": "replies that were cut"}  # fmt: skip
ABSTENTION_METRICS = {"abstained": "abstains %", "answered_match": "exact match % of answers given",
                      "exact_match": "of all questions"}  # fmt: skip
FAILURE_METRICS = {"failed": "failed %, counted as wrong", "exact_match": "exact match % of all questions"}
PLOT_COSTS = ("answers/s", "forwards")  # what the two pictures of a sweep have along their lower edge
MOSTLY = 0.5  # share of questions above which abstaining is what is to be said
CELL_FRAME_CHARS = 3  # characters that a table puts around a cell
READ_KEYS = "questions=", "prompt=", "model.", "retrieval."  # settings that may name what a cell reads
CELL_FILE = "cell.json"  # beside a cell's results: the words that it was run with, and what they named
HEADINGS = ("data set", "model", "seed", "policy", "questions", *OVERVIEW, "J/answer")
NAMES = 4  # headings that tell cells apart


class ResultTable(NamedTuple):
    """A table: its title, the headings, and rows of as many cells."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def get_metric(metrics: SettingMetrics, name: str) -> Estimate | None:
    """A metric of a setting, "answers/s" (the inverse of seconds an answer) among them."""
    if name != "answers/s":
        return metrics[name]
    seconds = metrics["seconds"]
    if seconds is None or min(seconds.mean, seconds.low, seconds.high) <= 0:
        return None
    return Estimate(1 / seconds.mean, 1 / seconds.high, 1 / seconds.low)


def compute_pareto_front(summaries: MetricsBySetting, cost: str) -> list[str]:
    """The settings that no other beats, cheapest first; of settings that are equal all stay.

    To beat is to be more exact at no more cost, or cheaper and no less exact. cost: "answers/s", of which
    more is cheaper, or what is spent on an answer: "forwards", "searches".
    """
    points = {}
    for name, metrics in summaries.items():
        match, price = metrics["exact_match"], get_metric(metrics, cost)
        if match is not None and price is not None:
            points[name] = (price.mean if cost == "answers/s" else -price.mean, match.mean)

    def is_beaten(point: tuple[float, float]) -> bool:
        return any(o != point and o[0] >= point[0] and o[1] >= point[1] for o in points.values())

    kept = [name for name, point in points.items() if not is_beaten(point)]
    return sorted(kept, key=lambda name: -points[name][0])


def split_setting_name(name: str, swept: Iterable[str]) -> list[str]:
    """The parts of a setting's name, those of swept keys by their values: `["static", "0.9"]`."""
    keys = {*swept}
    parts = [(part, *part.partition("=")[::2]) for part in name.split("+")]
    return [value if key in keys else part for part, key, value in parts]


def format_metric(name: str, estimate: Estimate | None, signed: bool = False) -> str:
    """A share in percent, `85.0 [80, 89]`, or a quantity, `2.41 [2.30, 2.52]`, with its interval."""
    if estimate is None:
        return "-"
    scale, fine, coarse = (100, 1, 0) if name in SHARE_METRICS else (1, 2, 2)
    mean, low, high = (scale * value for value in (estimate.mean, estimate.low, estimate.high))
    sign = "+" if signed else ""
    return f"{mean:{sign}.{fine}f} [{low:{sign}.{coarse}f}, {high:{sign}.{coarse}f}]"


def format_metrics(metrics: SettingMetrics, names: Iterable[str], signed: bool = False) -> list[str]:
    """A cell for each of the metrics."""
    return [format_metric(name, get_metric(metrics, name), signed) for name in names]


def format_overview(metrics: SettingMetrics, against: SettingMetrics) -> list[str]:
    """The cells of a setting below the headings `OVERVIEW`; against: the first minus this one, paired."""
    less = against.get("exact_match")
    above = less and Estimate(0 - less.mean, 0 - less.high, 0 - less.low)
    shown = format_metrics(metrics, ("exact_match", "f1", "recall_last", *COST_METRICS, "answers/s"))
    return [shown[0], format_metric("exact_match", above, signed=True), *shown[1:]]


def build_overview_table(
    count: int, summaries: MetricsBySetting, against: MetricsBySetting, swept: Iterable[str] = ()
) -> ResultTable:
    """All settings in one table, a row each.

    count: of questions. against: the first minus each other, paired. swept: keys of which rows have values.
    """
    swept, fronts = list(swept), {cost: compute_pareto_front(summaries, cost) for cost in PLOT_COSTS}
    rows = []
    for name, metrics in summaries.items():
        shown = format_overview(metrics, against.get(name, {}))
        front = ", ".join(cost for cost, names in fronts.items() if name in names) or "-"
        rows.append([", ".join(split_setting_name(name, swept)), *shown, front])
    title = ", ".join(["All settings", *swept]) + f": {count} questions"
    return ResultTable(title, ["setting", *OVERVIEW, "Pareto front"], rows)


def build_comparison_tables(
    groups: compare.QuestionGroups, summaries: SummaryBySetting, against: SummaryBySetting, f1_rule: str
) -> list[ResultTable]:
    """Exact match and recall by group, what it took, and the paired differences from the first."""

    def by_group(title: str, of: SummaryBySetting, metric: str, signed: bool) -> ResultTable:
        rows = []
        for group, places in groups.items():
            cells = [format_metric(metric, summary[group][metric], signed) for summary in of.values()]
            rows.append([f"{group} ({len(places)})", *cells])
        return ResultTable(title, ["questions", *of], rows)

    def overall(
        title: str, of: SummaryBySetting, columns: Mapping[str, str], signed: bool = False
    ) -> ResultTable:
        rows = [[name, *format_metrics(summary["all"], columns, signed)] for name, summary in of.items()]
        return ResultTable(title, ["setting", *columns.values()], rows)

    first, costs = next(iter(summaries)), {name: name for name in COST_METRICS}
    columns = {"f1": f"F1 ({f1_rule}) %", "cover_match": "cover-EM %", "recall_last": "evidence recall %"}
    columns |= costs | {"tokens_per_forward": "tokens/forward", "answers/s": "answers/s"}
    found = [
        by_group("Exact match %, with 95 % intervals", summaries, "exact_match", False),
        overall("All questions", summaries, columns),
        by_group("Evidence recall after the search with the question, %", summaries, "recall_first", False),
        by_group("Evidence recall after the last step, %", summaries, "recall_last", False),
    ]
    abstained = (summary["all"]["abstained"] for summary in summaries.values())
    if any(share is not None and share.mean for share in abstained):
        found.append(overall("Abstentions, and what is answered", summaries, ABSTENTION_METRICS))
    if any(summary["all"]["failed"].mean for summary in summaries.values()):  # type: ignore[union-attr]
        found.append(overall("Questions that failed", summaries, FAILURE_METRICS))
    if served := {name: each for name, each in summaries.items() if each["all"]["requests"]}:
        found.append(overall("Asked of a server, an answer", served, USAGE_METRICS))
    if against:
        title = f"Exact match: {first} minus each other setting, points (paired)"
        found.append(by_group(title, against, "exact_match", True))
        title = f"Costs per question: {first} minus each other setting (paired)"
        found.append(overall(title, against, costs, True))
    return found


def build_energy_table(energy: Mapping[str, Mapping[str, Any] | None]) -> list[ResultTable]:
    """What each setting has spent (`summarise_energy`), in a table; none where nothing was measured. Of a
    run in parts only those that were measured count, with their own answers."""
    if not any(energy.values()):
        return []
    keys = ("joules_per_answer", "watts", "joules", "seconds")
    rows = []
    for name, found in energy.items():
        known = found or {"sensor": "not measured"}
        values = [known.get(key) for key in keys]
        cells = ["-" if value is None else format_three_digits(value) for value in values]
        rows.append([name, *cells, str(known["sensor"])])
    headings = ["setting", "J/answer", "W", "J", "s", "sensor"]
    return [ResultTable("Energy, measured", headings, rows)]


def summarize_findings(overall: MetricsBySetting, against: MetricsBySetting) -> list[str]:
    """What came of it in a sentence, and in another what is wrong where nothing can have come of it.

    overall: all questions under each setting. against: the first minus each other, paired; held against
    the first is `static` where it is there, or the next setting.
    """
    first, metrics = next(iter(overall.items()))
    gold = overall.get("oracle", {}).get("exact_match")
    match, abstained = metrics["exact_match"], metrics.get("abstained")
    rival = "static" if "static" in against else next(iter(against), "")
    said = f"{first}: exact match {format_metric('exact_match', match)} %"
    if rival and (less := against[rival]["exact_match"]):
        said = f"{first} {format_metric('exact_match', less, signed=True)} over {rival}"
        if (cost := against[rival]["forwards"]) is not None:
            said += f" at {abs(cost.mean):.1f} {'fewer' if cost.mean <= 0 else 'more'} forwards"
    elif (cost := metrics["forwards"]) is not None:
        said += f" at {cost.mean:.1f} forwards"
    found = [said if gold is None else f"{said}; gold passages {100 * gold.mean:.1f}"]
    wrong = "this model cannot read these questions"
    if gold is not None and not gold.mean:
        found.append(f"{wrong}: with the gold passages it answers none of them")
    elif abstained is not None and abstained.mean > MOSTLY:
        found.append(f"{wrong}: it abstains on {abstained.mean:.0%} of them")
    return found


def print_tables(console: Console, found: Sequence[ResultTable]) -> None:
    """The tables on a terminal, the first at the end, where the eyes are; names are no markup. A table that
    is too wide is turned, so that its columns become rows; if that does not help, cells wrap."""

    def measure(columns: Iterable[Sequence[Text]]) -> int:
        return sum(max(cell_len(cell.plain) for cell in column) + CELL_FRAME_CHARS for column in columns)

    for title, headings, rows in reversed(found):
        grid = [[Text(replace_control_chars(cell)) for cell in row] for row in (headings, *rows)]
        turned = [[*column] for column in zip(*grid, strict=True)]
        if measure(turned) >= console.width > measure(grid):
            grid = turned
        table = Table(title=Text(replace_control_chars(title)), title_justify="left")
        for number, heading in enumerate(grid[0]):
            table.add_column(heading, justify="right" if number else "left")
        for row in grid[1:]:
            table.add_row(*row)
        console.print(table)


def render_markdown_report(found: Sequence[ResultTable], stamp: Mapping[str, Any]) -> str:
    """The tables, and a line that says where they come from."""
    keys = ("commit", "date", "device", "threads", "attention", "seed")
    said = {key: stamp.get(key, "unknown") for key in keys}  # another version may have begun the run
    source = "Commit {commit}, {date}, {device}, {threads} threads, attention {attention}, seed {seed}.\n"
    return "\n".join([*map(render_markdown_table, found), source.format(**said)])


def render_markdown_table(grid: ResultTable) -> str:
    """The grid in Markdown, under its title."""
    headings, *rows = (
        [re.sub(r"([\\`*<|])", r"\\\1", replace_control_chars(cell)) for cell in row]
        for row in (grid.headings, *grid.rows)
    )
    rule = ["---", *["---:"] * (len(headings) - 1)]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))
    return f"**{replace_control_chars(grid.title)}**\n\n{lines}\n"


@dataclass(frozen=True)
class StoredSetting:
    """What is read again of a setting: its means by group, the stamp of its answers, what it spent."""

    groups: GroupSummary
    stamp: dict[str, Any]
    energy: dict[str, Any] | None = None


@dataclass(frozen=True)
class StoredResult:
    """What is read again of a scores.json: the settings, and how many questions there are by group."""

    questions: dict[str, int]
    settings: dict[str, StoredSetting]
    first_minus: dict[str, GroupSummary]
    swept: dict[str, list[str]] = field(default_factory=dict)
    command: str = ""


def read_result(path: Path) -> StoredResult:
    """The result in a folder, or of its scores.json. Raises `ConfigError` for anything else."""
    file = path / "scores.json" if path.is_dir() else path
    none = f"{path} is not a result: name a folder of evaluate's --out that has a scores.json"
    if not file.is_file():
        raise ConfigError(none)
    record = parse_json_object(file.read_bytes(), str(file), ConfigError)
    found = validate_json_value(StoredResult, record, none, ConfigError)
    grouped: list[Mapping[str, Any]] = [found.questions, *found.first_minus.values()]
    grouped += [setting.groups for setting in found.settings.values()]
    if not found.settings or any("all" not in groups for groups in grouped):
        raise ConfigError(none)
    return found


def build_result_table(result: StoredResult) -> ResultTable:
    """The table of all questions, a row for each setting."""
    none = dict.fromkeys(SCORE_METRICS)
    summaries = {name: none | setting.groups["all"] for name, setting in result.settings.items()}
    against = {name: groups["all"] for name, groups in result.first_minus.items()}
    return build_overview_table(result.questions["all"], summaries, against, result.swept)


class Cell(NamedTuple):
    """One evaluation: its folder, its words, and what tells it apart in the table."""

    folder: Path
    words: tuple[str, ...]
    model: str
    dataset: str
    seed: int

    @property
    def has_scores(self) -> bool:
        done = read_json_or_empty(self.folder / CELL_FILE).get("words") == [*self.words]
        return done and (self.folder / "scores.json").is_file()

    @property
    def is_done(self) -> bool:
        noted = read_json_or_empty(self.folder / CELL_FILE)
        same = "inputs" not in noted or noted["inputs"] == self.list_inputs()
        return self.has_scores and not noted.get("failed") and same

    @property
    def name(self) -> str:
        return " ".join((self.dataset, self.model, f"seed {self.seed}"))

    def list_inputs(self) -> list[list[Any]]:
        """Each file of what the words name, a file, a folder or a data set: path, size, time (ns)."""
        written = "engine.store=", "retrieval.index_dir="  # by the cells themselves
        texts = [word.partition("=")[2] or word for word in self.words if not word.startswith(written)]
        for name in [text for text in texts if text.endswith((".yaml", ".yml"))]:
            with suppress(ConfigError):  # the cell itself will say so
                read = {f"{key}=": str(value) for key, value in flatten_settings(load_config(name)).items()}
                texts += [read[key] for key in read if key.startswith(READ_KEYS) and key not in written]
        paths = map(os.path.expanduser, texts)  # as os.path does: no error for words that are no path
        named = {Path(path) for path in paths if os.path.exists(path)} - {self.folder}  # noqa: PTH110
        bases = (read_json_or_empty(path / ADAPTER_CONFIG).get("base_model_name_or_path") for path in named)
        named |= {Path(base) for base in bases if isinstance(base, str) and os.path.exists(base)}  # noqa: PTH110
        values = [word.rpartition("=")[2] for word in self.words]
        rule = next((value for value in values if value in SPLIT_RULES), "search_r1")
        for value in {*values} & {file.name for file in FILES}:
            with suppress(ConfigError):  # a data set that the rule does not have
                named |= {get_local_path(x, rule, DATA_FOLDER) for x in list_dataset_files(value, rule)}
        files = {path for each in named for path in (each, *each.rglob("*"))}
        return [[str(path), *read_file_state(path)[:2]] for path in sorted(files) if path.is_file()]


def write_benchmark_table(out: Path, cells: Sequence[Cell], failed: Mapping[str, str]) -> None:
    """Writes table.md and prints the table. failed: cells with their errors."""
    rows = [row for cell in cells for row in build_rows(cell, read_result(cell.folder))]
    table = ResultTable("Benchmark, with 95 % intervals; above the first: paired", HEADINGS, rows)
    brief = [[" ".join(row[:NAMES]), *row[NAMES:]] for row in rows]
    print_tables(Console(), [ResultTable(table.title, ["cell", *HEADINGS[NAMES:]], brief)])
    failures = ResultTable("Failed", ("cell", "error"), [*failed.items()])
    found = [table, failures] if failed else [table]
    write_text_atomic(out / "table.md", "\n".join(map(render_markdown_table, found)))
    print(f"table.md is in {out}")


def build_rows(cell: Cell, result: StoredResult) -> list[list[str]]:
    """Returns the rows of a cell, a policy each."""
    rows = []
    for policy, setting in result.settings.items():
        less = result.first_minus.get(policy, {}).get("all", {})
        joules = (setting.energy or {}).get("joules_per_answer")
        names = [cell.dataset, cell.model, str(cell.seed), policy, f"{result.questions['all']:,}"]
        spent = "-" if joules is None else f"{joules:.3g}"
        rows.append([*names, *format_overview(setting.groups["all"], less), spent])
    return rows


MAX_LABELLED_POINTS = 16  # in a panel; more names would cover each other


def plot_pareto(path: Path, summaries: MetricsBySetting, swept: Iterable[str] = ()) -> None:
    """Exact match against answers a second and against forwards, with the fronts. The first part of a
    setting's name is its colour; swept: as in `build_overview_table`."""
    import matplotlib

    matplotlib.use("agg")
    keys = list(swept)
    labels = {name: split_setting_name(replace_control_chars(name), keys) for name in summaries}
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box is drawn instead
        from matplotlib import pyplot

        size = 5.5 * len(PLOT_COSTS), 5
        figure, axes = pyplot.subplots(1, len(PLOT_COSTS), figsize=size, sharey=True, layout="constrained")
        for axis, cost in zip(axes, PLOT_COSTS, strict=True):
            _draw_costs(axis, cost, summaries, labels)
        axes[0].set_ylabel("exact match %")
        drawn = [axis.get_legend_handles_labels() for axis in axes]
        seen = {label: handle for drawn_of in drawn for handle, label in zip(*drawn_of, strict=True)}
        figure.legend(seen.values(), seen, loc="outside right upper", frameon=False, title="\n".join(keys))
        with open_atomic_file(path) as scratch:
            figure.savefig(scratch, dpi=150)
        pyplot.close(figure)


def _draw_costs(axis: Any, cost: str, summaries: MetricsBySetting, labels: dict[str, list[str]]) -> None:
    """One panel: the settings at what an answer costs, and the front."""
    firsts = dict.fromkeys(first for first, *_ in labels.values())
    colours = {first: f"C{n % 10}" for n, first in enumerate(firsts)}  # of matplotlib's cycle
    points = {name: (get_metric(m, cost), m["exact_match"]) for name, m in summaries.items()}
    known = {name: (price, match) for name, (price, match) in points.items() if price and match}
    for name, (price, match) in known.items():
        first, place = labels[name][0], (price.mean, 100 * match.mean)
        axis.errorbar(
            *place, xerr=_error_bar(price), yerr=_error_bar(match, 100), color=colours[first], label=first,
            marker="o", markersize=7, elinewidth=0.6, alpha=0.9,
        )  # fmt: skip
        if len(known) <= MAX_LABELLED_POINTS:
            axis.annotate(", ".join(labels[name]), place, (4, 4), textcoords="offset points", fontsize=7)
    front = [known[name] for name in compute_pareto_front(summaries, cost)]
    line = [(price.mean, 100 * match.mean) for price, match in front]
    axis.plot(*zip(*line, strict=True), color="0.6", linewidth=1.2, zorder=0, label="Pareto front")
    axis.set_xlabel(f"{cost}, {'more' if cost == 'answers/s' else 'fewer'} is better")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="0.92")


def _error_bar(estimate: Estimate, scale: float = 1) -> list[list[float]]:
    return [[scale * (estimate.mean - estimate.low)], [scale * (estimate.high - estimate.mean)]]
