"""The page of a profiling session: shares, a timeline, tables, and what is below its stages."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from attribution import Attribution, StageTime, compare_attributions, find_outer_steps
from profile_readers import RANGE_NAMES, ProfileSession

from dlm_rag.page.html import render_html

SHOWN_STEPS, SHOWN_RANGES = 4, 2000  # of the timeline
COLOURS = 7  # stages with a colour of their own; the others share the last
BELOW_SHARE = 0.01  # of the session, from which on a stage shows what is below it
WIDTH, LANE = 1000, 10  # of a drawing, which is stretched to its room
SVG = (
    '<svg class="bars rows{rows}" viewBox="0 0 {wide} {high}" preserveAspectRatio="none" role="img" {said}>'
)
FIGURE = "<figure><figcaption><b>{}</b>{}</figcaption>{}</figure>"
PLOT = """<div class="plot"><div class="y lanes">{}</div>{}
<div class="x"><span>0</span><span>ms</span><span>{:,.1f}</span></div></div>"""
ABOUT = """<p><b>Self</b> is the time of a stage without those inside it: all add up to the session.</p>
<p><b>The bar</b> is the whole session, or a question of it beside one of the session before.</p>
<p><b>Below a stage</b> are the layers of the model and the kernels that it ran, or torch's operators.</p>
"""


def render_session_page(
    title: str, session: ProfileSession, found: Attribution, before: Attribution | None,
    tables: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], notes: Sequence[str],
) -> str:  # fmt: skip
    """The text of the page; before: an earlier session, whose bar stands above this one's."""
    colours = {part.stage: f"k{min(n, COLOURS)}" for n, part in enumerate(found.stages)}
    parts = [
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n",
        *(f'<p class="dim">{escape(note)}</p>\n' for note in notes), ABOUT,
        _render_shares(found, before, colours), _render_timeline(session, colours),
        *(_render_below(part) for part in found.stages if part.stage != "step"),
        '<div class="tables">', *(_render_table(heading, rows) for heading, rows in tables),
        "</div>\n</main>\n</body>\n",
    ]  # fmt: skip
    return render_html(title, "".join(parts), "report.css")


def _render_rect(x: float, y: float, width: float, height: float, *words: str) -> str:
    """A rectangle; words: its class, and what it is."""
    return (
        f'<rect class="{words[0]}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}">'
        f"<title>{escape(words[1])}</title></rect>"
    )


def _render_drawing(said: str, rows: int, rects: Sequence[str], size: int | str = "") -> str:
    """rows: lanes of `LANE`. said: what it shows; without, a reader of screens passes over it."""
    label = f'aria-label="{escape(said)}"' if said else 'aria-hidden="true"'
    return SVG.format(rows=size, wide=WIDTH, high=LANE * rows, said=label) + "".join(rects) + "</svg>"


def _render_shares(found: Attribution, before: Attribution | None, colours: Mapping[str, str]) -> str:
    """A bar of the self times; of two sessions one above the other, of the same unit and scale."""
    if before is None:
        bars = {"": {part.stage: 1e3 * part.self_time for part in found.stages}}
    else:
        unit, both = compare_attributions(found, before)
        bars = {
            f"before, {unit}": {stage: 1e3 * then for stage, then, _ in both},
            f"now, {unit}": {stage: 1e3 * now for stage, _, now in both},
        }
    longest = max(sum(times.values()) for times in bars.values())
    drawn = []
    for name, times in bars.items():
        at, rects = 0.0, []
        for stage in sorted(times, key=lambda stage: -bars[[*bars][-1]][stage]):
            wide = WIDTH * times[stage] / longest
            told = f"{stage}: {times[stage]:.2f} ms"
            rects.append(_render_rect(at, 0, wide, LANE, colours.get(stage, f"k{COLOURS}"), told))
            at += wide
        said = f"{name} {sum(times.values()):,.2f} ms".strip()
        drawn.append(f'<p class="dim">{escape(said)}</p>{_render_drawing(said, 1, rects)}')
    largest = [part for part in found.stages if part.share >= 0.002]
    keys = "".join(
        f'<li class="{colours[part.stage]}">{escape(part.stage)} <b>{100 * part.share:.1f} %</b></li>'
        for part in largest
    )
    return FIGURE.format("Where the time went", f"<ul>{keys}</ul>", "".join(drawn))


def _render_timeline(session: ProfileSession, colours: Mapping[str, str]) -> str:
    """Some steps from the middle: a lane for each thread, the steps' first, and one for the GPU."""
    places = np.flatnonzero(find_outer_steps(session))
    middle = max(0, len(places) // 2 - SHOWN_STEPS // 2)
    window = places[middle : middle + SHOWN_STEPS]
    begin = int(session.start[window].min() if len(window) else session.start.min())
    finish = int(session.end[window].max() if len(window) else session.end.max())
    lanes = [session.main, *(t for t in np.unique(session.thread).tolist() if t != session.main)]
    shown = np.flatnonzero((session.end > begin) & (session.start < finish))[:SHOWN_RANGES]
    running = np.flatnonzero((session.gpu.end > begin) & (session.gpu.start < finish))[:SHOWN_RANGES]
    scale, rects, used = WIDTH / (finish - begin), list[str](), set[int]()

    def add(lane: int, start: int, end: int, colour: str, name: str) -> None:
        height = {"step": 10.0}.get(name, 7.0 if "/" not in name else 3.0)
        told = f"{name}: {(end - start) / 1e6:.2f} ms"
        left, right = max(start, begin), min(end, finish)
        y = LANE * lane + (LANE - height) / 2
        rects.append(_render_rect((left - begin) * scale, y, (right - left) * scale, height, colour, told))
        used.add(lane)

    for place in shown.tolist():  # a range comes before those inside it
        name = RANGE_NAMES[session.stage[place]]
        lane, start, end = lanes.index(session.thread[place]), session.start[place], session.end[place]
        add(
            lane, int(start), int(end), "step" if name == "step" else colours.get(name, f"k{COLOURS}"), name
        )
    for place in running.tolist():
        name = session.names[session.gpu.name[place]]
        add(len(lanes), int(session.gpu.start[place]), int(session.gpu.end[place]), "k1", name)
    said = f"{len(window)} of {len(places)} steps, from the middle"
    rows = ["steps", *["beside"] * (len(lanes) - 1), *["GPU"] * bool(len(running))]
    marks = "".join(f"<span>{row}</span>" for row in rows)
    drawing = _render_drawing(said, len(rows), rects, min(len(rows), 4))
    return FIGURE.format(said, "", PLOT.format(marks, drawing, (finish - begin) / 1e6))


def _render_below(part: StageTime) -> str:
    """The layers and the kernels of a stage, as bars; nothing for one that takes little of the session."""
    lists = []
    layers = {f"layer {number}": seconds for number, seconds in part.layers.items()}
    kind = "kernels" if part.gpu_busy else "operators"
    for heading, times in (("layers", layers), (kind, part.kernels)):
        rows = [
            f"<tr><th scope=row>{escape(name)}</th><td>{1e3 * seconds:,.1f} ms</td><td>"
            + _render_drawing(
                "", 1, [_render_rect(0, 1, WIDTH * seconds / max(times.values()), 8, "k0", name)]
            )
            + "</td></tr>"
            for name, seconds in times.items()
            if seconds
        ]
        if rows:
            lists.append(f"<table><caption>{heading}</caption><tbody>{''.join(rows)}</tbody></table>")
    if not lists or part.share < BELOW_SHARE:
        return ""
    return (
        f"<details open><summary>Below <b>{escape(part.stage)}</b>, {part.wall:.3f} s</summary>"
        f'<div class="below">{"".join(lists)}</div></details>\n'
    )


def _render_table(heading: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A table that scrolls by itself where it is wider than the window."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in names)
    cells = "".join(
        "<tr>" + "".join(f"<td>{escape(_format_cell(row.get(name)))}</td>" for name in names) + "</tr>"
        for row in rows
    )
    return (
        f"<section><h2>{escape(heading)}</h2>\n"
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(heading)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table></div></section>\n"
    )


def _format_cell(value: Any) -> str:
    return "" if value is None else f"{value:,.2f}" if isinstance(value, float) else str(value)
