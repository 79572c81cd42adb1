"""Requests over HTTP with a deadline, a bound on bytes and words for what goes wrong, and their repetition.

They run on an event loop in a thread of its own: only there a deadline holds for name look-ups and for
headers and bodies that trickle, too. Answers must not be compressed: a small one could fill the memory.
"""

import asyncio
import errno
import os
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from http import HTTPStatus
from typing import TypeVar

import httpx2

from dlm_rag.errors import ConfigError, UserError, summarize_error
from dlm_rag.files.checked_json import parse_json
from dlm_rag.retrieval.base import SearchUnavailableError
from dlm_rag.text import normalize_whitespace, replace_control_chars

T = TypeVar("T")
IDLE_CONNECTION_SECONDS = 60.0  # after which an idle connection is closed
MAX_RESPONSE_BYTES = 2**26
INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 1.0
MAX_ATTEMPT_FRACTION = 1 / 3  # of a call's seconds: an answer that never comes leaves time for others
_draw_jitter = random.Random().random  # of its own: waits change nothing that is drawn elsewhere


class RetryableFailure(Exception):  # noqa: N818 - a state, which an attempt may find changed
    """An attempt failed in a way that another may not: refused, cut off, too late, too busy."""


class UnusableAnswerError(RuntimeError):
    """An answer, or an address, that no other attempt would better."""


class HttpClient:
    """Sends requests to one service; any number of threads may.

    token_variable: of the environment, whose bearer token goes to the service and to no other. Raises
    `ConfigError` where the environment's token, certificates or proxy cannot be used.
    """

    def __init__(self, url: str, token_variable: str, use_proxy: bool = False) -> None:
        self._variable, self._token = token_variable, os.environ.get(token_variable, "").strip()
        if not re.fullmatch(r"[!-~]*", self._token):
            raise ConfigError(
                f"{token_variable} in the environment is not a bearer token: it must be printable ASCII "
                "without blanks"
            )
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        try:
            self._client = httpx2.AsyncClient(
                headers=headers | ({"Authorization": f"Bearer {self._token}"} if self._token else {}),
                verify=_create_ssl_context() if url.startswith("https:") else False,
                timeout=None,
                limits=httpx2.Limits(max_connections=None, keepalive_expiry=IDLE_CONNECTION_SECONDS),
                trust_env=use_proxy,  # and the environment's .netrc
            )
        except (httpx2.InvalidURL, ValueError, ImportError) as error:
            raise ConfigError(
                "the proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY in the environment names cannot be "
                f"used: {summarize_error(error)}"
            ) from None

    def send(self, url: str, content: bytes | None, seconds: float) -> tuple[int, bytes]:
        """Returns status and body of a GET, or with content of a POST.

        Raises `RetryableFailure` for what may pass, `UnusableAnswerError` for the rest.
        """
        exchange = asyncio.run_coroutine_threadsafe(
            self._exchange(url, content, seconds), _get_event_loop()
        )
        try:
            return exchange.result()
        except TimeoutError:
            raise RetryableFailure(f"no answer within {seconds:.2g} s") from None
        except httpx2.HTTPError as error:
            raise RetryableFailure(replace_control_chars(describe_connection_error(error))) from None
        except (UnicodeError, httpx2.InvalidURL):  # by Python's idna codec, before any connection
            raise UnusableAnswerError("this is not the name of a host") from None
        finally:
            exchange.cancel()  # after an interrupt

    async def _exchange(self, url: str, content: bytes | None, seconds: float) -> tuple[int, bytes]:
        method, body = "GET" if content is None else "POST", bytearray()
        async with (
            asyncio.timeout(seconds),
            self._client.stream(method, url, content=content) as response,
        ):
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise UnusableAnswerError("its answer is compressed, which was not asked for")
            async for part in response.aiter_raw():
                body += part
                if len(body) > MAX_RESPONSE_BYTES:
                    raise UnusableAnswerError(f"its answer has more than {MAX_RESPONSE_BYTES >> 20} MiB")
        return response.status_code, bytes(body)

    def describe_refusal(self, status: int, body: bytes) -> str:
        """Says what a service has said of a request that it refuses, without the token."""
        words = body[:2000].decode(errors="replace")
        try:
            words = str(parse_json(body, "", UserError)["error"]["message"])
        except (UserError, LookupError, TypeError):
            words = words or HTTPStatus(status).phrase if status in {*HTTPStatus} else words
        if self._token:
            words = words.replace(self._token, "***")
        words = normalize_whitespace(replace_control_chars(words[:2000]))[:200]
        hint = ""
        if status in (401, 403):
            state = "not its key" if self._token else "not set"
            hint = f": {self._variable} in the environment is {state}"
        return f"HTTP status {status}" + (f" ({words})" if words else "") + hint


def describe_connection_error(error: BaseException) -> str:
    """Says why there was no answer: what is at the bottom of an error of the client."""
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


@cache
def _get_event_loop() -> asyncio.AbstractEventLoop:
    """The loop that all requests of this process run on."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="requests over HTTP", daemon=True).start()
    return loop


def _create_ssl_context() -> ssl.SSLContext:
    """Trusts the system's authorities, or those that SSL_CERT_FILE or SSL_CERT_DIR name."""
    try:
        return httpx2.create_ssl_context()
    except OSError as error:  # no such file, or no certificates in it
        raise ConfigError(
            "the certificates that SSL_CERT_FILE or SSL_CERT_DIR names cannot be read "
            f"({summarize_error(error)})"
        ) from None


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
