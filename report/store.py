"""The stored results that the report shows: docs/measurements/results/PAGE.yaml."""

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]


class Estimate(NamedTuple):
    """A figure and its interval, which is the figure itself where none is stored."""

    value: float
    low: float
    high: float


@cache
def read_page(page: str) -> list[dict[str, Any]]:
    """The entries of a page."""
    return yaml.safe_load((ROOT / "docs/measurements/results" / f"{page}.yaml").read_text())


def find_entry(page: str, title: str) -> dict[str, Any]:
    """The entry of that title. Raises `KeyError` where there is none."""
    found = [entry for entry in read_page(page) if entry["title"] == title]
    if len(found) != 1:
        raise KeyError(f"{page}.yaml has {len(found)} entries called {title!r}")
    return found[0]


def find_cell(entry: dict[str, Any], keys: str | tuple[str, ...], column: str) -> str:
    """A cell of the one row whose first cells begin with `keys`; of several the one with most whole cells
    among them, counted from the last.

    Raises `KeyError` where there is not one row, or no such column.
    """
    keys = (keys,) if isinstance(keys, str) else keys
    rows = [row for row in entry["rows"] if all(map(str.startswith, row, keys))]
    for place in reversed(range(len(keys))):
        if len(rows) > 1:
            rows = [row for row in rows if row[place] == keys[place]]
    if len(rows) != 1 or column not in entry["columns"]:
        raise KeyError(
            f"{entry['title']}: {len(rows)} rows {keys}, columns {entry['columns']}, not {column!r}"
        )
    return rows[0][entry["columns"].index(column)]


def find_estimate(entry: dict[str, Any], keys: str | tuple[str, ...], column: str) -> Estimate:
    """The numbers of a cell such as `90.7 [82, 96]`."""
    cell = find_cell(entry, keys, column)
    numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", cell)]
    return Estimate(*numbers[:3]) if "[" in cell else Estimate(numbers[0], numbers[0], numbers[0])
