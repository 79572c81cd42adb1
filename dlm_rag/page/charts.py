"""Line charts as SVG in HTML: coloured by the page's style, so that they are light or dark as it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dlm_rag.energy.meter import format_three_digits

WIDTH, HEIGHT = 1000, 300  # of the drawing, which is stretched to the room it has
TICKS = 4  # between the bottom and the top


@dataclass(frozen=True)
class Line:
    """A line of a chart: points as (x, y), joined, and marked each where there are few."""

    label: str
    points: Sequence[tuple[float, float]]
    marked: bool = False


def render_chart(title: str, unit: str, lines: Sequence[Line], last_x: float, top: float = 0.0) -> str:
    """A figure of lines from 0 to `last_x`, as high as its highest point, or as `top`.

    Colours are classes k0, k1, ... in the order of the lines; the key has the last value of each.
    """
    highest = max([top, *(y for line in lines for _, y in line.points)])
    lowest = min([0.0, *(y for line in lines for _, y in line.points)])
    step = _round_up((highest - lowest) / TICKS)
    bottom = step * math.floor(lowest / step)
    top = top or max(step * math.ceil(highest / step), bottom + step)
    count = round((top - bottom) / step)

    def place(x: float, y: float) -> str:
        return f"{WIDTH * x / max(last_x, 1):.1f} {HEIGHT * (top - y) / (top - bottom):.1f}"

    drawn, keys, said = [], [], []
    for number, line in enumerate(lines):
        joined = "L".join(place(*point) for point in line.points)
        drawn.append(f'<path class="k{number}" d="M{joined}"/>')
        if line.marked or len(line.points) == 1:
            dots = "".join(f"M{place(*point)}h0" for point in line.points)
            drawn.append(f'<path class="dots k{number}" d="{dots}"/>')
        last = format_three_digits(line.points[-1][1])
        keys.append(f'<li class="k{number}">{escape(line.label)} <b>{last}</b></li>')
        said.append(f"{line.label} {last}")
    grid = "".join(
        f'<path class="grid" d="M0 {HEIGHT * n / count:.1f}h{WIDTH}"/>' for n in range(count + 1)
    )
    marks = "".join(f"<span>{format_three_digits(top - n * step)}</span>" for n in range(count + 1))
    return (
        f"<figure><figcaption><b>{escape(title)}</b> <small>{escape(unit)}</small><ul>{''.join(keys)}</ul>"
        f'</figcaption><div class="plot"><div class="y" aria-hidden="true">{marks}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)} at the end: {escape(", ".join(said))}">{grid}{"".join(drawn)}</svg>'
        f'<div class="x" aria-hidden="true"><span>0</span><span>step</span><span>{last_x:,.0f}</span></div>'
        "</div></figure>"
    )


def _round_up(step: float) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten."""
    if step <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= step * (1 - 1e-9))
