"""Questions made from a corpus of titled passages alone (`synthesis/cloze_questions.py`)."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dlm_rag.errors import CorpusError, QuestionError
from dlm_rag.evidence.truncation import ContextBudget, truncate_evidence
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import Corpus, Passage
from dlm_rag.synthesis.cloze_questions import CorpusRowGenerator
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.training.data.passage_sampling import find_copy_pointers

MIN_COPIED_SHARE = 0.8  # share of a response that its passages must spell out where they are cut
MAX_CHAIN_DRAWS = 100  # until a chain fits
WHAT_QUESTION_REPEATS = (
    4  # "What is X?" counts so many times as often as a question for a name that is left out
)


@dataclass(frozen=True)
class GeneratedQuestions:
    """chains: need several passages. single_passage: of one passage each. held_out: chains to validate
    with.

    draw_counterfactual: draws a chain that the corpus does not tell, and its second passage; None where
    there are none.
    """

    chains: list[Question] = field(default_factory=list)
    single_passage: list[Question] = field(default_factory=list)
    held_out: list[Question] = field(default_factory=list)
    draw_counterfactual: Callable[[random.Random], tuple[Question, Passage]] | None = None


def generate_corpus_questions(
    corpus: Corpus, tokenizer: Tokenizer, shape: DenoiserConfig, hops: int, held_out: float
) -> GeneratedQuestions:
    """What can be asked of a corpus by a denoiser of this shape.

    hops: passages of a chain, at most; 2 or more. held_out: share of the passages that nothing is trained
    on. Left out is what does not fit into prompt and canvas, or stands where passages are cut. Raises
    `CorpusError` where no chain is left for training.
    """
    rows = CorpusRowGenerator(corpus, hops, held_out)
    texts = {passage.id: passage.text for passage in corpus}
    room = ContextBudget.from_config(shape)

    def fits(question: Question, passages: list[str]) -> bool:
        ids = tokenizer.encode(question.response)
        try:
            prompt, _ = truncate_evidence(tokenizer.build_prompt(question.question, passages), room)
        except QuestionError:
            return False
        return len(ids) < shape.canvas_length and len(
            find_copy_pointers(ids, prompt.facts)
        ) >= MIN_COPIED_SHARE * len(ids)

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

    made, several = GeneratedQuestions(draw_counterfactual=cross if gaps and defined else None), 0
    for row in _iterate_rows(rows):
        question = _to_question(row)
        if row["held_out"] and row["hops"] == 1:
            continue
        several += row["hops"] > 1 and not row["held_out"]
        if fits(question, [texts[i] for i in question.supporting_ids]):
            chains = made.held_out if row["held_out"] else made.chains
            times = WHAT_QUESTION_REPEATS if row["template"] == "what" else 1
            (chains if row["hops"] > 1 else made.single_passage).extend([question] * times)
    if not made.chains:
        lengths = f"passage_length={shape.passage_length} and canvas_length={shape.canvas_length}"
        reason = "no sentence of a passage names the title of another that says what it is"
        if several:
            reason = f"none of its {several} chains to train on fits into {lengths}"
        raise CorpusError(f"{corpus.path}: {reason}, so that nothing can be asked: give data.questions too")
    return made


def _to_question(row: dict[str, Any]) -> Question:
    return Question(
        row["id"], row["question"], tuple(row["golden_answers"]), tuple(row["supporting_ids"]), row["hops"],
        row["response"],
    )  # fmt: skip


def _iterate_rows(rows: CorpusRowGenerator) -> Iterator[dict[str, Any]]:
    for number in range(len(rows)):
        yield from rows.make_rows(number)[0]
