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
from dlm_rag.errors import ConfigError, fold_message, nearest
from dlm_rag.text import fold, visible

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between tries
LARGEST = 16 << 20  # bytes of an answer
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})  # states that may be over at the next try


class RefusedError(RuntimeError):
    """The server will not answer this request, however often it is asked: `status` says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class UnansweredError(RuntimeError):
    """A request failed at every try."""


@dataclass(frozen=True)
class Reply:
    """What the writer wrote; token counts are the server's, None where it tells none."""

    text: str
    finish_reason: str
    prompt_tokens: int | None
    response_tokens: int | None
    requests: int


class ChatClient:
    """Asks one model behind a URL; may be used by several threads."""

    def __init__(self, config: SynthesisConfig) -> None:
        assert config.writer is not None
        self._url, self._config = config.writer.rstrip("/"), config
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("DLM_RAG_WRITER_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"

    def check(self) -> None:
        """Raises `ConfigError` where the server does not answer, or has not the model."""
        try:
            found = self._send("/models", None)
            names = [str(model["id"]) for model in found["data"]]
        except (RefusedError, OSError, http.client.HTTPException, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"synthesis.writer={self._url} does not list its models ({_reason(error)}): is it the URL "
                "of an OpenAI-style server, with its /v1?"
            ) from None
        if self._config.writer_model not in names:
            raise ConfigError(
                f"synthesis.writer_model={self._config.writer_model} is none of {visible(', '.join(names))}"
                f"{nearest(self._config.writer_model, names)}"
            )

    def ask(self, prompt: str, seed: int) -> Reply:
        """The answer to a prompt. Raises `RefusedError` and `UnansweredError`."""
        config, pause = self._config, FIRST_PAUSE
        body = {
            "model": config.writer_model, "messages": [{"role": "user", "content": prompt}], "seed": seed,
            "temperature": config.temperature, "max_tokens": config.most_tokens,
        }  # fmt: skip
        for attempt in range(1, config.tries + 1):
            try:
                return _reply(self._send("/chat/completions", body), attempt)
            except RefusedError as error:
                if error.status not in PASSING:
                    raise
                failure: Exception = error
            except (OSError, http.client.HTTPException, ValueError, TypeError, LookupError) as error:
                failure = error  # no connection, a broken one, or what is no such answer
            if attempt < config.tries:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        raise UnansweredError(f"{self._url} failed {config.tries} times, at last with {_reason(failure)}")

    def _send(self, path: str, body: dict[str, Any] | None) -> Any:
        """The JSON value of an answer. Raises `RefusedError`, and what urllib and json raise."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._config.timeout) as answer:
                text = answer.read(LARGEST + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise RefusedError(error.code, _told(error.read(LARGEST), error.reason)) from None
        if len(text) > LARGEST:
            raise ValueError(f"an answer of more than {LARGEST >> 20} MiB")
        return json.loads(text)


def _reply(answer: dict[str, Any], requests: int) -> Reply:
    choice, usage = answer["choices"][0], answer.get("usage")
    text = choice["message"]["content"]
    if not isinstance(text, str):
        raise TypeError("a message without text")
    names = ("prompt_tokens", "completion_tokens")
    counts = [usage.get(name) if isinstance(usage, dict) else None for name in names]
    read, written = (count if type(count) is int else None for count in counts)
    return Reply(text.strip(), str(choice.get("finish_reason")), read, written, requests)


def _told(body: bytes, reason: str) -> str:
    """What an error body of that form says, or the reason of its status."""
    try:
        return fold(visible(str(json.loads(body)["error"]["message"])))[:300]
    except (ValueError, TypeError, KeyError):
        return visible(str(reason))


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None)
    return fold_message(inner if isinstance(inner, Exception) else error)
