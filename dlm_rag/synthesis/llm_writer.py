"""Another model as writer: questions in other words. Any server with POST /v1/chat/completions will do."""

import hashlib
import re
from collections.abc import Generator, Sequence

from dlm_rag.baselines.chat_client import ChatClient, ChatServer, Completion
from dlm_rag.config import SynthesisConfig
from dlm_rag.questions import Question
from dlm_rag.synthesis.cloze_questions import contains_answer
from dlm_rag.synthesis.rows_folder import SourceOutcome
from dlm_rag.text import FUNCTION_WORDS, find_word_spans, normalize_whitespace, split_words

WRITER_PROMPT = (
    "Say the question in other words. Keep every name and number as it is, add nothing, do not answer it. "
    "Reply with the question alone.\n\nQuestion: {text}"
)
CONCURRENCY = 8  # requests at once
TEMPERATURE, MAX_TOKENS = 0.7, 1024  # of the writer; a text that is cut there is dropped
_NUMBER = re.compile(r"\d+")


class LlmWriter:
    """Rows by another model, some requests at once; `failed` counts those that are to be asked again."""

    def __init__(self, questions: Sequence[Question], config: SynthesisConfig) -> None:
        assert config.writer_url is not None
        setting = f"synthesis.writer_url={config.writer_url}"
        self.client = ChatClient(
            ChatServer(config.writer_url, config.writer_model, setting, "DLM_RAG_WRITER_KEY")
        )
        self._questions, self.failed = questions, 0

    def __len__(self) -> int:
        return len(self._questions)

    def outcomes(self, done: set[str]) -> Generator[SourceOutcome]:
        """Yields what becomes of each question that is not done, as it is answered.

        Raises `RunError` as `ChatClient.ask_all` does.
        """
        done = {*done}
        waiting = ((n, each) for n, each in enumerate(self._questions) if each.id not in done)
        for (place, question), found in self.client.ask_all(self._ask, waiting, CONCURRENCY):
            if isinstance(found, SourceOutcome):
                yield found
            elif found.status is None:
                self.failed += 1
            else:
                yield SourceOutcome(place, question.id, [], {"left out: refused by the writer": 1})

    def _ask(self, asked: tuple[int, Question]) -> SourceOutcome:
        """Returns what becomes of a question. Raises `ChatError`."""
        place, question = asked
        reply = self.client.ask({
            "messages": [{"role": "user", "content": WRITER_PROMPT.format(text=question.question)}],
            "seed": int(hashlib.sha256(question.id.encode()).hexdigest()[:7], 16),  # another for each
            "temperature": TEMPERATURE, "max_tokens": MAX_TOKENS,
        })  # fmt: skip
        counts = {
            "writer: requests": reply.requests,
            "writer: prompt tokens": reply.prompt_tokens or 0,
            "writer: response tokens": reply.response_tokens or 0,
        }
        checked = check_paraphrase(question, reply)
        if failing := next((name for name, holds in checked.items() if not holds), ""):
            return SourceOutcome(place, question.id, [], counts | {f"left out: not {failing}": 1})
        row = {
            "id": f"{question.id}#paraphrase", "question": extract_question(reply.text),
            "golden_answers": list(question.golden_answers),
            "supporting_ids": list(question.supporting_ids), "hops": question.hops,
            "response": question.response, "source_ids": [question.id], "template": "paraphrase",
            "filters": list(checked),
        }  # fmt: skip
        return SourceOutcome(place, question.id, [row], counts)


def check_paraphrase(question: Question, reply: Completion) -> dict[str, bool]:
    """Returns what holds of a paraphrase, by name; it is kept where all do.

    finished: the writer came to its end, which it did not where it was cut at `MAX_TOKENS`. other_words: it
    is a line and not the question as it was. names_kept: every name and number is in it, and no other
    number. answer_not_in_question: nor is an answer, where the question did not have it.
    """
    said = extract_question(reply.text)
    spoken, numbers = {*split_words(said)}, {*_NUMBER.findall(question.question)}
    given = [answer for answer in question.golden_answers if not contains_answer(question.question, answer)]
    return {
        "finished": reply.finish_reason == "stop" and bool(reply.text.strip()),
        "other_words": "\n" not in said and split_words(said) != split_words(question.question),
        "names_kept": _extract_required_words(question.question) <= spoken
        and {*_NUMBER.findall(said)} <= numbers,
        "answer_not_in_question": not any(contains_answer(said, answer) for answer in given),
    }


def extract_question(text: str) -> str:
    """Returns the question in a reply, without the word and the quotes that some put around it."""
    said = re.sub(r"^\s*question:\s*", "", text, flags=re.IGNORECASE).strip()
    if len(said) > 1 and said[0] == said[-1] == '"':
        said = said[1:-1]
    return said if "\n" in said else normalize_whitespace(said)


def _extract_required_words(text: str) -> set[str]:
    """Returns words with a capital or a digit, but for the first and for function words."""
    found = find_word_spans(text)[1:]
    return {
        word
        for word, (start, _) in found
        if (text[start].isupper() or text[start].isdigit()) and word not in FUNCTION_WORDS
    }
