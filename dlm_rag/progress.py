"""How far a long task has come: a bar in a terminal, a line a minute in a log; nothing of a short one.

    with report_progress("embedding passages", len(corpus)) as advance:
        for batch in batches:
            ...
            advance(len(batch))

`status` is for what cannot say how far it is. All of it goes to standard error, drawn by whoever calls: no
thread, and no import of rich before there is a bar to be shown.
"""

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import IO, TYPE_CHECKING, TypeVar

from dlm_rag.text import replace_control_chars

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)
T = TypeVar("T")

SHOW_AFTER_SECONDS, DRAW_EVERY_SECONDS, LOG_EVERY_SECONDS = 2.0, 0.1, 60.0  # seconds
ANNOUNCE_FROM_SECONDS = 60.0  # seconds that a build has to take to be announced with its costs

_bars: "Progress | None" = None  # of all tasks that are shown: a terminal has one place for bars
_status: IO[str] | None = None  # the terminal in which a status line stands


def is_drawable(stream: IO[str]) -> bool:
    """Whether a stream is a terminal on which a line can be drawn over."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def format_duration(seconds: float) -> str:
    """A time in words, in the largest unit of which there is more than one."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_bytes(size: float) -> str:
    """A number of bytes in words, to two digits or more."""
    for power, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= power:
            return f"{size / power:,.{0 if size >= 10 * power else 1}f} {unit}"
    return f"{size / 1e3:.0f} kB"


@contextmanager
def report_progress(
    what: str, total: float | None, unit: str = "", done: float = 0
) -> Iterator[Callable[[float], None]]:
    """Tells how far `what` has come of `total`; gives the function to be called with what was added.

    what: a few words. unit: "bytes", or nothing for a count. done: what there is from before.
    May be nested. Of the processes of a run only the first draws.
    """
    what, draws, start = replace_control_chars(what), _draws(), perf_counter()
    count, row = done, None
    due = start + (SHOW_AFTER_SECONDS if draws else LOG_EVERY_SECONDS)

    def advance(more: float = 1) -> None:  # called in inner loops: it reads the clock, and rarely does more
        nonlocal count, due, row
        global _bars
        count += more
        if perf_counter() < due:
            return
        how_far = _describe_progress(count, total, unit, count - done, perf_counter() - start)
        if not draws:
            log.info("%s: %s", what, how_far)
        else:
            if _bars is None:
                show_status()
                _bars = _new_bars()
                _bars.start()
            if row is None:
                row = _bars.add_task(what, total=total, how_far="")
            _bars.update(row, completed=count, how_far=how_far)
            _bars.refresh()
        due = perf_counter() + (DRAW_EVERY_SECONDS if draws else LOG_EVERY_SECONDS)

    try:
        yield advance
    finally:
        if _bars is not None and row is not None:
            _bars.remove_task(row)
            if not _bars.tasks:
                clear_progress()


def _describe_progress(count: float, total: float | None, unit: str, new: float, elapsed: float) -> str:
    """new: what of `count` took the `elapsed` seconds."""
    in_words = format_bytes if unit == "bytes" else "{:,.0f}".format
    of = "" if total is None else f" of {in_words(total)}"
    said = f"{in_words(count)}{of} after {format_duration(elapsed)}"
    if total is not None and new > 0:
        said += f", {format_duration(max(0.0, total - count) * elapsed / new)} left"
    return said


def track_progress(items: Collection[T], what: str) -> Iterator[T]:
    """The items one by one, with a `report_progress` of how many of them were taken."""
    with report_progress(what, len(items)) as advance:
        for item in items:
            yield item
            advance(1)


def show_status(text: str = "") -> None:
    """What is being waited for, in a line of the terminal that the next one replaces; without one, none.

    Whoever writes to the terminal takes it away before.
    """
    global _status
    if _status is not None:  # standard error may be another by now: a live view puts itself in between
        _status.write("\r\x1b[2K")
        _status.flush()
        _status = None
    if text and _bars is None and _draws():
        _status = sys.stderr
        _status.write(text)
        _status.flush()


def clear_progress() -> None:
    """Takes away whatever is drawn, also for tasks that an error has left open: the end of a program."""
    global _bars
    show_status()
    if _bars is not None:
        bars, _bars = _bars, None
        bars.stop()


def _draws() -> bool:
    return is_drawable(sys.stderr) and os.environ.get("RANK", "0") == "0"


def _new_bars() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[how_far]}", markup=False),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,  # results go there, and it may be a file
    )
