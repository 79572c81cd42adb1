"""The figures of the report, from stored results, as SVG.

Colours are those of Okabe and Ito, which readers with the common kinds of colour blindness tell apart.
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

from report.store import find_entry, find_estimate

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#777777",
)  # fmt: skip
STYLE: Any = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "svg.hashsalt": "dlm_rag",
    "figure.constrained_layout.use": True,
}
WIDTH = 6.4  # inches: the text of a page


def draw_layouts() -> Any:
    """Visibility of each layout: what may be kept, what runs again after one passage was exchanged."""
    from dlm_rag.model.denoiser_config import EVIDENCE_LAYOUTS

    names = ["passage 1", "passage 2", "passage 3", "question", "canvas"]
    sizes = [4, 4, 4, 3, 6]
    ends = np.cumsum(sizes)
    part = np.repeat(np.arange(5), sizes)
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 2.35), sharey=True)
    for axis, name in zip(axes, ("joint", "prefix", "independent"), strict=True):
        layout = EVIDENCE_LAYOUTS[name]
        query, key = part[:, None], part[None, :]
        if layout.runs_with_canvas:
            sees = np.ones((21, 21), bool)
        elif layout.separate_passages:
            sees = (query == key) | (query == 4)
        else:
            sees = (key < 4) | (query == 4)
        changed = (part == 1) | (part == 4)  # passage 2 was exchanged, the canvas was written to
        reach = sees.copy()
        for _ in range(3):
            reach = reach | (reach @ sees)
        stale = (reach & changed[None, :]).any(1)
        shown = np.where(sees, np.where(stale[:, None], 1, 2), 0)
        axis.imshow(shown, cmap=ListedColormap(["#ffffff", "#f3c9a5", BLUE]), vmin=0, vmax=2)
        for end in ends[:-1]:
            axis.axhline(end - 0.5, color="#999999", lw=0.6)
            axis.axvline(end - 0.5, color="#999999", lw=0.6)
        axis.set_title(name)
        middles = ends - np.array(sizes) / 2 - 0.5
        axis.set_xticks(middles, names, rotation=40, ha="right")
        axis.set_yticks(middles, names)
        axis.grid(visible=False)
        axis.tick_params(length=0)
        for spine in axis.spines.values():
            spine.set_visible(True)
            spine.set_color("#999999")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (BLUE, "#f3c9a5")]
    figure.legend(
        handles,
        ["attends; kept", "attends; runs again"],
        loc="outside lower center",
        ncols=2,
    )
    return figure


def draw_hops() -> Any:
    """Exact match and evidence recall by hops."""
    match = find_entry("world", "Exact match by number of hops")
    recall = find_entry("world", "Evidence recall after the last step")
    series = [
        ("oracle", GREY, "s"), ("interleaved", BLUE, "o"), ("committed", SKY, "D"),
        ("feedback", PURPLE, "v"), ("two_rounds", GREEN, "^"), ("static", ORANGE, "X"),
    ]  # fmt: skip
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.5), sharey=True)
    for axis, entry in zip(axes, (match, recall), strict=True):
        for place, (name, color, marker) in enumerate(series):
            found = np.array([find_estimate(entry, f"{hops} hop", name) for hops in range(1, 5)])
            at = np.arange(1, 5) + (place - 2.5) * 0.06
            bars = np.abs(found[:, 1:].T - found[:, 0])
            axis.errorbar(
                at,
                found[:, 0],
                bars,
                color=color,
                marker=marker,
                ms=4,
                lw=1.2,
                elinewidth=0.8,
                label=name.replace("_", " "),
            )
        axis.set_xticks(range(1, 5))
        axis.set_xlabel("hops")
        axis.set_ylim(-3, 104)
    axes[0].set_ylabel("exact match, %")
    axes[1].set_ylabel("supporting passages found, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure


def draw_real() -> Any:
    """Exact match on real text: natural questions, and cloze chains with all baselines."""
    natural = find_entry("reader", "Natural questions")
    chains = find_entry("reader", "Cloze chains, the reader before")
    column = "exact match %, every answer shown"
    sides = (
        ("natural questions of two hops (100)", [
            ("interleaved", natural, "100 of two hops, held-out wordings, interleaved", column, BLUE),
            ("static", natural, "100 of two hops, held-out wordings, static", column, ORANGE),
        ]),
        ("cloze chains of two hops (200), earlier reader", [
            ("oracle", chains, "oracle", "exact match %", GREY),
            ("interleaved", chains, "interleaved", "exact match %", BLUE),
            ("two rounds", chains, "two rounds", "exact match %", GREEN),
            ("static", chains, "static", "exact match %", ORANGE),
        ]),
    )  # fmt: skip
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 1.7), width_ratios=(1, 1.3))
    for axis, (title, bars) in zip(axes, sides, strict=True):
        for place, (_, entry, row, at, color) in enumerate(bars):
            found = find_estimate(entry, row, at)
            axis.barh(place, found.value, color=color, height=0.6)
            bounds = [[found.value - found.low], [found.high - found.value]]
            axis.errorbar(found.value, place, xerr=bounds, color="black", elinewidth=0.8, ls="")
            axis.text(found.high + 1.5, place, f"{found.value:.1f}", va="center", fontsize=7.5)
        axis.set_yticks(range(len(bars)), [name for name, *_ in bars])
        axis.invert_yaxis()
        axis.set_xlim(0, 75)
        axis.set_title(title, fontsize=8)
        axis.set_xlabel("exact match, %")
        axis.grid(visible=False, axis="y")
    return figure


def draw_reward() -> Any:
    """Exact match against forwards of policies trained by reward."""
    heads = find_entry("reinforcement", "Policy heads on a frozen denoiser")
    denoiser = find_entry("reinforcement", "The denoiser itself, by exact likelihood")
    marks = [
        (heads, "threshold, no blocks", GREY, "s", "the start: threshold, no blocks"),
        (heads, "threshold, blocks", "black", "D", "threshold in blocks of 8, by hand"),
        *((heads, f"heads, seed {seed}", ORANGE, "^", "heads, three seeds") for seed in range(3)),
        *((denoiser, f"seed {seed}", BLUE, "o", "denoiser, three seeds") for seed in range(3)),
        (denoiser, "shortcut", RED, "X", "denoiser, committed tokens alone"),
    ]
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.5), sharey=True, sharex=True)
    for axis, world in zip(axes, ("world 31", "world 32"), strict=True):
        for entry, row, color, marker, label in marks:
            try:
                found = find_estimate(entry, row, f"exact match %, {world}")
            except IndexError:
                continue  # the shortcut was evaluated on one world
            forwards = find_estimate(entry, row, f"forwards, {world}").value
            bars = [[found.value - found.low], [found.high - found.value]]
            axis.errorbar(
                forwards,
                found.value,
                bars,
                color=color,
                marker=marker,
                ms=5,
                elinewidth=0.8,
                ls="",
                label=label,
            )
        axis.set_xlabel("forwards an answer")
        axis.set_title(world.replace("world", "test world"), fontsize=8)
    axes[0].set_ylabel("exact match, %")
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


def draw_engine() -> Any:
    """What each mechanism saves, and what a token of an answer costs by order."""
    saves = find_entry("engine", "What each mechanism saves")
    store = find_entry("engine", "Evidence store")
    work = find_entry("engine", "Query window of attention in blocks")
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 2.0), width_ratios=(1.2, 1))
    bars = [
        ("masked positions only", saves, "+ masked", SKY),
        ("+ evidence pool", saves, "+ evidence pool", SKY),
        ("+ batch of 16", saves, "+ batch", SKY),
        ("batch of 16, no pool", saves, "batch of 16, no pool", GREY),
        ("world model, batch and pool", store, "batch of 16, pool", BLUE),
        ("world model, filled store", store, "the same", BLUE),
    ]
    for place, (_, entry, row, color) in enumerate(bars):
        against = "the published algorithm" if entry is store else "the reference"
        found = find_estimate(entry, row, f"against {against}")
        left.barh(place, found.value, color=color, height=0.65)
        around = [[found.value - found.low], [found.high - found.value]]
        left.errorbar(found.value, place, xerr=around, color="black", elinewidth=0.8)
        left.text(found.high + 0.15, place, f"{found.value:.2f}", va="center", fontsize=7)
    left.set_yticks(range(len(bars)), [name for name, *_ in bars])
    left.invert_yaxis()
    left.set_xlim(0, 10.5)
    left.set_xlabel("speed-up")
    left.grid(visible=False, axis="y")
    orders = [
        ("whole canvas", "whole canvas"),
        ("recompute", "query window 16, `recompute`"),
        ("no_evidence", "query window 16, `no_evidence`"),
        ("no_evidence, window 8", "query window 8"),
    ]
    for place, (_, row) in enumerate(orders):
        canvas = find_estimate(work, row, "canvas tokens").value
        right.barh(place, canvas, color=ORANGE, height=0.65, label=None if place else "canvas")
        if place:
            evidence = find_estimate(work, row, "evidence tokens").value
            label = "evidence" if place == 1 else None
            right.barh(place, evidence, left=canvas, color=BLUE, height=0.65, label=label)
    right.set_yticks(range(4), [name for name, _ in orders])
    right.invert_yaxis()
    right.set_xlabel("tokens an answer")
    right.set_xlim(0, 800)
    right.legend(loc="lower center", bbox_to_anchor=(0.4, 0.97), ncols=2)
    right.grid(visible=False, axis="y")
    return figure


def draw_parallel() -> Any:
    """Exact match against forwards when several blocks are written at once, and in three modes."""
    blocks = find_entry("engine", "Several blocks at once")
    figure, axis = plt.subplots(figsize=(WIDTH * 0.72, 2.3))
    one = [row for row in blocks["rows"] if row[1] == "1"]
    for threshold, color, marker, label in (
        ("0.1", SKY, "s", "published thresholds"),
        ("0", BLUE, "o", "opened at once"),
    ):
        rows = one + [
            row for row in blocks["rows"] if row[0].split(" ")[0] == threshold and "semi" not in row[1]
        ]
        axis.plot(
            [float(row[4]) for row in rows],
            [float(row[2]) for row in rows],
            color=color,
            marker=marker,
            ms=4.5,
            lw=1,
            label=label,
        )
        if threshold == "0":
            for row in rows:
                number = row[1].split(" ")[0]
                axis.annotate(
                    number,
                    (float(row[4]), float(row[2])),
                    textcoords="offset points",
                    xytext=(0, -11),
                    fontsize=7,
                    ha="center",
                )
    axis.set_xlabel("forwards an answer")
    axis.set_ylabel("exact match, %")
    axis.set_ylim(74, 96)
    axis.legend(title="blocks written at once", title_fontsize=7.5, loc="lower right")
    return figure


FIGURES = {
    "layouts": draw_layouts,
    "hops": draw_hops,
    "real": draw_real,
    "reward": draw_reward,
    "engine": draw_engine,
    "parallel": draw_parallel,
}


def draw_all(folder: Path) -> None:
    """Writes every figure into a folder, the same bytes from the same results."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
