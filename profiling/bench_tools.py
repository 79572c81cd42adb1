"""What the programs of profiling/ share: subcommands, child processes, turns, tables, files."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Column, Table

from dlm_rag.cli import CommandParser
from dlm_rag.commands.arguments import CommandLine, parse_command_line
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.files.paths import open_atomic_file, write_text_atomic

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")


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


def make_folder(path: Path) -> Path:
    """Makes a folder; raises `ConfigError` where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be a folder: {error.strerror}") from None
    return path


def run_child(script: str, *words: object, **environment: str) -> dict[str, Any]:
    """Runs a program in a process of its own; the JSON of the last line that it prints."""
    done = subprocess.run(
        [sys.executable, script, *map(str, words)],
        env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


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


def format_range(values: Sequence[float], digits: int = 2) -> str:
    """`median [least, most]`."""
    return f"{median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """A table on standard output, numbers to the right."""
    columns = [Column(headings[0], no_wrap=True), *(Column(h, justify="right") for h in headings[1:])]
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140, markup=False).print(table)


def format_markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(c.replace('|', chr(92) + '|') for c in line)} |" for line in lines)


def write_json(path: Path, record: Any) -> None:
    write_text_atomic(path, json.dumps(record, indent=2) + "\n")


def save_figure(path: Path, figure: Any) -> None:
    """Writes a figure of matplotlib without its frames' upper and right sides."""
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    with open_atomic_file(path) as scratch:
        figure.savefig(scratch, dpi=150)
