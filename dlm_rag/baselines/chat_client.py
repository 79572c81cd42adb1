"""One model behind an OpenAI-style server, asked with retries, by some threads at once.

A request that fails temporarily (no connection, no answer in time, 429, 5xx, an answer of another form) is
repeated after a pause that doubles; other refusals are reported in the server's words.
"""

import re
import time
from dataclasses import dataclass, replace
from typing import Any

from dlm_rag.errors import ConfigError, UserError, suggest_nearest
from dlm_rag.files.checked_json import parse_json
from dlm_rag.retrieval.http import (
    HttpClient,
    RetryableFailure,
    UnusableAnswerError,
    iterate_backoff_seconds,
)
from dlm_rag.text import replace_control_chars

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
class Completion:
    """What the model wrote; token counts are the server's, None where it gives none."""

    text: str
    finish_reason: str
    prompt_tokens: int | None
    response_tokens: int | None
    requests: int = 1


class ChatClient:
    """Asks the `model` at `url`, which ends in /v1; may be used by several threads.

    address: openai://HOST:PORT/v1/NAME; setting: that names it, as errors begin. key_variable: of the
    environment, that holds the server's key. Raises `ConfigError`.
    """

    def __init__(self, setting: str, address: str, key_variable: str) -> None:
        if (found := _MODEL_URL.fullmatch(address)) is None or "@" in found[2]:
            raise ConfigError(
                f"{setting}={address} must be openai://HOST:PORT/v1/NAME, or openais:// for TLS"
            )
        self.url, self.model = f"http{found[1]}://{found[2]}", found[3]
        self._setting = f"{setting}={address}"
        self._client = HttpClient(self.url, key_variable, use_proxy=True)

    def check_model(self) -> None:
        """Raises `ConfigError` if the server does not answer, or does not have the model."""
        wanted, setting = self.model, self._setting
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
        raise ChatError(f"{self.url} failed {ATTEMPTS} times, at last with {failure}")

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
        asked = None if body is None else {"model": self.model} | body
        try:
            answer = self._client.send(self.url + path, asked, REQUEST_SECONDS, RETRYABLE_STATUSES)
            return parse_json(answer, "an answer of another form", UserError, "answer")
        except UserError as error:
            raise RetryableFailure(str(error)) from None
        except UnusableAnswerError as error:
            said = str(error) if error.status else f"{self.url}: {error}"
            raise ChatError(said, error.status) from None


def _read_count(usage: Any, name: str) -> int | None:
    """A count of tokens; None for one that is not there, or is no such number."""
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int and 0 <= count < 2**53 else None
