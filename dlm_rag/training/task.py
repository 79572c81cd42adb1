"""An objective: what a trainer, a plan and the checks of settings ask of it.

An objective is a subclass of `Task` with a line in `tasks.TASKS`, or of the user's own as
`train.objective=module:Class`. Nothing else names it.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import nn

from dlm_rag.config import Config, DecodeConfig, TrainConfig
from dlm_rag.errors import ConfigError
from dlm_rag.model.context_parallel import ContextParallel
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.training.data.examples import Example, ExampleBuilder
from dlm_rag.training.initial_weights import InitialModel

TaskState = dict[str, Any]  # JSON values; empty at first
Sums = dict[str, float]


@dataclass(frozen=True)
class Phase:
    """A phase of a run."""

    config: Config
    name: str
    origin: InitialModel
    folder: Path  # of the run

    @cached_property
    def train(self) -> TrainConfig:
        return self.config.train.get_phase_configs()[self.name]

    @cached_property
    def builder(self) -> ExampleBuilder:
        return ExampleBuilder(self.origin.tokenizer, self.origin.config)


class Validation(Protocol):
    """Says how good a denoiser is."""

    def compute_scores(self, trainer: Any) -> dict[str, float]:
        """Scores by name, the same on every process; all take part."""


class Task:
    """One objective. A step consists of `items`, which the processes split into microbatches.

    Apart from its phase and data, a task depends only on its arguments. What changes during a run is its
    `TaskState`, which the trainer keeps and saves. Only the task knows what a microbatch is.
    """

    name: ClassVar[str]  # what its state is saved under
    can_prefetch: ClassVar[bool] = True  # microbatches may be made by another thread during the step before
    fixed_settings: ClassVar[frozenset[str]] = frozenset()  # that --resume may not change, but others may
    needs_trained_model: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = False  # a model needs positions for `train.sequence_length`
    opens_causal_attention: ClassVar[bool] = False  # can begin with an autoregressive checkpoint
    trains_causal_context: ClassVar[bool] = False  # its rows predict the first token of a block from before
    updates = 1  # weight updates per step

    def __init__(self, phase: Phase) -> None:
        self.phase, self.train, self._config, self._origin = phase, phase.train, phase.config, phase.origin
        # Steps that the phase had when it began, by which curricula go: they do not go back when
        # --resume raises `train.max_steps`.
        self.planned_steps = self.train.max_steps
        self.items, rows = self.count_items(self.train)
        self.rows = self.items * rows

    @staticmethod
    def count_items(train: TrainConfig) -> tuple[int, int]:
        """Items in a step, over all processes, and rows in an item."""
        return train.passage_sets_per_step, train.rows_per_set

    @classmethod
    def check_settings(cls, config: Config, train: TrainConfig) -> None:
        """Raises `ConfigError` for settings that do not go with the objective."""
        if config.data.corpus is not None and config.data.questions is None and train.max_hops == 1:
            raise ConfigError("train.max_hops=1: questions made from data.corpus need 2 passages or more")

    @classmethod
    def rollout_settings(cls, config: Config, train: TrainConfig) -> DecodeConfig | None:
        """How the objective decodes in training; None if it does not."""
        return None

    def open_data(self) -> Validation:
        """Opens what examples come from; returns the validation. Raises `UserError` for unusable data."""
        raise NotImplementedError

    # For the plan: typical rows of `count` items, a microbatch of them, a row for each decoding step.

    def sample_examples(self, shape: DenoiserConfig, count: int) -> list[Example]:
        raise ConfigError(f"objective={self.name} has no plan: leave --plan out")

    def sample_microbatch(self, shape: DenoiserConfig, count: int) -> Any:
        return self.sample_examples(shape, count)

    def sample_decoding(self, shape: DenoiserConfig) -> list[Example]:
        return []

    def layout(self, shape: DenoiserConfig) -> str:
        """The evidence layout of the rows."""
        return shape.evidence_layout

    def objective(self, denoiser: Denoiser, share: ContextParallel | None) -> nn.Module:
        """The loss as a module that holds the denoiser: what DDP and FSDP wrap; called as

            objective(part, counts, terms) -> (loss, {name: sum})

        The loss is divided by `counts` of the whole step: the losses of all microbatches on all processes
        add up to that of the step, and so do the sums, scalars on the device without gradients. If the
        module has a `reference`, another denoiser, it gets the weights that the phase began with.
        share: processes that each hold a part of the same items.
        """
        raise NotImplementedError

    def conditions(self, state: TaskState) -> Hashable:
        """The part of the state that the microbatches of a step depend on."""
        return None

    def make_microbatch(self, step: int, items: Sequence[int], conditions: Any) -> Any:
        """Some items of step number `step` of the phase.

        Without `can_prefetch`, the denoiser may be called meanwhile, by every process as often as it needs
        (`Trainer.evaluation_mode`).
        """
        raise NotImplementedError

    def prepare_microbatch(self, step: int, items: Sequence[int]) -> Any:
        """The same, made by a worker process: of the number of the step alone, and ready for the device."""
        raise ConfigError(
            f"objective={self.train.objective} makes no batches in workers: set data_workers=0"
        )

    def loss_weights(self, step: int) -> Any:
        """What changes in the loss from step to step of the phase."""
        return None

    def count_microbatch(self, part: Any, terms: Any) -> Sums:
        """What is known of a microbatch beforehand, always under the same names: `rows`, `tokens` that the
        layers run, `supervised` ones whose logits are computed, and whatever loss and metrics need.
        """
        raise NotImplementedError

    def metrics(self, sums: Sums, counts: Sums, state: TaskState) -> Sums:
        """The metrics of a step, `loss` included, from sums and counts over all microbatches."""
        raise NotImplementedError

    def advance(self, state: TaskState, metrics: dict[str, Any], counts: Sums) -> TaskState:
        """The state after a step."""
        return state
