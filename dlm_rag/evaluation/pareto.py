"""What exact match costs: the settings that no other one beats, in a table and a picture."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dlm_rag.evaluation.compare import Estimate
from dlm_rag.evaluation.report import (
    ResultTable,
    compute_answers_per_second,
    format_estimate,
    format_percent,
    open_two_panels,
)
from dlm_rag.text import replace_control_chars

SettingMetrics = Mapping[str, Estimate | None]  # of one setting in one group of questions
PLOT_MARKERS = "osD^vPX*<>"


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


def plot_pareto(path: Path, summaries: Mapping[str, SettingMetrics], swept: Iterable[str] = ()) -> None:
    """Exact match against answers a second and against forwards, with the fronts.

    The first part of a setting's name is its colour, the rest its marker; swept: as in
    `build_overview_table`.
    """
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    keys = list(swept)
    parts = {
        name: [replace_control_chars(part) for part in split_setting_name(name, keys)] for name in summaries
    }
    halves = {name: (first, ", ".join(rest)) for name, (first, *rest) in parts.items()}
    firsts, rests = (list(dict.fromkeys(half)) for half in zip(*halves.values(), strict=True))
    palette = pyplot.get_cmap("viridis")
    colours = {first: palette(0.9 * n / max(1, len(firsts) - 1)) for n, first in enumerate(firsts)}
    markers = {rest: PLOT_MARKERS[n % len(PLOT_MARKERS)] for n, rest in enumerate(rests)}
    with open_two_panels(path, (11, 5)) as (figure, axes):
        for axis, cost in zip(axes, ("answers/s", "forwards"), strict=True):
            for name, metrics in summaries.items():
                match, price = metrics["exact_match"], compute_plot_costs(metrics)[cost]
                if match is None or price is None:
                    continue
                axis.errorbar(
                    price.mean, 100 * match.mean,
                    **_make_error_bars(price, "xerr"), **_make_error_bars(match, "yerr", 100),
                    color=colours[halves[name][0]], marker=markers[halves[name][1]], markersize=7,
                    linewidth=0, elinewidth=0.6, alpha=0.9,
                )  # fmt: skip
            front = [summaries[name] for name in compute_pareto_front(summaries, cost)]
            best = [(compute_plot_costs(metrics)[cost], metrics["exact_match"]) for metrics in front]
            line = [(price.mean, 100 * match.mean) for price, match in best if price and match]
            axis.plot(*zip(*line, strict=True), color="0.6", linewidth=1.2, zorder=0)
            axis.set_xlabel(f"{cost}, {'more' if cost == 'answers/s' else 'fewer'} is better")
            axis.grid(color="0.92")
        axes[0].set_ylabel("exact match %")
        handles = [Line2D([], [], color=c, marker="o", linewidth=0, label=n) for n, c in colours.items()]
        if len(rests) > 1 or rests[0]:
            handles += [Line2D([], [], color="0.4", marker=m, linewidth=0, label=n or "(as is)")
                        for n, m in markers.items()]  # fmt: skip
        handles.append(Line2D([], [], color="0.6", label="Pareto front"))
        figure.legend(handles=handles, loc="outside right upper", frameon=False, title="\n".join(keys))


def _make_error_bars(
    estimate: Estimate, key: str, scale: float = 1
) -> dict[str, Sequence[Sequence[float]]]:
    below, above = estimate.mean - estimate.low, estimate.high - estimate.mean
    return {key: [[scale * below], [scale * above]]}
