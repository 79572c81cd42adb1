"""The picture of a sweep: exact match, and what it costs."""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.evaluation.compare import SettingMetrics
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
    import matplotlib

    matplotlib.use("agg")
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box is drawn instead
        from matplotlib import pyplot

        size = 5.5 * len(PLOT_COSTS), 5
        figure, axes = pyplot.subplots(1, len(PLOT_COSTS), figsize=size, sharey=True, layout="constrained")
        _draw_pareto(figure, axes, summaries, list(swept))
        with open_atomic_file(path) as scratch:
            figure.savefig(scratch, dpi=150)
        pyplot.close(figure)


def _draw_pareto(
    figure: "Figure", axes: Any, summaries: Mapping[str, SettingMetrics], keys: list[str]
) -> None:
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    parts = {name: split_setting_name(replace_control_chars(name), keys) for name in summaries}
    halves = {name: (first, ", ".join(rest)) for name, (first, *rest) in parts.items()}
    firsts, rests = (list(dict.fromkeys(half)) for half in zip(*halves.values(), strict=True))
    palette = pyplot.get_cmap("viridis")
    colours = {first: palette(0.9 * n / max(1, len(firsts) - 1)) for n, first in enumerate(firsts)}
    markers = {rest: PLOT_MARKERS[n % len(PLOT_MARKERS)] for n, rest in enumerate(rests)}
    for axis, cost in zip(axes, PLOT_COSTS, strict=True):
        axis.spines[["top", "right"]].set_visible(False)
        points = {name: (get_metric(m, cost), m["exact_match"]) for name, m in summaries.items()}
        known = {name: (price, match) for name, (price, match) in points.items() if price and match}
        for name, (price, match) in known.items():
            first, rest = halves[name]
            axis.errorbar(
                price.mean, 100 * match.mean, xerr=_error_bar(price), yerr=_error_bar(match, 100),
                color=colours[first], marker=markers[rest], markersize=7, elinewidth=0.6, alpha=0.9,
            )  # fmt: skip
            if len(known) <= MAX_LABELLED_POINTS:
                place, label = (price.mean, 100 * match.mean), ", ".join(filter(None, halves[name]))
                axis.annotate(label, place, (4, 4), textcoords="offset points", fontsize=7)
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


def _error_bar(estimate: Estimate, scale: float = 1) -> list[list[float]]:
    return [[scale * (estimate.mean - estimate.low)], [scale * (estimate.high - estimate.mean)]]
