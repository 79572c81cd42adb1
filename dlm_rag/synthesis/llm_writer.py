"""Another model as writer: questions in other words, passages as questions and answers or as a table.

Any server with POST /v1/chat/completions will do. A request that fails temporarily (no connection, no
answer in time, 429, 5xx) is repeated after a pause that doubles; other refusals are reported in its words.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.pool import ThreadPool
from threading import Event, Semaphore
from typing import Any, TypeVar

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
COUNTED = ("prompt", "completion")  # tokens, in the usage that a server reports
T = TypeVar("T")
WriterRequest = tuple[int, str, Question | Passage]  # its index, its key, and what it is about
_NUMBER = re.compile(r"\d+")
REFUSED_TEXT_STATUSES = (400, 413, 422)  # of this text alone
INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 30.0  # pauses between attempts
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class ChatError(RuntimeError):
    """A request came to nothing: refused with an HTTP status, or (status None) every attempt failed."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(f"{status}: {message}" if status else message)
        self.status = status


@dataclass(frozen=True)
class ChatCompletion:
    """What the writer wrote; token counts are the server's, None where it gives none."""

    text: str
    finish_reason: str
    prompt_tokens: int | None
    response_tokens: int | None
    requests: int = 1


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
        wanted = self._config.writer_model
        try:
            names = self._send("/models", lambda answer: [str(model["id"]) for model in answer["data"]])
        except (ChatError, RetryableFailure) as error:
            raise ConfigError(
                f"synthesis.writer_url={self._url} does not list its models ({error}): give the URL of an "
                "OpenAI-style server, with its /v1"
            ) from None
        if wanted not in names:
            known = replace_control_chars(", ".join(names)) + suggest_nearest(wanted, names)
            raise ConfigError(f"synthesis.writer_model={wanted} is none of {known}")

    def complete(self, prompt: str, seed: int) -> ChatCompletion:
        """The answer to a prompt. Raises `ChatError`."""
        config, failure = self._config, ""
        body = {
            "model": config.writer_model, "messages": [{"role": "user", "content": prompt}], "seed": seed,
            "temperature": config.temperature, "max_tokens": config.max_tokens,
        }  # fmt: skip
        pauses = iterate_backoff_seconds(INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS)
        for attempt in range(1, config.max_retries + 1):
            try:
                return replace(self._send("/chat/completions", _read_completion, body), requests=attempt)
            except RetryableFailure as error:
                failure = str(error)
            if attempt < config.max_retries:
                time.sleep(next(pauses))
        raise ChatError(f"{self._url} failed {config.max_retries} times, at last with {failure}")

    def _send(self, path: str, read: Callable[[Any], T], body: dict[str, Any] | None = None) -> T:
        """What `read` finds in the JSON of an answer.

        Raises `ChatError` for a refusal, and `RetryableFailure` for the rest.
        """
        try:
            answer = self._client.request("GET" if body is None else "POST", self._url + path, json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise RetryableFailure(describe_connection_error(error)) from None
        try:
            if answer.is_success:
                return read(answer.json())
            message = normalize_whitespace(str(answer.json()["error"]["message"]))[:300]
        except (ValueError, TypeError, LookupError) as error:
            if answer.is_success:
                raise RetryableFailure(f"an answer of another form ({error})") from None
            message = answer.reason_phrase
        message = replace_control_chars(message)
        if answer.status_code in RETRYABLE_STATUSES:
            raise RetryableFailure(f"{answer.status_code}: {message}")
        raise ChatError(message, answer.status_code)


def _read_completion(answer: Any) -> ChatCompletion:
    choice, usage = answer["choices"][0], answer.get("usage")
    text = choice["message"]["content"]
    if not isinstance(text, str):
        raise TypeError("a message without text")
    counts = [usage.get(f"{name}_tokens") if isinstance(usage, dict) else None for name in COUNTED]
    read, written = (count if type(count) is int else None for count in counts)
    return ChatCompletion(text.strip(), str(choice.get("finish_reason")), read, written)


class LlmWriter:
    """Rows by another model, some requests at once; `failed` counts those that are to be asked again."""

    energy = None  # not measured

    def __init__(self, sources: Sequence[Question | Passage], config: SynthesisConfig) -> None:
        self.client, self._config, self._sources = ChatClient(config), config, sources
        self.failed = 0

    def __len__(self) -> int:
        return len(self._sources) * self._config.n

    def outcomes(self, done: set[str]) -> Generator[SourceOutcome]:
        """What becomes of each request that is not done, as it is answered.

        At most twice `concurrency` of them are under way, or answered and not yet taken. Raises `RunError`
        once so many in a row came to nothing that the server must be gone.
        """
        waiting = self._requests(
            {*done}, stopped := Event(), window := Semaphore(2 * self._config.concurrency)
        )
        in_a_row = 0
        # Its threads are daemons: whoever stops this need not wait for answers that are under way.
        with ThreadPool(self._config.concurrency) as pool:
            try:
                for found in pool.imap_unordered(self._ask, waiting):
                    if isinstance(found, SourceOutcome):
                        in_a_row = 0
                        yield found
                    else:
                        self.failed, in_a_row = self.failed + 1, in_a_row + 1
                        if in_a_row > self._config.concurrency:
                            raise RunError(f"{found}: the same command resumes here")
                    window.release()
            finally:  # the pool waits for its thread that reads requests
                stopped.set()
                window.release()

    def _requests(self, done: set[str], stopped: Event, window: Semaphore) -> Iterator[WriterRequest]:
        """The requests that are not done, each as soon as the window has room for it, until stopped."""
        window.acquire()
        for index in range(len(self)):
            if stopped.is_set():
                return
            source, number = self._sources[index // self._config.n], index % self._config.n
            if (key := f"{source.id}#{self._config.template}{number}") not in done:
                yield index, key, source
                window.acquire()

    def _ask(self, request: WriterRequest) -> SourceOutcome | ChatError:
        """What becomes of a request; the error where every attempt failed.

        Raises `RunError` where the server refuses all requests.
        """
        index, key, source = request
        seed = int(hashlib.sha256(key.encode()).hexdigest()[:7], 16)  # another for each text
        try:
            reply = self.client.complete(format_writer_prompt(source, self._config.template), seed)
        except ChatError as error:
            if error.status is None:
                return error
            if error.status in REFUSED_TEXT_STATUSES:
                return SourceOutcome(index, key, [], {"refused by the writer": 1})
            raise RunError(f"the writer refuses ({error}): what is written is kept") from None
        spent = {
            "requests": reply.requests,
            "prompt_tokens": reply.prompt_tokens or 0,
            "response_tokens": reply.response_tokens or 0,
        }
        checked = check_written_text(source, reply)
        if failing := next((f"not {name}" for name, holds in checked.items() if not holds), ""):
            return SourceOutcome(index, key, [], {failing: 1}, spent)
        row = {
            "id": key, "source_ids": [source.id], "template": self._config.template,
            "filters": list(checked), "finish_reason": reply.finish_reason,
            "prompt_tokens": reply.prompt_tokens, "response_tokens": reply.response_tokens,
        }  # fmt: skip
        if isinstance(source, Question):
            known = asdict(source)
            row |= {name: known[name] for name in COPIED_QUESTION_FIELDS}
            row["question"] = extract_question(reply.text)
        else:
            row |= {"title": source.title, "text": reply.text}
        return SourceOutcome(index, key, [row], {}, spent)


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
