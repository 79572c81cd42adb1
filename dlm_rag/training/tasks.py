"""The tasks there are: to answer with evidence (sft), to model documents (pretrain), to become
bidirectional (adapt).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from dlm_rag.config import Config, TrainConfig
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.sharing import SequenceShare
from dlm_rag.training.objective import Objective, Terms, counts_of
from dlm_rag.training.optimizers import share_left
from dlm_rag.training.origin import Origin
from dlm_rag.training.rows.documents import Documents
from dlm_rag.training.rows.example import Example
from dlm_rag.training.task import State

STAGES = ((2, 2), (2, 4), (4, None))  # passages in a prompt, at least and at most; None: top_k
AFTER_A_STAGE = 0.3  # the running accuracy that the next one begins with


class AnswerRows(Protocol):
    """Where the rows of fine-tuning come from."""

    def examples(self, step: int, items: Iterable[int], passages: tuple[int, int]) -> list[Example]:
        """Rows of some of a step's items; passages: how many in a prompt, at least and at most."""
        ...


class Pretrain:
    """Packed documents: the NELBO per token."""

    name, updates, ahead_of_time = "pretrain", 1, True

    def __init__(self, documents: Documents, train: TrainConfig, end_ids: frozenset[int]) -> None:
        self._documents, self._train, self._end_ids = documents, train, end_ids
        self.items = self.rows = train.items

    def objective(self, denoiser: Denoiser, share: SequenceShare | None) -> Objective:
        return Objective(denoiser, "joint", self._end_ids, self._train.logit_chunk, share)

    def conditions(self, state: State) -> None:
        return None

    def part(self, step: int, items: Sequence[int], conditions: None) -> list[Example]:
        return self._documents.examples(step, items)

    def terms(self, step: int) -> Terms:
        return Terms()

    def counts(self, part: list[Example], terms: Terms) -> dict[str, float]:
        return counts_of(part, self._end_ids, terms.end)

    def metrics(self, sums: dict[str, float], counts: dict[str, float], state: State) -> dict[str, float]:
        return {"loss": sums["tokens"] / counts["divisor"]}

    def advance(self, state: State, metrics: dict[str, Any], counts: dict[str, float]) -> State:
        return state


class Adapt(Pretrain):
    """The same from an autoregressive checkpoint, whose attention opens step by step."""

    name = "adapt"

    def terms(self, step: int) -> Terms:
        """From causal to bidirectional: blocks of 1, doubling at an even pace, then one block."""
        opening = self._train.opening_share * self._train.steps
        if step >= opening:
            return Terms()
        return Terms(block=round(self._train.sequence_length ** (step / opening)))


class Sft:
    """Prompts with evidence and partly masked responses; on invented worlds, with a curriculum.

    The state is the stage of the curriculum and the running accuracy on names that ends it.
    """

    name, updates, ahead_of_time = "sft", 1, True

    def __init__(self, answers: AnswerRows, config: Config, train: TrainConfig, origin: Origin) -> None:
        self._answers, self._train, self._top_k = answers, train, config.retrieval.top_k
        self._end_ids, self._fresh = origin.tokenizer.end_ids, origin.checkpoint is None
        self._curriculum = config.data.questions is None
        self.items, self.rows = train.items, train.items * train.rows

    def objective(self, denoiser: Denoiser, share: SequenceShare | None) -> Objective:
        layout = denoiser.config.evidence_layout
        return Objective(denoiser, layout, self._end_ids, self._train.logit_chunk, share)

    def conditions(self, state: State) -> tuple[int, int]:
        """How many passages the prompts of this stage have: at least, at most."""
        least, most = STAGES[state.get("stage", 0)]
        return min(least, self._top_k), min(most or self._top_k, self._top_k)

    def part(self, step: int, items: Sequence[int], conditions: tuple[int, int]) -> list[Example]:
        return self._answers.examples(step, items, conditions)

    def terms(self, step: int) -> Terms:
        """As the rate falls, end tokens count more and pointers less."""
        train, left = self._train, share_left(step, self._train.steps, self._train.decay_share)
        pointers, late = (
            (default if self._fresh else 0.0) if value is None else value
            for value, default in ((train.pointer_weight, 0.3), (train.late_pointer_weight, 0.08))
        )
        return Terms(
            end=train.late_end_weight + left * (train.end_weight - train.late_end_weight),
            pointers=late + left * (pointers - late),
        )

    def counts(self, part: list[Example], terms: Terms) -> dict[str, float]:
        return counts_of(part, self._end_ids, terms.end)

    def metrics(self, sums: dict[str, float], counts: dict[str, float], state: State) -> dict[str, float]:
        pointed = max(1, counts["pointed"])
        found = {
            "loss": sums["tokens"] / counts["divisor"],
            "name_accuracy": sums["names_right"] / pointed,
        }
        if "pointers" in sums:
            found |= {
                "pointer_loss": sums["pointers"] / pointed,
                "pointer_mass": sums["passage_mass"] / pointed,
            }
        return found | ({"passages": self.conditions(state)[1]} if self._curriculum else {})

    def advance(self, state: State, metrics: dict[str, Any], counts: dict[str, float]) -> State:
        stage, accuracy = state.get("stage", 0), state.get("name_accuracy", 0.0)
        if counts["pointed"]:
            accuracy = 0.97 * accuracy + 0.03 * metrics["name_accuracy"]
        if accuracy > self._train.next_stage_accuracy and stage + 1 < len(STAGES):
            stage, accuracy = stage + 1, AFTER_A_STAGE
        return {"stage": stage, "name_accuracy": accuracy}
