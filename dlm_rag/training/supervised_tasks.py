"""Supervised objectives: answering with evidence (sft), modelling documents (pretrain)."""

from collections.abc import Sequence
from typing import Any

from dlm_rag.config import TrainConfig
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.training.batches import (
    BatchMaker,
    Example,
    LossWeights,
    PreparedBatch,
    Sums,
    sample_document_rows,
    sample_prompt_rows,
)
from dlm_rag.training.documents import PackedDocuments
from dlm_rag.training.losses import MaskedObjective
from dlm_rag.training.sources import (
    QuestionExamples,
    WorldExamples,
    open_documents,
    open_questions,
    open_world_validation,
)
from dlm_rag.training.task import Run, Task, TaskState, Validation
from dlm_rag.training.trainer import compute_decay_factor
from dlm_rag.training.validation import DocumentValidation

CURRICULUM_STAGES = ((2, 2), (2, 4), (4, None))  # passages in a prompt, at least and at most; None: top_k
STAGE_START_ACCURACY = 0.3  # running accuracy on names that the next stage begins with
STAGE_END_ACCURACY = 0.62  # and at which it ends
# Shares of the steps at which stages begin where workers make batches ahead.
STAGE_STARTS = (0.0, 0.06, 0.15)
END_TOKEN_WEIGHT, FINAL_END_TOKEN_WEIGHT = 0.15, 0.4  # in the loss, the latter once the rate has fallen
NEW_POINTER_WEIGHT, FINAL_POINTER_SHARE = 0.3, 4 / 15  # of a new model; what is left of it then


class MaskedTask(Task):
    """Cross-entropy at the masked tokens of rows."""

    layout: str | None = None  # evidence layout of the rows; None: the denoiser's own
    _maker: BatchMaker

    def objective(self, denoiser: Denoiser) -> MaskedObjective:
        layout = self.layout or denoiser.config.evidence_layout
        self._maker = BatchMaker(denoiser.config, layout, self._origin.tokenizer.end_ids)
        return MaskedObjective(denoiser)

    def make_batch(self, step: int, items: Sequence[int], conditions: Any) -> PreparedBatch:
        return self._maker.prepare(self.make_rows(step, items, conditions), self.loss_weights(step))

    def sample_batch(self, shape: DenoiserConfig, count: int) -> PreparedBatch:
        return self._maker.prepare(self.sample_rows(shape, count), self.loss_weights(0))

    def make_rows(self, step: int, items: Sequence[int], conditions: Any) -> list[Example]:
        """The rows of some items of a step."""
        raise NotImplementedError

    def sample_rows(self, shape: DenoiserConfig, count: int) -> list[Example]:
        """Typical rows of `count` items."""
        raise NotImplementedError

    def loss_weights(self, step: int) -> LossWeights:
        """What changes in the loss from step to step."""
        return LossWeights()


class PretrainTask(MaskedTask):
    """Packed documents: the NELBO per token."""

    name, layout = "pretrain", "joint"
    _source: PackedDocuments

    @staticmethod
    def count_items(train: TrainConfig) -> tuple[int, int]:
        return train.batch_tokens // train.sequence_length, 1

    def open_data(self) -> Validation:
        self._source = open_documents(self.run)
        return DocumentValidation(self._source, lambda rows: self._maker.prepare(rows, LossWeights()))

    def sample_rows(self, shape: DenoiserConfig, count: int) -> list[Example]:
        return sample_document_rows(shape, self.train.sequence_length, count)

    def make_rows(self, step: int, items: Sequence[int], conditions: None) -> list[Example]:
        return self._source.examples(step, items)

    def finish_step(self, sums: Sums, counts: Sums, state: TaskState) -> tuple[Sums, TaskState]:
        return {"loss": sums["tokens"] / counts["divisor"]}, state


class SftTask(MaskedTask):
    """Prompts with evidence and partly masked responses; on invented worlds, with a curriculum.

    The state is the stage of the curriculum and the running accuracy on names that ends it.
    """

    name = "sft"
    _source: WorldExamples | QuestionExamples

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._top_k = run.config.retrieval.top_k
        fresh = self._origin.checkpoint is None
        given = self.train.pointer_loss_weight
        self._pointer_weight = NEW_POINTER_WEIGHT * fresh if given is None else given

    def open_data(self) -> Validation:
        run = self.run
        if self._config.data.corpus is None:
            self._source = WorldExamples(run.builder, self.train, self._top_k)
            return open_world_validation(run)
        questions, retriever, validation = open_questions(run)
        self._source = QuestionExamples(questions, retriever, run.builder, self.train)
        return validation

    def sample_rows(self, shape: DenoiserConfig, count: int) -> list[Example]:
        train = self.train
        return sample_prompt_rows(shape, train.passage_length, self._top_k, count, train.rows_per_set)

    def conditions(self, step: int, state: TaskState) -> tuple[int, int]:
        """How many passages the prompts of this stage have: at least, at most.

        Workers do not know the accuracy that ends a stage: there stages begin at shares of the steps.
        """
        stage = state.get("stage", 0)
        if self.train.data_workers:
            stage = sum(step >= share * self.planned_steps for share in STAGE_STARTS) - 1
        least, most = CURRICULUM_STAGES[stage]
        return min(least, self._top_k), min(most or self._top_k, self._top_k)

    def make_rows(self, step: int, items: Sequence[int], conditions: tuple[int, int]) -> list[Example]:
        if isinstance(self._source, QuestionExamples):
            return self._source.examples(step, items)
        return self._source.examples(step, items, conditions)

    def loss_weights(self, step: int) -> LossWeights:
        """As the rate falls, end tokens count more and pointers less."""
        left = compute_decay_factor(step, self.train.max_steps, self.train.decay_fraction)
        return LossWeights(
            end_token=FINAL_END_TOKEN_WEIGHT + left * (END_TOKEN_WEIGHT - FINAL_END_TOKEN_WEIGHT),
            pointer=self._pointer_weight * (FINAL_POINTER_SHARE + left * (1 - FINAL_POINTER_SHARE)),
        )

    def finish_step(self, sums: Sums, counts: Sums, state: TaskState) -> tuple[Sums, TaskState]:
        found = {"loss": sums["tokens"] / counts["divisor"]}
        if self._config.data.questions is not None:  # without a curriculum or pointers
            return found, state
        pointed = max(1, counts["pointed"])
        found |= {
            "name_accuracy": sums["names_right"] / pointed,
            "pointer_loss": sums["pointers"] / pointed,
            "pointer_mass": sums["passage_mass"] / pointed,
        }
        if not self.train.data_workers:
            found["passages"] = self.conditions(0, state)[1]
        stage, accuracy = state.get("stage", 0), state.get("name_accuracy", 0.0)
        if counts["pointed"]:
            accuracy = 0.97 * accuracy + 0.03 * found["name_accuracy"]
        if accuracy > STAGE_END_ACCURACY and stage + 1 < len(CURRICULUM_STAGES):
            stage, accuracy = stage + 1, STAGE_START_ACCURACY
        return found, {"stage": stage, "name_accuracy": accuracy}
