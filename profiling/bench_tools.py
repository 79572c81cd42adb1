"""What the programs of profiling/ share: subcommands, child processes, timers, tables, files."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.table import Column, Table

from dlm_rag.cli import CommandParser
from dlm_rag.commands.arguments import CommandLine, parse_command_line
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.files.paths import make_folder, open_atomic_file, write_text_atomic

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")
TableRow = dict[str, Any]  # heading -> value


def run_subcommand(doc: str, argv: list[str], commands: dict[str, Callable[[list[str]], None]]) -> None:
    """Runs the command that the first word names, with the words after it."""
    if argv[:1] and argv[0] in commands:
        commands[argv[0]](argv[1:])
        return
    parser = CommandParser(doc)
    parser.add_argument("command", choices=commands)
    parser.parse_args(argv[:1])


def parse_bench_args(
    doc: str, argv: list[str], options: dict[str, tuple[str | int, str]]
) -> tuple[CommandLine, Path]:
    """The command line of a benchmark that writes into --out, and that folder; raises `ConfigError`."""
    words = parse_command_line(doc, argv, typed=False, options=options)
    if words.config.out is None:
        raise ConfigError("the benchmark needs --out FOLDER")
    return words, make_folder(Path(words.config.out))


@contextmanager
def run_server(words: Sequence[str], ready: str) -> Iterator[tuple[str, int]]:
    """A server of ours on a free port, in a process of its own; gives its address and process id.

    ready: a pattern of the line that it says once it answers.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "dlm_rag", *words, "--port", port]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        if not any(re.search(ready, line) for line in process.stderr):
            raise RunError("the server ended before it served")
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def rotate(items: Sequence[T], number: int) -> list[T]:
    """The items, beginning with another one in each round."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def format_cell(value: Any) -> str:
    """A value in a table: a number in four digits or more, of several numbers `median [least, most]`."""
    if isinstance(value, list):
        return f"{format_cell(median(value))} [{format_cell(min(value))}, {format_cell(max(value))}]"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value or "")


def _format_rows(rows: Sequence[TableRow], only: Sequence[str]) -> list[list[str]]:
    headings = only or [*dict.fromkeys(key for row in rows for key in row)]
    return [[*headings], *([format_cell(row.get(key)) for key in headings] for row in rows)]


def print_table(
    rows: Sequence[TableRow], title: str = "", only: Sequence[str] = (), console: Console | None = None
) -> None:
    """A table on standard output, with a column for each key of the rows (or for those in `only`)."""
    headings, *lines = _format_rows(rows, only)
    columns = [Column(headings[0], no_wrap=True), *(Column(h, justify="right") for h in headings[1:])]
    table = Table(*columns, title=title, title_justify="left")
    for line in lines:
        table.add_row(*line)
    width = None if sys.stdout.isatty() else 140
    (console or Console(file=sys.stdout, width=width, markup=False)).print(table)


def format_markdown_table(rows: Sequence[TableRow], only: Sequence[str] = ()) -> str:
    """The same table in Markdown."""
    headings, *lines = _format_rows(rows, only)
    grid = [headings, ["---", *["---:"] * (len(headings) - 1)], *lines]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in grid
    )


def write_json(path: Path, record: Any) -> None:
    write_text_atomic(path, json.dumps(record, indent=2) + "\n")


def save_figure(path: Path, figure: Any) -> None:
    """Writes a figure of matplotlib without its frames' upper and right sides."""
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    with open_atomic_file(path) as scratch:
        figure.savefig(scratch, dpi=150)


def plot_bars(path: Path, bars: dict[str, list[float]], label: str, log: bool = False) -> None:
    """A bar for the median of each list of values, with their range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.42 * len(bars) + 1), layout="constrained")
    axis = figure.subplots()
    for place, values in enumerate(bars.values()):
        middle = median(values)
        spread = [[middle - min(values)], [max(values) - middle]]
        axis.barh(place, middle, color="#3b78b5", xerr=spread, ecolor="0.4", height=0.7)
        axis.text(max(values), place, f"  {format_cell(middle)}", va="center", fontsize=9)
    axis.set_yticks(range(len(bars)), list(bars))
    axis.invert_yaxis()
    axis.set(xlabel=label, xscale="log" if log else "linear")
    axis.margins(x=0.2)
    save_figure(path, figure)


def synchronize_device(device: "torch.device") -> None:
    """Waits until a GPU has finished its work."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def time_calls(call: Callable[[], Any], device: "torch.device", repeats: int = 10) -> list[float]:
    """Seconds of each repeat of a call, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        synchronize_device(device)
        start = time.perf_counter()
        call()
        synchronize_device(device)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def read_and_reset_peak_gib(device: "torch.device") -> float | None:
    """The most that was allocated on a GPU since the last call; None on a CPU."""
    if device.type != "cuda":
        return None
    import torch

    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak / 2**30
