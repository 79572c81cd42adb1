"""Another model as writer: questions in other words, passages as questions and answers or as a table."""

import hashlib
import queue
import re
import threading
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dlm_rag.config import SynthesisConfig
from dlm_rag.errors import RunError
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.synthesis.chat_client import (
    ChatClient,
    ChatCompletion,
    ChatRejectedError,
    RetriesExhaustedError,
)
from dlm_rag.synthesis.shards import SourceOutcome
from dlm_rag.text import (
    FUNCTION_WORDS,
    find_word_spans,
    normalize_answer,
    normalize_whitespace,
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
_DONE = object()


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
        asked: queue.Queue[Any] = queue.Queue(self._config.concurrency)
        answered: queue.Queue[Any] = queue.Queue()
        # Daemons: whoever stops this need not wait for the answers that are under way.
        for target in (self._enqueue_requests, *[self._run_worker] * self._config.concurrency):
            threading.Thread(target=target, args=(asked, answered, done), daemon=True).start()
        working, in_a_row = self._config.concurrency, 0
        while working:
            found = answered.get()
            if found is _DONE:
                working -= 1
                continue
            request, reply = found
            if isinstance(reply, ChatCompletion):
                in_a_row = 0
                yield self._outcome(request, reply)
            elif isinstance(reply, ChatRejectedError) and reply.status in (
                400,
                413,
                422,
            ):  # this text alone
                yield SourceOutcome(request.index, request.key, [], {"refused by the writer": 1})
            elif isinstance(reply, RetriesExhaustedError):
                self.failed, in_a_row = self.failed + 1, in_a_row + 1
                if in_a_row > self._config.concurrency:
                    raise RunError(f"{reply}: the same command resumes here") from None
            elif isinstance(reply, ChatRejectedError):
                raise RunError(f"the writer refuses ({reply}): what is written is kept") from None
            else:
                raise reply

    def _enqueue_requests(
        self, asked: "queue.Queue[Any]", answered: "queue.Queue[Any]", done: set[str]
    ) -> None:
        ahead = {*done}  # the caller adds to it
        try:
            for place, source in enumerate(self._sources):
                for number in range(self._config.n):
                    key = f"{source.id}#{self._config.template}{number}"
                    if key not in ahead:
                        asked.put(WriterRequest(place * self._config.n + number, key, source))
        except Exception as error:  # the corpus has changed, say
            answered.put((None, error))
        for _worker in range(self._config.concurrency):
            asked.put(_DONE)

    def _run_worker(self, asked: "queue.Queue[Any]", answered: "queue.Queue[Any]", _: set[str]) -> None:
        while (request := asked.get()) is not _DONE:
            try:
                reply: Any = self.client.complete(
                    format_writer_prompt(request.source, self._config.template), request.seed
                )
            except Exception as error:
                reply = error
            answered.put((request, reply))
        answered.put(_DONE)

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
