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
    from rich.progress import Progress, TaskID

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
    task = _Task(what, total, unit, done)
    try:
        yield task.advance
    finally:
        task.close()


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


class _Task:
    """One task. `advance` is called in inner loops: it reads the clock, and rarely does more."""

    __slots__ = ("_begun", "_done", "_draws", "_due", "_row", "_start", "_total", "_unit", "_what")

    def __init__(self, what: str, total: float | None, unit: str, done: float) -> None:
        self._what, self._total, self._unit = replace_control_chars(what), total, unit
        self._begun = self._done = done
        self._draws = _draws()
        self._row: TaskID | None = None
        self._start = perf_counter()
        self._due = self._start + (SHOW_AFTER_SECONDS if self._draws else LOG_EVERY_SECONDS)

    def advance(self, count: float = 1) -> None:
        self._done += count
        if perf_counter() >= self._due:
            self._say()

    def _say(self) -> None:
        if self._draws:
            self._draw()
        else:
            log.info("%s: %s", self._what, self._how_far())
        self._due = perf_counter() + (DRAW_EVERY_SECONDS if self._draws else LOG_EVERY_SECONDS)

    def _how_far(self) -> str:
        in_words = format_bytes if self._unit == "bytes" else "{:,.0f}".format
        of = "" if self._total is None else f" of {in_words(self._total)}"
        elapsed, new = perf_counter() - self._start, self._done - self._begun
        said = f"{in_words(self._done)}{of} after {format_duration(elapsed)}"
        if self._total is not None and new > 0:
            said += f", {format_duration(max(0.0, self._total - self._done) * elapsed / new)} left"
        return said

    def _draw(self) -> None:
        global _bars
        if _bars is None:
            show_status()
            _bars = _new_bars()
            _bars.start()
        if self._row is None:
            self._row = _bars.add_task(self._what, total=self._total, how_far="")
        _bars.update(self._row, completed=self._done, how_far=self._how_far())
        _bars.refresh()

    def close(self) -> None:
        """Takes the bar away, and the place of the bars with the last of them."""
        if _bars is None or self._row is None:
            return
        _bars.remove_task(self._row)
        if not _bars.tasks:
            clear_progress()


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
