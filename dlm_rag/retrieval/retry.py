"""Calls to a service, repeated until a deadline where that may help."""

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 1.0
MAX_ATTEMPT_FRACTION = 1 / 3  # of a call's seconds: an answer that never comes leaves time for others
_draw_jitter = random.Random().random  # of its own: waits change nothing that is drawn elsewhere


class SearchUnavailableError(RuntimeError):
    """A service gave no answer, or none that can be used; one sentence that names it."""


class RetryableFailure(Exception):  # noqa: N818 - a state, which an attempt may find changed
    """An attempt failed in a way that another may not: refused, cut off, too late, too busy."""


def iterate_backoff_seconds(initial: float, longest: float) -> Iterator[float]:
    """Endless pauses between attempts, each twice the last up to `longest`, with jitter of half of it."""
    while True:
        yield initial * (0.5 + _draw_jitter())
        initial = min(2 * initial, longest)


def call_with_retries(name: str, seconds: float, ask: Callable[[float], T]) -> T:
    """What `ask` returns, which is given the seconds that it may take: at most a third of all.

    It raises `RetryableFailure` for what is tried again; anything else that it raises goes through at once.
    Raises `SearchUnavailableError`, which begins with `name`, where no answer has come within the seconds.
    """
    longest, deadline = seconds * MAX_ATTEMPT_FRACTION, time.monotonic() + seconds
    pauses = iterate_backoff_seconds(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
    while True:
        try:
            return ask(min(longest, max(deadline - time.monotonic(), 0.01)))
        except RetryableFailure as error:
            pause = next(pauses)
            # An attempt without half of its time would only hide why the others failed.
            if time.monotonic() + pause + longest / 2 > deadline:
                raise SearchUnavailableError(f"{name}: {error}") from None
        time.sleep(pause)
