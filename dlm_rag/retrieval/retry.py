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

INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 1.0
MAX_ATTEMPT_FRACTION = 1 / 3  # of a call's seconds: an answer that never comes leaves time for others
CIRCUIT_FAILURE_THRESHOLD = 3  # calls that failed in a row
CIRCUIT_OPEN_SECONDS = 5.0
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
    with the last reason. Every `CIRCUIT_OPEN_SECONDS` one call is let through with a single attempt, whose
    success closes the circuit.
    """

    def __init__(self, name: str, seconds: float) -> None:
        """seconds: time limit of a call, all attempts together."""
        self._name, self._seconds = name, seconds
        self.attempt_seconds = seconds * MAX_ATTEMPT_FRACTION
        self._lock = threading.Lock()
        self._failed, self._reason, self._open_until = 0, "", 0.0

    def call(self, ask: Callable[[float], T]) -> T:
        """What `ask` returns, which is given the seconds that it may take.

        It raises `RetryableFailure` for what is tried again; anything else that it raises goes through at
        once. Raises `SearchUnavailableError` where no answer has come by the deadline.
        """
        is_trial, deadline = self._enter(), time.monotonic() + self._seconds
        pauses = iterate_backoff_seconds(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
        while True:
            try:
                found = ask(min(self.attempt_seconds, max(deadline - time.monotonic(), 0.01)))
                self._failed = 0
                return found
            except RetryableFailure as error:
                pause = next(pauses)
                # An attempt without half of its time would only hide why the others failed.
                if is_trial or time.monotonic() + pause + self.attempt_seconds / 2 > deadline:
                    with self._lock:
                        self._failed, self._reason = self._failed + 1, str(error)
                        self._open_until = time.monotonic() + CIRCUIT_OPEN_SECONDS
                    raise SearchUnavailableError(f"{self._name}: {error}") from None
            time.sleep(pause)

    def _enter(self) -> bool:
        """Whether a call is on trial; raises `SearchUnavailableError` where it is not let through."""
        with self._lock:
            if self._failed < CIRCUIT_FAILURE_THRESHOLD:
                return False
            if time.monotonic() < self._open_until:
                raise SearchUnavailableError(
                    f"{self._name}: {self._reason}; {self._failed} calls failed in a row, so it is not "
                    f"asked for {CIRCUIT_OPEN_SECONDS:g} seconds"
                )
            self._open_until = time.monotonic() + CIRCUIT_OPEN_SECONDS
            return True
