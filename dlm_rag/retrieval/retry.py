"""Calls to a service: repeated until a deadline where that may help, and not made while it is down."""

import errno
import os
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from dlm_rag.errors import summarize_error

T = TypeVar("T")
_draw_jitter = random.Random().random  # of its own: waits change nothing that is drawn elsewhere

INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 1.0
# of a call's seconds, at most: one answer that never comes leaves time for others
MAX_ATTEMPT_FRACTION = 1 / 3
CIRCUIT_FAILURE_THRESHOLD = 3  # calls that failed in a row
CIRCUIT_OPEN_SECONDS = 5.0  # seconds that the circuit stays open at least


class SearchUnavailableError(RuntimeError):
    """A service gave no answer, or none that can be used; one sentence that names it."""


class RetryableFailure(Exception):  # noqa: N818 - a state, which an attempt may find changed
    """An attempt failed in a way that another may not: refused, cut off, too late, too busy."""


def iterate_backoff_seconds(
    initial: float, longest: float, chance: Callable[[], float] = _draw_jitter
) -> Iterator[float]:
    """Pauses before the second attempt and each further one, without end.

    Each is twice the one before, up to `longest`; jitter takes away or adds up to a half.
    """
    while True:
        yield initial * (0.5 + chance())
        initial = min(2 * initial, longest)


def describe_connection_error(error: BaseException) -> str:
    """Why there was no answer: what is at the bottom of an error of the client."""
    while below := error.__cause__ or error.__context__:
        error = below
    if isinstance(error, BaseExceptionGroup):  # of each address that the name has
        error = error.exceptions[0]
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message} (SSL_CERT_FILE names a file of certificates to be trusted)"
    number = getattr(error, "errno", 0)
    if number in errno.errorcode and not isinstance(error, ssl.SSLError):
        return os.strerror(number)  # asyncio has words of its own
    return summarize_error(error)


class CircuitBreaker:
    """Calls to the service `name`, which sentences begin with; any number of threads may call.

    After `CIRCUIT_FAILURE_THRESHOLD` calls that failed in a row the circuit is open: calls fail at once,
    with the last reason. After `CIRCUIT_OPEN_SECONDS` seconds one call gets one attempt, on trial, while
    others go on failing; its success closes the circuit, its failure starts the pause again.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = _draw_jitter,
    ) -> None:
        """seconds: time limit of a call, all attempts together. chance: of [0, 1), for the jitter."""
        self._name, self._seconds = name, seconds
        self.attempt_seconds = seconds * MAX_ATTEMPT_FRACTION
        self._clock, self._sleep, self._chance = clock, sleep, chance
        self._lock = threading.Lock()
        self._failed, self._reason = 0, ""  # calls in a row, and why the last did
        self._open_until, self._on_trial = 0.0, False

    def call(self, ask: Callable[[float], T]) -> T:
        """What `ask` returns, which is given the seconds that it may take.

        It raises `RetryableFailure` for what is tried again; anything else that it raises goes through at
        once, and counts as an answer. Raises `SearchUnavailableError` where none has come by the deadline.
        """
        trial, reason = self._enter(), ""
        try:
            return self._attempt(ask, trial)
        except RetryableFailure as error:
            reason = str(error)
            raise SearchUnavailableError(f"{self._name}: {reason}") from None
        finally:
            self._leave(trial, reason)

    def _attempt(self, ask: Callable[[float], T], once: bool) -> T:
        deadline = self._clock() + self._seconds
        for pause in iterate_backoff_seconds(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, self._chance):
            try:
                return ask(min(self.attempt_seconds, max(deadline - self._clock(), 0.01)))
            except RetryableFailure:
                # What could not have half of its time would only hide why the others failed.
                if once or self._clock() + pause + self.attempt_seconds / 2 > deadline:
                    raise
            self._sleep(pause)
        raise AssertionError("pauses have no end")

    def _enter(self) -> bool:
        """Whether a call is on trial; raises `SearchUnavailableError` where it is not let through."""
        with self._lock:
            if self._failed < CIRCUIT_FAILURE_THRESHOLD:
                return False
            if self._on_trial or self._clock() < self._open_until:
                raise SearchUnavailableError(
                    f"{self._name}: {self._reason}; {self._failed} calls failed in a row, and it is left "
                    "alone for a while"
                )
            self._on_trial = True
            return True

    def _leave(self, trial: bool, reason: str) -> None:
        with self._lock:
            if trial:
                self._on_trial = False
            self._failed, self._reason = (self._failed + 1, reason) if reason else (0, "")
            if self._failed >= CIRCUIT_FAILURE_THRESHOLD:
                self._open_until = self._clock() + CIRCUIT_OPEN_SECONDS
