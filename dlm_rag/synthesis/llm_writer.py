"""Another model as writer: questions in other words, passages as questions and answers or as a table.

Any server with POST /v1/chat/completions will do. A request that fails temporarily (no connection, no
answer in time, 429, 5xx) is repeated after a pause that doubles; other refusals are reported in its words.
"""

import hashlib
import os
import queue
import re
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx2

from dlm_rag.config import SynthesisConfig
from dlm_rag.errors import ConfigError, RunError, suggest_nearest
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.retry import RetryableFailure, describe_connection_error, iterate_backoff_seconds
from dlm_rag.synthesis.shards import SourceOutcome
from dlm_rag.text import (
    FUNCTION_WORDS,
    find_word_spans,
    normalize_answer,
    normalize_whitespace,
    replace_control_chars,
    split_words,
)

WRITER_PROMPTS = {
    "paraphrase": "Say the question in other words. Keep every name and number as it is, add nothing, do "
    "not answer it. Reply with the question alone.\n\nQuestion: {text}",
    "faq": "Write questions that the passage answers, each with its answer: a line that begins with Q: and "
    "one that begins with A:. Use nothing but what the passage says.\n\nTitle: {title}\n\n{text}",
    "table": "Write what the passage says as a Markdown table with the columns Subject, Relation and "
    "Object. Use nothing but what the passage says. Reply with the table alone.\n\nTitle: {title}"
    "\n\n{text}",
}
# Copied from a question to its paraphrases.
COPIED_QUESTION_FIELDS = ("golden_answers", "supporting_ids", "hops", "response")
_NUMBER = re.compile(r"\d+")
REFUSED_TEXT_STATUSES = (400, 413, 422)  # of this text alone
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
            if answer.is_success:
                return answer.json()
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise RetryableFailure(describe_connection_error(error)) from None
        except ValueError:
            raise RetryableFailure("an answer that is not JSON") from None
        try:  # an error body in OpenAI's form
            message = normalize_whitespace(replace_control_chars(str(answer.json()["error"]["message"])))[
                :300
            ]
        except (ValueError, TypeError, KeyError):
            message = replace_control_chars(answer.reason_phrase)
        if answer.status_code in RETRYABLE_STATUSES:
            raise RetryableFailure(f"{answer.status_code}: {message}")
        raise ChatRejectedError(answer.status_code, message)


def _parse_completion(answer: dict[str, Any], requests: int) -> ChatCompletion:
    choice, usage = answer["choices"][0], answer.get("usage")
    text = choice["message"]["content"]
    if not isinstance(text, str):
        raise TypeError("a message without text")
    names = ("prompt_tokens", "completion_tokens")
    counts = [usage.get(name) if isinstance(usage, dict) else None for name in names]
    read, written = (count if type(count) is int else None for count in counts)
    return ChatCompletion(text.strip(), str(choice.get("finish_reason")), read, written, requests)


@dataclass(frozen=True)
class WriterRequest:
    """One generation request: its source and its index among all requests."""

    index: int
    key: str
    source: Question | Passage

    @property
    def seed(self) -> int:
        """The same in every run, and another for each text."""
        return int(hashlib.sha256(self.key.encode()).hexdigest()[:7], 16)


class LlmWriter:
    """Rows by another model, some requests at once; `failed` counts those that are to be asked again."""

    def __init__(self, sources: Sequence[Question | Passage], config: SynthesisConfig) -> None:
        self.client, self._config = ChatClient(config), config
        self._sources = sources
        self.failed = 0

    def __len__(self) -> int:
        return len(self._sources) * self._config.n

    def outcomes(self, done: set[str]) -> Generator[SourceOutcome]:
        """What becomes of each request that is not done, as it is answered.

        Raises `RunError` once so many in a row came to nothing that the server must be gone.
        """
        answered: queue.Queue[Any] = queue.Queue(self._config.concurrency)
        requests, lock = self._requests({*done}), threading.Lock()  # the caller adds to `done`

        def ask() -> None:
            request: WriterRequest | None = None
            try:
                while True:
                    with lock:
                        request = next(requests, None)
                    if request is None:
                        break
                    answered.put((request, self._complete(request)))
            except Exception as error:  # the corpus has changed, say
                answered.put((request, error))
            answered.put((None, None))

        # Daemons: whoever stops this need not wait for the answers that are under way.
        for _ in range(self._config.concurrency):
            threading.Thread(target=ask, daemon=True).start()
        working, in_a_row = self._config.concurrency, 0
        while working:
            request, reply = answered.get()
            if isinstance(reply, ChatCompletion):
                in_a_row = 0
                yield self._outcome(request, reply)
            elif isinstance(reply, RetriesExhaustedError):
                self.failed, in_a_row = self.failed + 1, in_a_row + 1
                if in_a_row > self._config.concurrency:
                    raise RunError(f"{reply}: the same command resumes here")
            elif isinstance(reply, ChatRejectedError) and reply.status in REFUSED_TEXT_STATUSES:
                yield SourceOutcome(request.index, request.key, [], {"refused by the writer": 1})
            elif isinstance(reply, ChatRejectedError):
                raise RunError(f"the writer refuses ({reply}): what is written is kept")
            elif reply is not None:
                raise reply
            else:
                working -= 1

    def _requests(self, done: set[str]) -> Iterator[WriterRequest]:
        for place, source in enumerate(self._sources):
            for number in range(self._config.n):
                key = f"{source.id}#{self._config.template}{number}"
                if key not in done:
                    yield WriterRequest(place * self._config.n + number, key, source)

    def _complete(self, request: WriterRequest) -> ChatCompletion | RuntimeError:
        try:
            prompt = format_writer_prompt(request.source, self._config.template)
            return self.client.complete(prompt, request.seed)
        except (ChatRejectedError, RetriesExhaustedError) as error:
            return error

    def _outcome(self, request: WriterRequest, reply: ChatCompletion) -> SourceOutcome:
        spent = {
            "requests": reply.requests,
            "prompt_tokens": reply.prompt_tokens or 0,
            "response_tokens": reply.response_tokens or 0,
        }
        checked = check_written_text(request.source, reply)
        failing = next((f"not {name}" for name, holds in checked.items() if not holds), "")
        if failing:
            return SourceOutcome(request.index, request.key, [], {failing: 1}, spent)
        row = {
            "id": request.key,
            "source_ids": [request.source.id],
            "template": self._config.template,
            "filters": list(checked),
            "finish_reason": reply.finish_reason,
            "prompt_tokens": reply.prompt_tokens,
            "response_tokens": reply.response_tokens,
        }
        if isinstance(request.source, Question):
            known = asdict(request.source)
            row |= {key: known[key] for key in COPIED_QUESTION_FIELDS} | {
                "question": extract_question(reply.text)
            }
        else:
            row |= {"title": request.source.title, "text": reply.text}
        return SourceOutcome(request.index, request.key, [row], {}, spent)


def format_writer_prompt(source: Question | Passage, template: str) -> str:
    """What the writer is asked."""
    if isinstance(source, Question):
        return WRITER_PROMPTS[template].format(text=source.question)
    return WRITER_PROMPTS[template].format(title=source.title, text=source.contents)


def check_written_text(source: Question | Passage, reply: ChatCompletion) -> dict[str, bool]:
    """What holds of a text, by name; it is kept where all do.

    finished: the writer came to its end, which it did not where it was cut at `max_tokens`. Of questions,
    other_words: it is a line and not the question as it was; names_kept: every name and number is in it,
    and no other number; answer_not_in_question. Of passages, numbers_held: the passage has every number.
    """
    found = {"finished": reply.finish_reason == "stop" and bool(reply.text)}
    if isinstance(source, Passage):
        held = {*_NUMBER.findall(f"{source.title} {source.contents}")}
        return found | {"numbers_held": {*_NUMBER.findall(reply.text)} <= held}
    said = extract_question(reply.text)
    spoken, numbers = {*split_words(said)}, {*_NUMBER.findall(source.question)}
    answers = [normalize_answer(answer) for answer in source.golden_answers]
    before, after = (f" {normalize_answer(text)} " for text in (source.question, said))
    return found | {
        "other_words": "\n" not in said and split_words(said) != split_words(source.question),
        "names_kept": _extract_required_words(source.question) <= spoken
        and {*_NUMBER.findall(said)} <= numbers,
        "answer_not_in_question": not any(f" {a} " in after and f" {a} " not in before for a in answers),
    }


def extract_question(text: str) -> str:
    """The question in an answer, without the word and the quotes that some put around it."""
    said = re.sub(r"^\s*question:\s*", "", text, flags=re.IGNORECASE).strip()
    if len(said) > 1 and said[0] == said[-1] == '"':
        said = said[1:-1]
    return said if "\n" in said else normalize_whitespace(said)


def _extract_required_words(text: str) -> set[str]:
    """Words with a capital or a digit, but for the first and for function words."""
    found = find_word_spans(text)[1:]
    return {
        word
        for word, (start, _) in found
        if (text[start].isupper() or text[start].isdigit()) and word not in FUNCTION_WORDS
    }
