"""One model behind an OpenAI-style server, asked with retries, by some threads at once.

A request that fails temporarily (no connection, no answer in time, 429, 5xx, an answer of another form) is
repeated after a pause that doubles; other refusals are reported in the server's words.
"""

import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from threading import Event, Semaphore
from typing import Any, TypeVar

from dlm_rag.errors import ConfigError, RunError, UserError, suggest_nearest
from dlm_rag.files.checked_json import parse_json
from dlm_rag.retrieval.http import (
    HttpClient,
    RetryableFailure,
    UnusableAnswerError,
    iterate_backoff_seconds,
)
from dlm_rag.text import replace_control_chars

Item = TypeVar("Item")
T = TypeVar("T")
REFUSED_TEXT_STATUSES = (400, 413, 422)  # of this text alone
REQUEST_SECONDS, ATTEMPTS = 120.0, 5  # of a request: seconds for its whole answer, and attempts
INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 30.0  # pauses between attempts
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_MODEL_URL = re.compile(r"openai(s?)://([^/?#]+(?:/[^?#]+)*?/v1)/([^?#]+)")


class ChatError(RuntimeError):
    """A request came to nothing: refused with an HTTP status, or (status None) every attempt failed."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ChatServer:
    """A model and where it is: url ends in /v1, key_variable names the environment's key.

    setting: that names it, as errors begin.
    """

    url: str
    model: str
    setting: str
    key_variable: str


@dataclass(frozen=True)
class Completion:
    """What the model wrote; token counts are the server's, None where it gives none."""

    text: str
    finish_reason: str
    prompt_tokens: int | None
    response_tokens: int | None
    requests: int = 1


def parse_model_url(setting: str, url: str) -> tuple[str, str]:
    """The server's URL, up to /v1, and the name of the model. Raises `ConfigError`."""
    if (found := _MODEL_URL.fullmatch(url)) is None or "@" in found[2]:
        raise ConfigError(f"{setting} must be openai://HOST:PORT/v1/NAME, or openais:// for TLS")
    return f"http{found[1]}://{found[2]}", found[3]


class ChatClient:
    """Asks one model; may be used by several threads."""

    def __init__(self, server: ChatServer) -> None:
        self.server, self._url = server, server.url.rstrip("/")
        self._client = HttpClient(self._url, server.key_variable, use_proxy=True)

    def check_model(self) -> None:
        """Raises `ConfigError` if the server does not answer, or does not have the model."""
        wanted, setting = self.server.model, self.server.setting
        try:
            names = [str(model["id"]) for model in self._send("/models")["data"]]
        except (ChatError, RetryableFailure, LookupError, TypeError) as error:
            said = f" ({error})" if isinstance(error, ChatError | RetryableFailure) else ""
            raise ConfigError(
                f"{setting} does not list its models{said}: give the URL of an OpenAI-style server, with "
                "its /v1"
            ) from None
        if wanted not in names:
            known = replace_control_chars(", ".join(names)) or "none"
            raise ConfigError(
                f"{setting} has no model '{wanted}', but {known}{suggest_nearest(wanted, names)}"
            )

    def ask(self, body: dict[str, Any]) -> Completion:
        """The reply to messages, or what continues a prompt. Raises `ChatError`."""
        failure = ""
        pauses = iterate_backoff_seconds(INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return replace(self._complete(body), requests=attempt)
            except RetryableFailure as error:
                failure = str(error)
            if attempt < ATTEMPTS:
                time.sleep(next(pauses))
        raise ChatError(f"{self._url} failed {ATTEMPTS} times, at last with {failure}")

    def ask_all(
        self, ask: Callable[[Item], T], items: Iterable[Item], concurrency: int
    ) -> Generator[tuple[Item, T | ChatError]]:
        """What `ask` makes of each item, or the error of its request, as they come.

        At most twice `concurrency` of them are under way, or answered and not yet taken. Raises `RunError`
        where the server refuses all requests, and once so many in a row came to nothing that it must be
        gone.
        """

        def ask_one(item: Item) -> tuple[Item, T | ChatError]:
            try:
                return item, ask(item)
            except ChatError as error:
                if error.status is None or error.status in REFUSED_TEXT_STATUSES:
                    return item, error
                said = f"{self._url} refuses ({error})"
                raise RunError(f"{said}: what is there is kept") from None

        stopped, window, in_a_row = Event(), Semaphore(2 * concurrency), 0
        # Its threads are daemons: whoever stops this need not wait for answers that are under way.
        with ThreadPool(concurrency) as pool:
            try:
                for item, found in pool.imap_unordered(ask_one, _admit(items, stopped, window)):
                    gone = isinstance(found, ChatError) and found.status is None
                    in_a_row = in_a_row + 1 if gone else 0
                    yield item, found
                    if in_a_row > concurrency:
                        raise RunError(f"{found}: the same command resumes here")
                    window.release()
            finally:  # the pool waits for its thread that reads items
                stopped.set()
                window.release()

    def _complete(self, body: dict[str, Any]) -> Completion:
        is_chat = "messages" in body
        answer = self._send("/chat/completions" if is_chat else "/completions", body)
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if is_chat else choice["text"]
        except (LookupError, TypeError):
            text = None
        if not isinstance(text, str):
            raise RetryableFailure("an answer of another form (a reply without text)")
        counts = [_read_count(answer.get("usage"), name) for name in ("prompt_tokens", "completion_tokens")]
        return Completion(text, str(choice.get("finish_reason")), counts[0], counts[1])

    def _send(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns the JSON of an answer.

        Raises `ChatError` for a refusal, and `RetryableFailure` for the rest.
        """
        asked = None if body is None else {"model": self.server.model} | body
        try:
            answer = self._client.send(self._url + path, asked, REQUEST_SECONDS, RETRYABLE_STATUSES)
            return parse_json(answer, "an answer of another form", UserError, "answer")
        except UserError as error:
            raise RetryableFailure(str(error)) from None
        except UnusableAnswerError as error:
            said = str(error) if error.status else f"{self._url}: {error}"
            raise ChatError(said, error.status) from None


def _admit(items: Iterable[Item], stopped: Event, window: Semaphore) -> Iterator[Item]:
    """The items, each as soon as the window has room for it, until stopped."""
    for item in items:
        window.acquire()
        if stopped.is_set():
            return
        yield item


def _read_count(usage: Any, name: str) -> int | None:
    """A count of tokens; None for one that is not there, or is no such number."""
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int and 0 <= count < 2**53 else None
