"""Training examples from questions of one's own: evidence as our own retriever finds it while decoding.

An item of a step is one set of passages: those that the query of a moment of some question brings, when
some sentences of its response stand. Its rows are that question's, masked in several ways. Everything
follows from (seed, step, item).
"""

import random
from collections.abc import Iterable, Sequence

from dlm_rag.config import TrainConfig
from dlm_rag.errors import QuestionError
from dlm_rag.questions import Question
from dlm_rag.randomness import sample_permutation
from dlm_rag.retrieval.base import Retriever
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import build_query
from dlm_rag.text import find_sentence_spans
from dlm_rag.training.data.examples import CopyIndex, Example, ExampleBuilder


class QuestionExamples:
    """The batches of fine-tuning on questions with known responses."""

    def __init__(
        self, questions: Sequence[Question], retriever: Retriever, builder: ExampleBuilder,
        train: TrainConfig,
    ) -> None:  # fmt: skip
        """Raises `QuestionError` for a question without a response or an answer, or that cannot fit."""
        self._questions, self._retriever, self._builder = questions, retriever, builder
        self._train = train
        for question in questions:
            self._check(question)

    def _check(self, question: Question) -> None:
        response, longest = target_response(question), self._builder.shape.canvas_length
        length = len(self._builder.tokenizer.encode(response)) + 1
        try:
            if not response:
                raise QuestionError("it has neither 'response' nor 'golden_answers'")
            if length > longest:
                raise QuestionError(
                    f"its response and an end token are {length} tokens, more than the canvas of "
                    f"{longest}: set decode.max_new_tokens"
                )
            self._builder.build_prompt(question.question, [])
        except QuestionError as error:
            raise QuestionError(f"question '{question.id}': {error}") from None

    def examples(self, step: int, items: Iterable[int]) -> list[Example]:
        """The rows of some sets of passages of a step."""
        moments = [self._draw_moment(step, item) for item in items]
        found = self._retriever.search(
            [
                build_query("proxy", question.question, target_response(question)[:stands])
                for _, question, stands in moments
            ]
        )
        return [
            self._example(rng, question, evidence, stands)
            for (rng, question, stands), evidence in zip(moments, found, strict=True)
            for _ in range(self._train.rows_per_set)
        ]

    def _draw_moment(self, step: int, item: int) -> tuple[random.Random, Question, int]:
        """The question of an item, and how many characters of its response stand: some sentences."""
        epoch, place = divmod(step * self._train.passage_sets_per_step + item, len(self._questions))
        order = sample_permutation((self._train.seed, "questions", epoch), len(self._questions))
        rng = random.Random(f"answered/{self._train.seed}/{step}/{item}")
        question = self._questions[int(order[place])]
        ends = [end for _, end in find_sentence_spans(target_response(question))]
        return rng, question, rng.choice([0, *ends])

    def _example(
        self, rng: random.Random, question: Question, evidence: Sequence[Passage], stands: int
    ) -> Example:
        """A row of a question of whose response the first `stands` characters stand."""
        encode, response = self._builder.tokenizer.encode, target_response(question)
        prompt = self._builder.build_prompt(question.question, [passage.text for passage in evidence])
        ids, standing = list(encode(response)), len(encode(response[:stands])) if stands else 0
        return self._builder.build_example(rng, prompt, ids, standing, CopyIndex(prompt.facts).find(ids))


def target_response(question: Question) -> str:
    """What the denoiser is to write: the question's `response`, else `### ` and its first answer."""
    if question.response:
        return question.response
    return f"### {question.golden_answers[0]}" if question.golden_answers else ""
