"""How far a long task has come: a bar in a terminal, a line a minute in a log; nothing of a short one.

    with report_progress("embedding passages", len(corpus)) as advance:
        for batch in batches:
            ...
            advance(len(batch))

`show_status` is for what cannot say how far it is. All goes to one line of stderr, drawn by the caller.
"""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import IO, TypeVar

from dlm_rag.text import replace_control_chars

log = logging.getLogger(__name__)
T = TypeVar("T")

SHOW_AFTER_SECONDS, DRAW_EVERY_SECONDS, LOG_EVERY_SECONDS = 2.0, 0.1, 60.0  # seconds
BAR_CHARS = 20
_tasks: dict[object, str] = {}  # what is shown of each task under way: a terminal has one line for all
_status: IO[str] | None = None  # the terminal in which a status line stands


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
    what: str, total: float, unit: str = "", done: float = 0
) -> Iterator[Callable[[float], None]]:
    """Tells how far `what` has come of `total`; gives the function to be called with what was added.

    what: a few words. unit: "bytes", or nothing for a count. done: what there is from before.
    May be nested. Of the processes of a run only the first draws.
    """
    what, draws, start = replace_control_chars(what), can_draw(), perf_counter()
    in_words = format_bytes if unit == "bytes" else "{:,.0f}".format
    count, task = done, object()
    due = start + (SHOW_AFTER_SECONDS if draws else LOG_EVERY_SECONDS)

    def advance(more: float = 1) -> None:  # called in inner loops: it reads the clock, and rarely does more
        nonlocal count, due
        count += more
        if (now := perf_counter()) < due:
            return
        taken = now - start
        said = f"{in_words(count)} of {in_words(total)} after {format_duration(taken)}"
        if count > done:
            said += f", {format_duration(max(0.0, total - count) * taken / (count - done))} left"
        if draws:
            bar = "#" * round(BAR_CHARS * min(1, count / max(total, 1)))
            _tasks[task] = f"{what} [{bar:{BAR_CHARS}}] {said}"
            show_status(" · ".join(_tasks.values()))
        else:
            log.info("%s: %s", what, said)
        due = perf_counter() + (DRAW_EVERY_SECONDS if draws else LOG_EVERY_SECONDS)

    try:
        yield advance
    finally:
        if _tasks.pop(task, None):
            show_status(" · ".join(_tasks.values()))


def track_progress(items: Collection[T], what: str) -> Iterator[T]:
    """The items one by one, with a `report_progress` of how many of them were taken."""
    with report_progress(what, len(items)) as advance:
        for item in items:
            yield item
            advance(1)


def show_status(text: str = "") -> None:
    """Shows what is being waited for, in a line of the terminal that the next one replaces; without text,
    none. Whoever writes to the terminal takes it away before."""
    global _status
    if _status is not None:  # standard error may be another by now: a live view puts itself in between
        _status.write("\r\x1b[2K")
        _status.flush()
        _status = None
    if text and can_draw():
        _status = sys.stderr
        _status.write(text[: shutil.get_terminal_size().columns - 1])  # a line that is wrapped would stay
        _status.flush()


def can_draw() -> bool:
    """Whether standard error is a terminal on which a line can be drawn over, in the first process."""
    is_plain = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return sys.stderr.isatty() and not is_plain and os.environ.get("RANK", "0") == "0"


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Logs nothing below an error: torchao, which peft imports too, tells at length what it lacks."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
