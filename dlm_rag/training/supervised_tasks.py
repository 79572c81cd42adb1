"""The tasks there are: to answer with evidence (sft), to model documents (pretrain), to become
bidirectional (adapt).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from dlm_rag.config import Config, TrainConfig
from dlm_rag.model.context_parallel import ContextParallel
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.training.data.documents import PackedDocuments
from dlm_rag.training.data.example import Example
from dlm_rag.training.model_init import InitialModel
from dlm_rag.training.objective import LossWeights, MaskedObjective, count_examples
from dlm_rag.training.optimizers import compute_decay_factor
from dlm_rag.training.task import TaskState

CURRICULUM_STAGES = ((2, 2), (2, 4), (4, None))  # passages in a prompt, at least and at most; None: top_k
STAGE_START_ACCURACY = 0.3  # the running accuracy that the next one begins with


class ExampleSource(Protocol):
    """Where the rows of fine-tuning come from."""

    def examples(self, step: int, items: Iterable[int], passages: tuple[int, int]) -> list[Example]:
        """Rows of some of a step's items; passages: how many in a prompt, at least and at most."""
        ...


class PretrainTask:
    """Packed documents: the NELBO per token."""

    name, updates, can_prefetch = "pretrain", 1, True

    def __init__(self, documents: PackedDocuments, train: TrainConfig, end_ids: frozenset[int]) -> None:
        self._documents, self._train, self._end_ids = documents, train, end_ids
        self.items = self.rows = train.items

    def objective(self, denoiser: Denoiser, share: ContextParallel | None) -> MaskedObjective:
        return MaskedObjective(denoiser, "joint", self._end_ids, self._train.logit_chunk, share)

    def conditions(self, state: TaskState) -> None:
        return None

    def make_microbatch(self, step: int, items: Sequence[int], conditions: None) -> list[Example]:
        return self._documents.examples(step, items)

    def loss_weights(self, step: int) -> LossWeights:
        return LossWeights()

    def count_microbatch(self, part: list[Example], terms: LossWeights) -> dict[str, float]:
        return count_examples(part, self._end_ids, terms.end_token)

    def metrics(
        self, sums: dict[str, float], counts: dict[str, float], state: TaskState
    ) -> dict[str, float]:
        return {"loss": sums["tokens"] / counts["divisor"]}

    def advance(self, state: TaskState, metrics: dict[str, Any], counts: dict[str, float]) -> TaskState:
        return state


class AdaptTask(PretrainTask):
    """The same from an autoregressive checkpoint, whose attention opens step by step."""

    name = "adapt"

    def loss_weights(self, step: int) -> LossWeights:
        """From causal to bidirectional: blocks of 1, doubling at an even pace, then one block."""
        opening = self._train.attention_anneal_fraction * self._train.max_steps
        if step >= opening:
            return LossWeights()
        return LossWeights(block_size=round(self._train.sequence_length ** (step / opening)))


class SftTask:
    """Prompts with evidence and partly masked responses; on invented worlds, with a curriculum.

    The state is the stage of the curriculum and the running accuracy on names that ends it.
    """

    name, updates, can_prefetch = "sft", 1, True

    def __init__(
        self, answers: ExampleSource, config: Config, train: TrainConfig, origin: InitialModel
    ) -> None:
        self._answers, self._train, self._top_k = answers, train, config.retrieval.top_k
        self._end_ids, self._fresh = origin.tokenizer.end_ids, origin.checkpoint is None
        self._curriculum = config.data.questions is None
        self.items, self.rows = train.items, train.items * train.item_rows

    def objective(self, denoiser: Denoiser, share: ContextParallel | None) -> MaskedObjective:
        layout = denoiser.config.evidence_layout
        return MaskedObjective(denoiser, layout, self._end_ids, self._train.logit_chunk, share)

    def conditions(self, state: TaskState) -> tuple[int, int]:
        """How many passages the prompts of this stage have: at least, at most."""
        least, most = CURRICULUM_STAGES[state.get("stage", 0)]
        return min(least, self._top_k), min(most or self._top_k, self._top_k)

    def make_microbatch(
        self, step: int, items: Sequence[int], conditions: tuple[int, int]
    ) -> list[Example]:
        return self._answers.examples(step, items, conditions)

    def loss_weights(self, step: int) -> LossWeights:
        """As the rate falls, end tokens count more and pointers less."""
        train, left = (
            self._train,
            compute_decay_factor(step, self._train.max_steps, self._train.decay_fraction),
        )
        pointers, late = (
            (default if self._fresh else 0.0) if value is None else value
            for value, default in (
                (train.pointer_loss_weight, 0.3),
                (train.final_pointer_loss_weight, 0.08),
            )
        )
        return LossWeights(
            end_token=train.final_eos_weight + left * (train.eos_weight - train.final_eos_weight),
            pointer=late + left * (pointers - late),
        )

    def count_microbatch(self, part: list[Example], terms: LossWeights) -> dict[str, float]:
        return count_examples(part, self._end_ids, terms.end_token)

    def metrics(
        self, sums: dict[str, float], counts: dict[str, float], state: TaskState
    ) -> dict[str, float]:
        pointed = max(1, counts["pointed"])
        found = {"loss": sums["tokens"] / counts["divisor"], "name_accuracy": sums["names_right"] / pointed}
        if "pointers" in sums:
            found |= {
                "pointer_loss": sums["pointers"] / pointed,
                "pointer_mass": sums["passage_mass"] / pointed,
            }
        return found | ({"passages": self.conditions(state)[1]} if self._curriculum else {})

    def advance(self, state: TaskState, metrics: dict[str, Any], counts: dict[str, float]) -> TaskState:
        stage, accuracy = state.get("stage", 0), state.get("name_accuracy", 0.0)
        if counts["pointed"]:
            accuracy = 0.97 * accuracy + 0.03 * metrics["name_accuracy"]
        if accuracy > self._train.curriculum_accuracy and stage + 1 < len(CURRICULUM_STAGES):
            stage, accuracy = stage + 1, STAGE_START_ACCURACY
        return {"stage": stage, "name_accuracy": accuracy}
