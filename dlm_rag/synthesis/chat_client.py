"""A client of any server with POST /v1/chat/completions.

A request that fails temporarily (no connection, no answer in time, 429, 5xx) is repeated after a pause that
doubles. Other refusals are reported as the server words them.
"""

import os
import time
from dataclasses import dataclass
from typing import Any

import httpx2

from dlm_rag.config import SynthesisConfig
from dlm_rag.errors import ConfigError, suggest_nearest
from dlm_rag.retrieval.retry import RetryableFailure, describe_connection_error, iterate_backoff_seconds
from dlm_rag.text import normalize_whitespace, replace_control_chars

INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 30.0  # pauses between attempts
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class ChatRejectedError(RuntimeError):
    """The server refuses this request, and would at every attempt; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class RetriesExhaustedError(RuntimeError):
    """Every attempt at a request failed."""


@dataclass(frozen=True)
class ChatCompletion:
    """What the writer wrote; token counts are the server's, None where it gives none."""

    text: str
    finish_reason: str
    prompt_tokens: int | None
    response_tokens: int | None
    requests: int


class ChatClient:
    """Asks one model at a URL; may be used by several threads."""

    def __init__(self, config: SynthesisConfig) -> None:
        assert config.writer_url is not None
        self._url, self._config = config.writer_url.rstrip("/"), config
        key = os.environ.get("DLM_RAG_WRITER_KEY")
        self._client = httpx2.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=config.timeout,
            limits=httpx2.Limits(max_connections=None),
        )

    def check_model(self) -> None:
        """Raises `ConfigError` if the server does not answer, or does not have the model."""
        try:
            names = [str(model["id"]) for model in self._send("/models")["data"]]
        except (ChatRejectedError, RetryableFailure, TypeError, KeyError) as error:
            raise ConfigError(
                f"synthesis.writer_url={self._url} does not list its models ({error}): give the URL of an "
                "OpenAI-style server, with its /v1"
            ) from None
        if self._config.writer_model not in names:
            raise ConfigError(
                f"synthesis.writer_model={self._config.writer_model} is none of "
                f"{replace_control_chars(', '.join(names))}"
                f"{suggest_nearest(self._config.writer_model, names)}"
            )

    def complete(self, prompt: str, seed: int) -> ChatCompletion:
        """The answer to a prompt. Raises `ChatRejectedError` and `RetriesExhaustedError`."""
        config, failure = self._config, ""
        body = {
            "model": config.writer_model, "messages": [{"role": "user", "content": prompt}], "seed": seed,
            "temperature": config.temperature, "max_tokens": config.max_tokens,
        }  # fmt: skip
        pauses = iterate_backoff_seconds(INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS)
        for attempt in range(1, config.max_retries + 1):
            try:
                return _parse_completion(self._send("/chat/completions", body), attempt)
            except RetryableFailure as error:
                failure = str(error)
            except (TypeError, LookupError) as error:
                failure = f"no chat completion: {error}"
            if attempt < config.max_retries:
                time.sleep(next(pauses))
        raise RetriesExhaustedError(
            f"{self._url} failed {config.max_retries} times, at last with {failure}"
        )

    def _send(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON value of an answer. Raises `ChatRejectedError`, and `RetryableFailure` for the rest."""
        try:
            answer = self._client.request("GET" if body is None else "POST", self._url + path, json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise RetryableFailure(describe_connection_error(error)) from None
        if not answer.is_success:
            message = _extract_error_message(answer)
            if answer.status_code in RETRYABLE_STATUSES:
                raise RetryableFailure(f"{answer.status_code}: {message}")
            raise ChatRejectedError(answer.status_code, message)
        try:
            return answer.json()
        except ValueError:
            raise RetryableFailure("an answer that is not JSON") from None


def _parse_completion(answer: dict[str, Any], requests: int) -> ChatCompletion:
    choice, usage = answer["choices"][0], answer.get("usage")
    text = choice["message"]["content"]
    if not isinstance(text, str):
        raise TypeError("a message without text")
    names = ("prompt_tokens", "completion_tokens")
    counts = [usage.get(name) if isinstance(usage, dict) else None for name in names]
    read, written = (count if type(count) is int else None for count in counts)
    return ChatCompletion(text.strip(), str(choice.get("finish_reason")), read, written, requests)


def _extract_error_message(answer: httpx2.Response) -> str:
    """The message of an error body in OpenAI's form, or the reason of the status."""
    try:
        return normalize_whitespace(replace_control_chars(str(answer.json()["error"]["message"])))[:300]
    except (ValueError, TypeError, KeyError):
        return replace_control_chars(answer.reason_phrase)
