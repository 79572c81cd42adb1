"""Questions made from a corpus of titled passages alone, as training asks them (`synthesis/corpus.py`)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dlm_rag.errors import CorpusError, QuestionError
from dlm_rag.evidence.fitting import Room, fit
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import Corpus
from dlm_rag.synthesis.corpus import CorpusRows
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.training.rows.evidence import copies

COPIED = 0.8  # share of a response that its passages must spell out where they are cut


@dataclass(frozen=True)
class Made:
    """chains: need several passages. beside: of one passage each. held_out: chains to validate with."""

    chains: list[Question] = field(default_factory=list)
    beside: list[Question] = field(default_factory=list)
    held_out: list[Question] = field(default_factory=list)


def make_questions(
    corpus: Corpus, tokenizer: Tokenizer, shape: DenoiserConfig, hops: int, held_out: float
) -> Made:
    """What can be asked of a corpus by a denoiser of this shape.

    hops: passages of a chain, at most. held_out: share of the passages that nothing is trained on. Left out
    is what does not fit into prompt and canvas, or stands where passages are cut. Raises `CorpusError`
    where no chain is left for training.
    """
    made, room = Made(), Room.of(shape)
    rows = CorpusRows(corpus, hops, held_out)
    texts = {passage.id: passage.text for passage in corpus}
    for row in _rows(rows):
        question = Question(
            row["id"], row["question"], tuple(row["golden_answers"]), tuple(row["supporting_ids"]),
            row["hops"], row["response"],
        )  # fmt: skip
        if row["held_out"] and row["hops"] == 1:
            continue
        ids = tokenizer.encode(row["response"])
        whole = tokenizer.prompt(question.question, [texts[i] for i in question.supporting_ids])
        try:
            prompt, _ = fit(whole, room)
        except QuestionError:
            continue
        if len(ids) < shape.canvas_length and len(copies(ids, prompt.facts)) >= COPIED * len(ids):
            part = (
                made.held_out
                if row["held_out"]
                else made.chains
                if len(question.supporting_ids) > 1
                else made.beside
            )
            part.append(question)
    if not made.chains:
        raise CorpusError(
            f"{corpus.path}: no sentence of a passage names the title of another that says what it is, so "
            "that nothing can be asked: give data.questions too"
        )
    return made


def _rows(rows: CorpusRows) -> Iterator[dict[str, Any]]:
    for number in range(len(rows)):
        yield from rows.rows(number)[0]
