"""Pictures of an evaluation: exact match by hops, and what it costs."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.evaluation.compare import GroupSummary, QuestionGroups, SettingMetrics, format_hops
from dlm_rag.evaluation.metrics import Estimate
from dlm_rag.evaluation.tables import PLOT_COSTS, compute_pareto_front, get_metric, split_setting_name
from dlm_rag.files.paths import open_atomic_file
from dlm_rag.text import replace_control_chars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_MARKERS = "osD^vPX*<>"
MAX_LABELLED_POINTS = 16  # in a panel; more names would cover each other


def plot_pareto(path: Path, summaries: Mapping[str, SettingMetrics], swept: Iterable[str] = ()) -> None:
    """Exact match against answers a second and against forwards, with the fronts.

    The first part of a setting's name is its colour, the rest its marker; swept: as in
    `build_overview_table`.
    """
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    keys, costs = list(swept), PLOT_COSTS
    parts = {name: split_setting_name(replace_control_chars(name), keys) for name in summaries}
    halves = {name: (first, ", ".join(rest)) for name, (first, *rest) in parts.items()}
    firsts, rests = (list(dict.fromkeys(half)) for half in zip(*halves.values(), strict=True))
    palette = pyplot.get_cmap("viridis")
    colours = {first: palette(0.9 * n / max(1, len(firsts) - 1)) for n, first in enumerate(firsts)}
    markers = {rest: PLOT_MARKERS[n % len(PLOT_MARKERS)] for n, rest in enumerate(rests)}
    with open_panels(path, (5.5 * len(costs), 5), len(costs)) as (figure, axes):
        for axis, cost in zip(axes, costs, strict=True):
            points = {name: (get_metric(m, cost), m["exact_match"]) for name, m in summaries.items()}
            known = {name: (price, match) for name, (price, match) in points.items() if price and match}
            for half in dict.fromkeys(halves[name] for name in known):
                prices, matches = zip(*(known[name] for name in known if halves[name] == half), strict=True)
                axis.errorbar(
                    [price.mean for price in prices], [100 * match.mean for match in matches],
                    xerr=_error_bars(prices), yerr=_error_bars(matches, 100),
                    color=colours[half[0]], marker=markers[half[1]], markersize=7,
                    linewidth=0, elinewidth=0.6, alpha=0.9,
                )  # fmt: skip
            for name in known if len(known) <= MAX_LABELLED_POINTS else ():
                point = known[name][0].mean, 100 * known[name][1].mean
                label = ", ".join(filter(None, halves[name]))
                axis.annotate(label, point, (4, 4), textcoords="offset points", fontsize=7)
            front = [known[name] for name in compute_pareto_front(summaries, cost)]
            line = [(price.mean, 100 * match.mean) for price, match in front]
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


def _error_bars(estimates: Sequence[Estimate], scale: float = 1) -> list[list[float]]:
    return [[scale * (e.mean - e.low) for e in estimates], [scale * (e.high - e.mean) for e in estimates]]


@contextmanager
def open_panels(path: Path, size: tuple[float, float], count: int) -> Iterator[tuple["Figure", Any]]:
    """A figure of panels with one y axis, saved as `path` at the end of the block."""
    import matplotlib

    matplotlib.use("agg")
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box is drawn instead
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(
            1, count, figsize=size, sharey=True, squeeze=False, layout="constrained"
        )
        for axis in axes[0]:
            axis.spines[["top", "right"]].set_visible(False)
        yield figure, axes[0]
        with open_atomic_file(path) as scratch:
            figure.savefig(scratch, dpi=150)
        pyplot.close(figure)


def plot_by_hops(path: Path, groups: QuestionGroups, summaries: Mapping[str, GroupSummary]) -> None:
    """Exact match and last evidence recall of every setting, by hops if they are known."""
    shown = [format_hops(n) for n in range(1, 100) if format_hops(n) in groups] or ["all"]
    below = max(map(len, summaries)) > 30  # names that would leave no room for the axes
    size = (11, 4.2 + 0.25 * len(summaries) * below)
    panels = {"exact_match": "exact match", "recall_last": "evidence recall after the last step"}
    with open_panels(path, size, 2) as (figure, axes):
        for axis, (metric, title) in zip(axes, panels.items(), strict=True):
            for number, (name, summary) in enumerate(summaries.items()):
                shift = 0.06 * (number - (len(summaries) - 1) / 2)
                points = [(place + shift, e) for place, g in enumerate(shown) if (e := summary[g][metric])]
                if points:
                    places, found = zip(*points, strict=True)
                    axis.errorbar(
                        places, [100 * e.mean for e in found], yerr=_error_bars(found, 100), marker="o",
                        markersize=5, linewidth=1.6, capsize=2, label=replace_control_chars(name),
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
