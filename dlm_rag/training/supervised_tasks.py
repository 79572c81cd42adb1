"""Supervised objectives: answering with evidence (sft), modelling documents (pretrain)."""

import random
from collections.abc import Sequence

import numpy as np

from dlm_rag.config import TrainConfig
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.tokenizer import Prompt
from dlm_rag.training import batches, sources
from dlm_rag.training.batches import Sums
from dlm_rag.training.documents import DOCUMENT_LAYOUT, PackedDocuments
from dlm_rag.training.task import Task, TaskState, Validation
from dlm_rag.training.trainer import compute_decay_factor

CURRICULUM_STAGES = ((2, 2), (2, 4), (4, None))  # passages in a prompt, at least and at most; None: top_k
STAGE_START_ACCURACY = 0.3  # running accuracy on names that the next stage begins with
STAGE_END_ACCURACY = 0.62  # and at which it ends
END_TOKEN_WEIGHT, FINAL_END_TOKEN_WEIGHT = 0.15, 0.4  # in the loss, the latter once the rate has fallen
NEW_POINTER_WEIGHT, FINAL_POINTER_SHARE = 0.3, 4 / 15  # of a new model; what is left of it then


class MaskedTask(Task):
    """Cross-entropy at the masked tokens of rows."""

    layout: str | None = None  # evidence layout of the rows; None: the denoiser's own

    def objective(self, denoiser: Denoiser) -> batches.MaskedObjective:
        return batches.MaskedObjective(denoiser)

    def make_batch(self, step: int, items: Sequence[int], state: TaskState) -> batches.MaskedBatch:
        return self._lay_out(self.make_rows(step, items, state), step)

    def sample_batch(self, count: int) -> batches.MaskedBatch:
        return self._lay_out(self.sample_rows(count), 0)

    def _lay_out(self, rows: list[batches.Example], step: int) -> batches.MaskedBatch:
        origin = self.run.origin
        layout = self.layout or origin.config.evidence_layout
        return batches.make_masked_batch(
            rows, origin.config, layout, origin.tokenizer.end_ids, self.loss_weights(step)
        )

    def make_rows(self, step: int, items: Sequence[int], state: TaskState) -> list[batches.Example]:
        """The rows of some items of a step."""
        raise NotImplementedError

    def sample_rows(self, count: int) -> list[batches.Example]:
        """Typical rows of `count` items."""
        raise NotImplementedError

    def loss_weights(self, step: int) -> batches.LossWeights:
        """What changes in the loss from step to step."""
        return batches.LossWeights()

    def finish_step(self, sums: Sums, counts: Sums, state: TaskState) -> tuple[Sums, TaskState]:
        return {"loss": sums["tokens"] / counts["divisor"]}, state


class PretrainTask(MaskedTask):
    """Packed documents: the NELBO per token."""

    name, layout = "pretrain", DOCUMENT_LAYOUT
    _source: PackedDocuments

    @staticmethod
    def count_items(train: TrainConfig) -> tuple[int, int]:
        return train.batch_tokens // train.sequence_length, 1

    def open_data(self) -> Validation:
        self._source = sources.open_documents(self.run)
        return sources.DocumentValidation(self._source)

    def sample_rows(self, count: int) -> list[batches.Example]:
        length, draw = self.train.sequence_length, random.Random(0).choices
        targets = [draw(range(self.run.origin.config.vocab_size), k=length) for _ in range(count)]
        rng, no_prompt = np.random.default_rng(0), Prompt((), (), ())
        return [batches.mask_at_time(no_prompt, target, 0.5, rng) for target in targets]

    def make_rows(self, step: int, items: Sequence[int], state: TaskState) -> list[batches.Example]:
        return self._source.examples(step, items)


class SftTask(MaskedTask):
    """Prompts with evidence and partly masked responses; on invented worlds, with a curriculum. The state
    is its stage and the running accuracy on names that ends the stage."""

    name = "sft"
    _source: sources.WorldExamples | sources.QuestionExamples

    def open_data(self) -> Validation:
        run, train, origin = self.run, self.train, self.run.origin
        builder = batches.ExampleBuilder(origin.tokenizer, origin.config)
        if run.config.data.corpus is None:
            self._source = sources.WorldExamples(builder, train, run.top_k)
            return sources.open_world_validation(run)
        questions, retriever, validation = sources.open_questions(run)
        self._source = sources.QuestionExamples(questions, retriever, builder, train)
        return validation

    def sample_rows(self, count: int) -> list[batches.Example]:
        train, run = self.train, self.run
        return batches.sample_prompt_rows(run.origin.config, run.top_k, count, train.rows_per_set)

    def count_passages(self, state: TaskState) -> tuple[int, int]:
        """How many passages the prompts of this stage have: at least, at most."""
        least, most = CURRICULUM_STAGES[state.get("stage", 0)]
        top_k = self.run.top_k
        return min(least, top_k), min(most or top_k, top_k)

    def make_rows(self, step: int, items: Sequence[int], state: TaskState) -> list[batches.Example]:
        if isinstance(self._source, sources.QuestionExamples):
            return self._source.examples(step, items)
        return self._source.examples(step, items, self.count_passages(state))

    def loss_weights(self, step: int) -> batches.LossWeights:
        """As the rate falls, end tokens count more and pointers less."""
        left = compute_decay_factor(step, self.train.max_steps, self.train.decay_fraction)
        pointer = self.train.pointer_loss_weight
        if pointer is None:
            pointer = NEW_POINTER_WEIGHT if self.run.origin.checkpoint is None else 0.0
        return batches.LossWeights(
            end_token=FINAL_END_TOKEN_WEIGHT + left * (END_TOKEN_WEIGHT - FINAL_END_TOKEN_WEIGHT),
            pointer=pointer * (FINAL_POINTER_SHARE + left * (1 - FINAL_POINTER_SHARE)),
        )

    def finish_step(self, sums: Sums, counts: Sums, state: TaskState) -> tuple[Sums, TaskState]:
        found, _ = super().finish_step(sums, counts, state)
        if self.run.config.data.questions is not None:  # without a curriculum or pointers
            return found, state
        pointed = max(1, counts["pointed"])
        found |= {
            "name_accuracy": sums["names_right"] / pointed,
            "pointer_loss": sums["pointers"] / pointed,
            "pointer_mass": sums["passage_mass"] / pointed,
            "passages": self.count_passages(state)[1],
        }
        stage, accuracy = state.get("stage", 0), state.get("name_accuracy", 0.0)
        if counts["pointed"]:
            accuracy = 0.97 * accuracy + 0.03 * found["name_accuracy"]
        if accuracy > STAGE_END_ACCURACY and stage + 1 < len(CURRICULUM_STAGES):
            stage, accuracy = stage + 1, STAGE_START_ACCURACY
        return found, {"stage": stage, "name_accuracy": accuracy}
