"""Questions made from a corpus of titled passages alone, as training asks them (`synthesis/corpus.py`)."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dlm_rag.errors import CorpusError, QuestionError
from dlm_rag.evidence.fitting import Room, fit
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import Corpus, Passage
from dlm_rag.synthesis.corpus import CorpusRows
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.training.rows.evidence import copies

COPIED = 0.8  # share of a response that its passages must spell out where they are cut
MOST_DRAWS = 100  # until a chain fits
WHAT_IT_IS = 4  # "What is X?" counts so many times as often as a question for a name that is left out


@dataclass(frozen=True)
class Made:
    """chains: need several passages. beside: of one passage each. held_out: chains to validate with.

    crossed: draws a chain that the corpus does not tell, and its second passage; None where there are none.
    """

    chains: list[Question] = field(default_factory=list)
    beside: list[Question] = field(default_factory=list)
    held_out: list[Question] = field(default_factory=list)
    crossed: Callable[[random.Random], tuple[Question, Passage]] | None = None


def make_questions(
    corpus: Corpus, tokenizer: Tokenizer, shape: DenoiserConfig, hops: int, held_out: float
) -> Made:
    """What can be asked of a corpus by a denoiser of this shape.

    hops: passages of a chain, at most; 2 or more. held_out: share of the passages that nothing is trained
    on. Left out is what does not fit into prompt and canvas, or stands where passages are cut. Raises
    `CorpusError` where no chain is left for training.
    """
    rows = CorpusRows(corpus, hops, held_out)
    texts = {passage.id: passage.text for passage in corpus}
    room = Room.of(shape)

    def fits(question: Question, passages: list[str]) -> bool:
        ids = tokenizer.encode(question.response)
        try:
            prompt, _ = fit(tokenizer.prompt(question.question, passages), room)
        except QuestionError:
            return False
        return len(ids) < shape.canvas_length and len(copies(ids, prompt.facts)) >= COPIED * len(ids)

    gaps, defined = rows.crossings()

    def cross(rng: random.Random) -> tuple[Question, Passage]:
        for _ in range(MOST_DRAWS):
            gap = rng.choice(gaps)
            row, second = rows.cross(gap, rng.choice(defined))
            question = _question(row)
            first = texts[question.supporting_ids[0]]
            if gap.name not in row["golden_answers"][0] and fits(question, [first, second.text]):
                return question, second
        raise CorpusError(
            f"{corpus.path}: of {MOST_DRAWS} chains across its passages none fits: set train.crossed=0"
        )

    made, several = Made(crossed=cross if gaps and defined else None), 0
    for row in _rows(rows):
        question = _question(row)
        if row["held_out"] and row["hops"] == 1:
            continue
        several += row["hops"] > 1 and not row["held_out"]
        if fits(question, [texts[i] for i in question.supporting_ids]):
            chains = made.held_out if row["held_out"] else made.chains
            times = WHAT_IT_IS if row["template"] == "what" else 1
            (chains if row["hops"] > 1 else made.beside).extend([question] * times)
    if not made.chains:
        lengths = f"passage_length={shape.passage_length} and canvas_length={shape.canvas_length}"
        reason = "no sentence of a passage names the title of another that says what it is"
        if several:
            reason = f"none of its {several} chains to train on fits into {lengths}"
        raise CorpusError(f"{corpus.path}: {reason}, so that nothing can be asked: give data.questions too")
    return made


def _question(row: dict[str, Any]) -> Question:
    return Question(
        row["id"], row["question"], tuple(row["golden_answers"]), tuple(row["supporting_ids"]), row["hops"],
        row["response"],
    )  # fmt: skip


def _rows(rows: CorpusRows) -> Iterator[dict[str, Any]]:
    for number in range(len(rows)):
        yield from rows.rows(number)[0]
