"""One model behind an OpenAI-style server, asked with retries, by some threads at once.

A request that fails temporarily (no connection, no answer in time, 429, 5xx, an answer of another form) is
repeated after a pause that doubles; other refusals are reported in the server's words.
"""

import math
import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from threading import Event, Semaphore
from typing import Any, TypeVar

import httpx2

from dlm_rag.errors import ConfigError, RunError, suggest_nearest
from dlm_rag.retrieval.retry import RetryableFailure, describe_connection_error, iterate_backoff_seconds
from dlm_rag.text import normalize_whitespace, replace_control_chars

Item = TypeVar("Item")
T = TypeVar("T")
REFUSED_TEXT_STATUSES = (400, 413, 422)  # of this text alone
INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 30.0  # pauses between attempts
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_MODEL_URL = re.compile(r"openai(s?)://([^/?#]+(?:/[^?#]+)*?/v1)/([^?#]+)")


class ChatError(RuntimeError):
    """A request came to nothing: refused with an HTTP status, or (status None) every attempt failed."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(f"{status}: {message}" if status else message)
        self.status = status


@dataclass(frozen=True)
class ChatServer:
    """A model and where it is: url ends in /v1, key_variable names the environment's key.

    setting: that names it, as errors begin. timeout: of a request, in seconds. max_retries: attempts.
    """

    url: str
    model: str
    setting: str
    key_variable: str
    timeout: float
    max_retries: int


@dataclass(frozen=True)
class WrittenToken:
    """A token of a reply; log_prob in nats, top: log-probabilities of the likeliest, falling."""

    text: str
    log_prob: float
    top: tuple[float, ...] = ()

    @property
    def margin(self) -> float:
        """By how much the likeliest token is above the next, in nats, as in logits."""
        return self.top[0] - self.top[1] if len(self.top) > 1 else math.inf


@dataclass(frozen=True)
class Completion:
    """What the model wrote; token counts are the server's, None where it gives none."""

    text: str
    finish_reason: str
    prompt_tokens: int | None
    response_tokens: int | None
    tokens: tuple[WrittenToken, ...] = ()  # where log-probabilities were asked for
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
        key = os.environ.get(server.key_variable, "").strip()
        self._client = httpx2.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=server.timeout,
            limits=httpx2.Limits(max_connections=None),
        )

    def check_model(self) -> None:
        """Raises `ConfigError` if the server does not answer, or does not have the model."""
        wanted, setting = self.server.model, self.server.setting
        try:
            names = self._send("/models", lambda answer: [str(model["id"]) for model in answer["data"]])
        except (ChatError, RetryableFailure) as error:
            raise ConfigError(
                f"{setting} does not list its models ({error}{self._explain(error)}): give "
                "the URL of an OpenAI-style server, with its /v1"
            ) from None
        if wanted not in names:
            known = replace_control_chars(", ".join(names)) or "none"
            raise ConfigError(
                f"{setting} has no model '{wanted}', but {known}{suggest_nearest(wanted, names)}"
            )

    def _explain(self, error: Exception) -> str:
        """What to do about a key that the server wants."""
        if not isinstance(error, ChatError) or error.status not in (401, 403):
            return ""
        state = "not its key" if "authorization" in self._client.headers else "not set"
        return f"; {self.server.key_variable} in the environment is {state}"

    def ask(self, body: dict[str, Any]) -> Completion:
        """The reply to messages, or what continues a prompt. Raises `ChatError`."""
        failure, server = "", self.server
        path = "/completions" if "prompt" in body else "/chat/completions"
        pauses = iterate_backoff_seconds(INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS)
        for attempt in range(1, server.max_retries + 1):
            try:
                found = self._send(path, lambda answer: _read_completion(answer, body), body)
                return replace(found, requests=attempt)
            except RetryableFailure as error:
                failure = str(error)
            if attempt < server.max_retries:
                time.sleep(next(pauses))
        raise ChatError(f"{self._url} failed {server.max_retries} times, at last with {failure}")

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
                said = f"{self._url} refuses ({error}{self._explain(error)})"
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

    def _send(self, path: str, read: Callable[[Any], T], body: dict[str, Any] | None = None) -> T:
        """What `read` finds in the JSON of an answer.

        Raises `ChatError` for a refusal, and `RetryableFailure` for the rest.
        """
        asked = None if body is None else {"model": self.server.model} | body
        try:
            answer = self._client.request("GET" if body is None else "POST", self._url + path, json=asked)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise RetryableFailure(describe_connection_error(error)) from None
        try:
            if answer.is_success:
                return read(answer.json())
            message = normalize_whitespace(str(answer.json()["error"]["message"]))[:300]
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            if answer.is_success:
                raise RetryableFailure(f"an answer of another form ({error})") from None
            message = answer.reason_phrase
        message = replace_control_chars(message)
        if answer.status_code in RETRYABLE_STATUSES:
            raise RetryableFailure(f"{answer.status_code}: {message}")
        raise ChatError(message, answer.status_code)


def _admit(items: Iterable[Item], stopped: Event, window: Semaphore) -> Iterator[Item]:
    """The items, each as soon as the window has room for it, until stopped."""
    for item in items:
        window.acquire()
        if stopped.is_set():
            return
        yield item


def _read_completion(answer: Any, body: dict[str, Any]) -> Completion:
    """Raises `ValueError`, `TypeError` or `LookupError` for an answer of another form."""
    choice, usage = answer["choices"][0], answer.get("usage")
    text = choice["text"] if "prompt" in body else choice["message"]["content"]
    if not isinstance(text, str):
        raise TypeError("a reply without text")
    names = ("prompt_tokens", "completion_tokens")
    counts = [usage.get(name) if isinstance(usage, dict) else None for name in names]
    read, written = (count if type(count) is int else None for count in counts)
    tokens = _read_tokens(choice["logprobs"]) if body.get("logprobs") else ()
    return Completion(text, str(choice.get("finish_reason")), read, written, tokens)


def _read_tokens(found: Any) -> tuple[WrittenToken, ...]:
    """The tokens of a reply, in the form of chats or in that of plain completions."""
    if "content" in found:
        tokens = [
            (each["token"], each["logprob"], [top["logprob"] for top in each["top_logprobs"]])
            for each in found["content"]
        ]
    else:
        tops = [top.values() for top in found["top_logprobs"]]
        tokens = [*zip(found["tokens"], found["token_logprobs"], tops, strict=True)]
    return tuple(
        WrittenToken(str(text), float(log_prob), tuple(sorted(map(float, top), reverse=True)))
        for text, log_prob, top in tokens
    )
