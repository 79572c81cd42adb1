"""Training examples from questions of one's own: evidence as our own retriever finds it while decoding.

An item of a step is one set of passages: those that the query of a moment of some question brings, when
some sentences of its response stand. Its rows are that question's, masked in several ways; half of the rows
are of single-passage questions, if there are any. Everything follows from (seed, phase, step, item).
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, takewhile
from typing import Any

from dlm_rag.config import TrainConfig
from dlm_rag.errors import CorpusError, QuestionError
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.questions import Question
from dlm_rag.randomness import sample_permutation
from dlm_rag.retrieval.base import Retriever
from dlm_rag.retrieval.corpus import Corpus, Passage
from dlm_rag.retrieval.forked_workers import map_ranges
from dlm_rag.retrieval.query import build_query
from dlm_rag.synthesis.cloze_questions import CorpusRowGenerator
from dlm_rag.text import find_sentence_spans, strip_disambiguation
from dlm_rag.training.data.examples import (
    CopyIndex,
    Example,
    ExampleBuilder,
    sample_passages,
)

MIN_COPIED_SHARE = 0.8  # share of a response that its passages must spell out where they are cut
MAX_CHAIN_DRAWS = 100  # until a chain fits
# "What is X?" counts so many times as often as a question for a name that is left out
WHAT_QUESTION_REPEATS = 4
MISSING_PASSAGE_SHARE = 0.4  # share of the crossed moments up to the second sentence without its passage
MAX_UNSUPPORTED_TOKENS = 3  # supervised of what no passage there tells, so that it is not held for certain
QUERY_GUESS_WORDS = 3  # of the next sentence, in the query of a moment
# shares of the moments with such words, and with those of another
RIGHT_GUESS_SHARE, WRONG_GUESS_SHARE = (0.4, 0.3)

CounterfactualSampler = Callable[[random.Random], tuple[Question, Passage]]


@dataclass(frozen=True)
class TrainingQuestions:
    """chains: of one's own, or generated ones that need several passages. single_passage: of one passage
    each, with which training begins on few passages. held_out: chains to validate with.

    draw_counterfactual: draws a chain that the corpus does not tell, and its second passage; None where
    there are none.
    """

    chains: Sequence[Question]
    single_passage: Sequence[Question] = ()
    held_out: Sequence[Question] = ()
    draw_counterfactual: CounterfactualSampler | None = None


def generate_corpus_questions(
    corpus: Corpus, builder: ExampleBuilder, hops: int, held_out: float
) -> TrainingQuestions:
    """What can be asked of a corpus.

    hops: passages of a chain, at most; 2 or more. held_out: share of the passages that nothing is trained
    on. Left out is what does not fit into prompt and canvas, or stands where passages are cut. Raises
    `CorpusError` where no chain is left for training.
    """
    rows = CorpusRowGenerator(corpus, hops, held_out)
    texts = {passage.id: passage.text for passage in corpus}
    fits = _make_fit_check(builder)
    gaps, defined = rows.list_counterfactual_parts()

    def cross(rng: random.Random) -> tuple[Question, Passage]:
        for _ in range(MAX_CHAIN_DRAWS):
            gap = rng.choice(gaps)
            row, second = rows.make_counterfactual(gap, rng.choice(defined))
            question = _to_question(row)
            first = texts[question.supporting_ids[0]]
            if gap.name not in row["golden_answers"][0] and fits(question, [first, second.text]):
                return question, second
        raise CorpusError(
            f"{corpus.path}: of {MAX_CHAIN_DRAWS} chains across its passages none fits: set "
            "train.counterfactual_share=0"
        )

    def make(numbers: range) -> list[tuple[str, Question, int]]:
        """Questions with their kind and how often they are asked: not at all where they do not fit."""
        made = []
        for row in chain.from_iterable(rows.make_rows(number)[0] for number in numbers):
            question = _to_question(row)
            kind = "held_out" if row["held_out"] else "chains" if row["hops"] > 1 else "single_passage"
            if kind != "held_out" or row["hops"] > 1:
                times = WHAT_QUESTION_REPEATS if row["template"] == "what" else 1
                there = fits(question, [texts[i] for i in question.supporting_ids])
                made.append((kind, question, times if there else 0))
        return made

    found: dict[str, list[Question]] = {"chains": [], "single_passage": [], "held_out": []}
    several = 0
    for kind, question, times in map_ranges(make, len(rows)):
        several += kind == "chains"
        found[kind] += [question] * times
    if not found["chains"]:
        raise CorpusError(f"{corpus.path}: {_explain_no_chains(several, builder.shape)}")
    return TrainingQuestions(
        **found,
        draw_counterfactual=cross if gaps and defined else None,
    )


def _make_fit_check(builder: ExampleBuilder) -> Callable[[Question, list[str]], bool]:
    """Whether a question and its response fit, and stand in what is left of the texts of their passages."""

    @lru_cache(maxsize=16)  # the rows of a passage follow one another
    def index(*passages: str) -> CopyIndex:
        return CopyIndex(builder.build_prompt("", passages).facts)

    def fits(question: Question, passages: list[str]) -> bool:
        assert question.response is not None
        ids = builder.tokenizer.encode_uncached(question.response)
        if not _has_room(builder, question.question):
            return False
        copied = len(index(*passages).find(ids))
        return len(ids) < builder.shape.canvas_length and copied >= MIN_COPIED_SHARE * len(ids)

    return fits


def _explain_no_chains(several: int, shape: DenoiserConfig) -> str:
    """Why nothing can be asked of a corpus that has so many chains to train on."""
    reason = "no sentence of a passage names the title of another that says what it is"
    if several:
        lengths = f"passage_length={shape.passage_length} and canvas_length={shape.canvas_length}"
        reason = f"none of its {several} chains to train on fits into {lengths}"
    return f"{reason}, so that nothing can be asked: give data.questions too"


def _has_room(builder: ExampleBuilder, question: str) -> bool:
    """Whether a question fits into a prompt; it has no more tokens than bytes."""
    shape = builder.shape
    if len(question.encode()) < shape.max_position_embeddings - shape.passage_length - shape.canvas_length:
        return True
    try:
        builder.build_prompt(question, [])
    except QuestionError:
        return False
    return True


def _to_question(row: dict[str, Any]) -> Question:
    answers, supporting = tuple(row["golden_answers"]), tuple(row["supporting_ids"])
    return Question(row["id"], row["question"], answers, supporting, row["hops"], row["response"])


class QuestionExamples:
    """The batches of a phase of fine-tuning on questions with known responses."""

    def __init__(
        self, questions: TrainingQuestions, retriever: Retriever, builder: ExampleBuilder,
        train: TrainConfig, phase: str,
    ) -> None:  # fmt: skip
        """Raises `QuestionError` for a question without a response or an answer, or that cannot fit."""
        self._questions, self._retriever, self._builder = questions.chains, retriever, builder
        self._train, self._key = train, (train.seed, phase)
        self._crossed = questions.draw_counterfactual if train.counterfactual_share else None
        self._single = defaultdict[str, list[Question]](list)
        for question in questions.single_passage:
            self._single[question.supporting_ids[0]].append(question)
        for question in questions.chains:
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

    def examples(self, step: int, items: Iterable[int], passages: tuple[int, int]) -> list[Example]:
        """Returns the rows of some sets of passages of a step.

        passages: at least and at most so many in a prompt, if there are single-passage questions; else all
        that is found.
        """
        moments = [self._draw_moment(step, item) for item in items]
        queries = [
            build_query("proxy", question.question, self._query_response(rng, question, stands))
            for rng, question, stands, _ in moments
        ]
        found = self._retriever.search(queries)
        examples: list[Example] = []
        for (rng, question, stands, own), evidence in zip(moments, found, strict=True):
            sentence = _sentence_ends(question).index(stands)
            if own:  # what the corpus says under that name would be another answer
                evidence = [p for p in evidence if strip_disambiguation(p.title) != own.title]
                if sentence > 1 or rng.random() >= MISSING_PASSAGE_SHARE:
                    evidence = [*evidence, own]
            if self._single:
                needed = question.supporting_ids[: sentence + 1]
                evidence = sample_passages(rng, evidence, needed, rng.randint(*passages))
            others = [other for passage in evidence for other in self._single.get(passage.id, ())]
            for row in range(self._train.rows_per_set):
                asked, moment = question, stands
                if others and row >= self._train.rows_per_set // 2:
                    asked = rng.choice(others)
                    moment = rng.choice(_sentence_ends(asked))
                examples.append(self._example(rng, asked, evidence, moment))
        return examples

    def _draw_moment(self, step: int, item: int) -> tuple[random.Random, Question, int, Passage | None]:
        """The question of an item, how much of its response stands, its passage if no corpus tells it."""
        epoch, place = divmod(step * self._train.passage_sets_per_step + item, len(self._questions))
        order = sample_permutation((*self._key, "questions", epoch), len(self._questions))
        rng = random.Random(f"answered/{self._key}/{step}/{item}")
        question, own = self._questions[int(order[place])], None
        if self._crossed and rng.random() < self._train.counterfactual_share:
            question, own = self._crossed(rng)
        return rng, question, rng.choice(_sentence_ends(question)), own

    def _query_response(self, rng: random.Random, question: Question, stands: int) -> str:
        """The part of a response that is in the query: what stands, and now and then a guess after it."""
        response = target_response(question)
        lot = rng.random() if self._single else 1.0
        if lot >= RIGHT_GUESS_SHARE + WRONG_GUESS_SHARE:
            return response[:stands]
        guess = response[stands:]
        if lot >= RIGHT_GUESS_SHARE:
            other = rng.choice(self._questions)
            guess = target_response(other)[rng.choice(_sentence_ends(other)) :]
        return " ".join((response[:stands], *guess.split()[:QUERY_GUESS_WORDS]))

    def _example(
        self, rng: random.Random, question: Question, evidence: Sequence[Passage], stands: int
    ) -> Example:
        """A row of a question of whose response the first `stands` characters stand."""
        encode, response = self._builder.tokenizer.encode, target_response(question)
        prompt = self._builder.build_prompt(question.question, [passage.text for passage in evidence])
        ids, standing = list(encode(response)), len(encode(response[:stands])) if stands else 0
        pointers = CopyIndex(prompt.facts).find(ids)
        row = self._builder.build_example(rng, prompt, ids, standing, pointers)
        told = self._count_supported_tokens(question, ids, {p.id for p in evidence})
        if not row.finished <= told < len(ids):
            return row
        hidden = tuple(hide or place >= told for place, hide in enumerate(row.masked))
        counted = (hide and n < told + MAX_UNSUPPORTED_TOKENS for n, hide in enumerate(hidden))
        return replace(row, masked=hidden, supervised=tuple(counted))

    def _count_supported_tokens(self, question: Question, ids: list[int], found: set[str]) -> int:
        """How many tokens of a response the passages that were found tell, of a chain's in its order.

        These are its sentences up to that of the first passage that is missing, and with them the name that
        this one begins with. Of one's own questions all.
        """
        missing = next((n for n, i in enumerate(question.supporting_ids) if i not in found), None)
        if missing is None or not self._single:
            return len(ids)
        before = target_response(question)[: _sentence_ends(question)[missing]]
        end = len(self._builder.tokenizer.encode(before))
        return end + max((_count_shared_tokens(ids[at:end], ids[end:]) for at in range(end)), default=0)


def _count_shared_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens at the beginnings of both agree."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _sentence_ends(question: Question) -> list[int]:
    """Where a response may stand: at its beginning and after each of its sentences, in characters."""
    return [0, *(end for _, end in find_sentence_spans(target_response(question)))]


def target_response(question: Question) -> str:
    """What the denoiser is to write: the question's `response`, else `### ` and its first answer."""
    if question.response:
        return question.response
    return f"### {question.golden_answers[0]}" if question.golden_answers else ""
