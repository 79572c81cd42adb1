"""A client of any server with POST /v1/chat/completions, by the standard library alone.

    {"model": NAME, "messages": [...], "seed": ..., "temperature": ..., "max_tokens": ...}

A request that fails in passing (no connection, no answer in time, 429, 5xx) is made again after a pause
that doubles. Everything else that a server says is told as it is.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from dlm_rag.config import SynthesisConfig
from dlm_rag.errors import ConfigError, suggest_nearest, summarize_error
from dlm_rag.text import normalize_whitespace, replace_control_chars

INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 30.0  # seconds between tries
MAX_REPLY_BYTES = 16 << 20  # bytes of an answer
# states that may be over at the next try
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class ChatRejectedError(RuntimeError):
    """The server will not answer this request, however often it is asked: `status` says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class RetriesExhaustedError(RuntimeError):
    """A request failed at every try."""


@dataclass(frozen=True)
class ChatCompletion:
    """What the writer wrote; token counts are the server's, None where it tells none."""

    text: str
    finish_reason: str
    prompt_tokens: int | None
    response_tokens: int | None
    requests: int


class ChatClient:
    """Asks one model behind a URL; may be used by several threads."""

    def __init__(self, config: SynthesisConfig) -> None:
        assert config.writer_url is not None
        self._url, self._config = config.writer_url.rstrip("/"), config
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("DLM_RAG_WRITER_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"

    def check_model(self) -> None:
        """Raises `ConfigError` where the server does not answer, or has not the model."""
        try:
            found = self._send("/models", None)
            names = [str(model["id"]) for model in found["data"]]
        except (
            ChatRejectedError,
            OSError,
            http.client.HTTPException,
            ValueError,
            TypeError,
            KeyError,
        ) as error:
            raise ConfigError(
                f"synthesis.writer_url={self._url} does not list its models ({_reason(error)}): is it the "
                "URL "
                "of an OpenAI-style server, with its /v1?"
            ) from None
        if self._config.writer_model not in names:
            raise ConfigError(
                f"synthesis.writer_model={self._config.writer_model} is none of "
                f"{replace_control_chars(', '.join(names))}"
                f"{suggest_nearest(self._config.writer_model, names)}"
            )

    def complete(self, prompt: str, seed: int) -> ChatCompletion:
        """The answer to a prompt. Raises `ChatRejectedError` and `RetriesExhaustedError`."""
        config, pause = self._config, INITIAL_RETRY_SECONDS
        body = {
            "model": config.writer_model, "messages": [{"role": "user", "content": prompt}], "seed": seed,
            "temperature": config.temperature, "max_tokens": config.max_tokens,
        }  # fmt: skip
        for attempt in range(1, config.max_retries + 1):
            try:
                return _parse_completion(self._send("/chat/completions", body), attempt)
            except ChatRejectedError as error:
                if error.status not in RETRYABLE_STATUSES:
                    raise
                failure: Exception = error
            except (OSError, http.client.HTTPException, ValueError, TypeError, LookupError) as error:
                failure = error  # no connection, a broken one, or what is no such answer
            if attempt < config.max_retries:
                time.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_SECONDS)
        raise RetriesExhaustedError(
            f"{self._url} failed {config.max_retries} times, at last with {_reason(failure)}"
        )

    def _send(self, path: str, body: dict[str, Any] | None) -> Any:
        """The JSON value of an answer. Raises `ChatRejectedError`, and what urllib and json raise."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._config.timeout) as answer:
                text = answer.read(MAX_REPLY_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise ChatRejectedError(
                    error.code, _extract_error_message(error.read(MAX_REPLY_BYTES), error.reason)
                ) from None
        if len(text) > MAX_REPLY_BYTES:
            raise ValueError(f"an answer of more than {MAX_REPLY_BYTES >> 20} MiB")
        return json.loads(text)


def _parse_completion(answer: dict[str, Any], requests: int) -> ChatCompletion:
    choice, usage = answer["choices"][0], answer.get("usage")
    text = choice["message"]["content"]
    if not isinstance(text, str):
        raise TypeError("a message without text")
    names = ("prompt_tokens", "completion_tokens")
    counts = [usage.get(name) if isinstance(usage, dict) else None for name in names]
    read, written = (count if type(count) is int else None for count in counts)
    return ChatCompletion(text.strip(), str(choice.get("finish_reason")), read, written, requests)


def _extract_error_message(body: bytes, reason: str) -> str:
    """What an error body of that form says, or the reason of its status."""
    try:
        return normalize_whitespace(replace_control_chars(str(json.loads(body)["error"]["message"])))[:300]
    except (ValueError, TypeError, KeyError):
        return replace_control_chars(str(reason))


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None)
    return summarize_error(inner if isinstance(inner, Exception) else error)
