"""Another model as writer: questions in other words, passages as questions and answers or as a table.

Any server with POST /v1/chat/completions will do.
"""

import hashlib
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, replace

from dlm_rag.baselines.chat_client import ChatClient, ChatServer, Completion
from dlm_rag.config import SynthesisConfig
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.synthesis.cloze_questions import contains_answer
from dlm_rag.synthesis.rows_folder import SourceOutcome
from dlm_rag.text import FUNCTION_WORDS, find_word_spans, normalize_whitespace, split_words

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
WriterRequest = tuple[int, str, Question | Passage]  # its index, its key, and what it is about
CONCURRENCY = 8  # requests at once
TEMPERATURE, MAX_TOKENS = 0.7, 1024  # of the writer; a text that is cut there is dropped
_NUMBER = re.compile(r"\d+")


class LlmWriter:
    """Rows by another model, some requests at once; `failed` counts those that are to be asked again."""

    energy = None  # not measured

    def __init__(self, sources: Sequence[Question | Passage], config: SynthesisConfig) -> None:
        assert config.writer_url is not None
        setting = f"synthesis.writer_url={config.writer_url}"
        self.client = ChatClient(
            ChatServer(config.writer_url, config.writer_model, setting, "DLM_RAG_WRITER_KEY")
        )
        self._config, self._sources, self.failed = config, sources, 0

    def __len__(self) -> int:
        return len(self._sources) * self._config.n

    def outcomes(self, done: set[str]) -> Generator[SourceOutcome]:
        """What becomes of each request that is not done, as it is answered.

        Raises `RunError` as `ChatClient.ask_all` does.
        """
        asked = self.client.ask_all(self._ask, self._requests({*done}), CONCURRENCY)
        for (index, key, _), found in asked:
            if isinstance(found, SourceOutcome):
                yield found
            elif found.status is None:
                self.failed += 1
            else:
                yield SourceOutcome(index, key, [], {"refused by the writer": 1})

    def _requests(self, done: set[str]) -> Iterator[WriterRequest]:
        for index in range(len(self)):
            source, number = self._sources[index // self._config.n], index % self._config.n
            if (key := f"{source.id}#{self._config.template}{number}") not in done:
                yield index, key, source

    def _ask(self, request: WriterRequest) -> SourceOutcome:
        """What becomes of a request. Raises `ChatError`."""
        index, key, source = request
        prompt = format_writer_prompt(source, self._config.template)
        reply = self.client.ask({
            "messages": [{"role": "user", "content": prompt}],
            "seed": int(hashlib.sha256(key.encode()).hexdigest()[:7], 16),  # another for each text
            "temperature": TEMPERATURE, "max_tokens": MAX_TOKENS,
        })  # fmt: skip
        reply = replace(reply, text=reply.text.strip())
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


def check_written_text(source: Question | Passage, reply: Completion) -> dict[str, bool]:
    """What holds of a text, by name; it is kept where all do.

    finished: the writer came to its end, which it did not where it was cut at `MAX_TOKENS`. Of questions,
    other_words: it is a line and not the question as it was; names_kept: every name and number is in it,
    and no other number; answer_not_in_question. Of passages, numbers_held: the passage has every number.
    """
    found = {"finished": reply.finish_reason == "stop" and bool(reply.text)}
    if isinstance(source, Passage):
        held = {*_NUMBER.findall(f"{source.title} {source.contents}")}
        return found | {"numbers_held": {*_NUMBER.findall(reply.text)} <= held}
    said = extract_question(reply.text)
    spoken, numbers = {*split_words(said)}, {*_NUMBER.findall(source.question)}
    given = [answer for answer in source.golden_answers if not contains_answer(source.question, answer)]
    return found | {
        "other_words": "\n" not in said and split_words(said) != split_words(source.question),
        "names_kept": _extract_required_words(source.question) <= spoken
        and {*_NUMBER.findall(said)} <= numbers,
        "answer_not_in_question": not any(contains_answer(said, answer) for answer in given),
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
