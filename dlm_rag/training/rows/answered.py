"""Training examples from questions of one's own: evidence as our own retriever finds it while decoding.

An item of a step is one question at one moment: some sentences of its response stand, the passages are
those that the query of that moment brings, the rest is masked in several ways. Everything follows from
(seed, phase, step, item).
"""

import random
from collections.abc import Iterable, Sequence

from dlm_rag.config import TrainConfig
from dlm_rag.errors import QuestionError
from dlm_rag.evidence.fitting import Room, fit
from dlm_rag.evidence.layout import arrange
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.questions import Question
from dlm_rag.randomness import permutation
from dlm_rag.retrieval.base import Retriever
from dlm_rag.retrieval.query import build_query
from dlm_rag.text import sentence_spans
from dlm_rag.tokenizer import Prompt, Tokenizer
from dlm_rag.training.rows.example import Example, masked_canvas


class AnsweredQuestions:
    """The batches of a phase of fine-tuning on questions with known responses."""

    def __init__(
        self, questions: Sequence[Question], retriever: Retriever, tokenizer: Tokenizer,
        denoiser: DenoiserConfig, train: TrainConfig, phase: str,
    ) -> None:  # fmt: skip
        """Raises `QuestionError` for a question without a response or an answer, or that cannot fit."""
        self._questions, self._retriever, self._tokenizer = questions, retriever, tokenizer
        self._denoiser, self._train, self._key = denoiser, train, (train.seed, phase)
        for question in questions:
            response = response_of(question)
            if not response:
                raise QuestionError(f"question '{question.id}' has neither 'response' nor 'golden_answers'")
            length = len(tokenizer.encode(response)) + 1
            if length > denoiser.canvas_length:
                raise QuestionError(
                    f"question '{question.id}': its response and an end token are {length} tokens, more "
                    f"than the canvas of {denoiser.canvas_length}: set decode.canvas_length"
                )
            try:
                self._prompt(question, [])
            except QuestionError as error:
                raise QuestionError(f"question '{question.id}': {error}") from None

    def examples(self, step: int, items: Iterable[int], passages: tuple[int, int]) -> list[Example]:
        """Rows of some questions of a step; all that is found goes into the prompt."""
        moments = []
        for item in items:
            epoch, place = divmod(step * self._train.items + item, len(self._questions))
            order = permutation((*self._key, "questions", epoch), len(self._questions))
            rng = random.Random(f"answered/{self._key}/{step}/{item}")
            question = self._questions[int(order[place])]
            response = response_of(question)
            ends = [0, *(end for _, end in sentence_spans(response))]
            moments.append((rng, question, response, rng.choice(ends)))
        queries = [
            build_query("proxy", q.question, response[:stands]) for _, q, response, stands in moments
        ]
        found = self._retriever.search(queries)
        examples = []
        for (rng, question, response, stands), passages_found in zip(moments, found, strict=True):
            prompt = self._prompt(question, [passage.text for passage in passages_found])
            ids = list(self._tokenizer.encode(response))
            standing = len(self._tokenizer.encode(response[:stands])) if stands else 0
            for _ in range(self._train.rows):
                laid, end_id = arrange(prompt, self._denoiser), self._tokenizer.end_id
                target, hidden, finished = masked_canvas(rng, ids, standing, laid, self._denoiser, end_id)
                examples.append(Example(prompt, target, hidden, finished=finished))
        return examples

    def _prompt(self, question: Question, passages: list[str]) -> Prompt:
        return fit(self._tokenizer.prompt(question.question, passages), Room.of(self._denoiser))[0]


def response_of(question: Question) -> str:
    """What the denoiser is to write: the question's `response`, else `### ` and its first answer."""
    if question.response:
        return question.response
    return f"### {question.golden_answers[0]}" if question.golden_answers else ""
