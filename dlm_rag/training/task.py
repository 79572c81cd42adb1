"""An objective: what a trainer, a plan and the checks of settings ask of it.

An objective is a subclass of `Task` with a line in `tasks.TASKS`, or of the user's own as
`train.objective=module:Class`. Nothing else names it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import nn

from dlm_rag.config import Config, DecodeConfig, TrainConfig
from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.training.batches import ExampleBuilder, Sums
from dlm_rag.training.initial_model import InitialModel

TaskState = dict[str, Any]  # JSON values; empty at first


@dataclass(frozen=True)
class Run:
    """What a run is made of: its settings, what it begins with, its folder."""

    config: Config
    origin: InitialModel
    folder: Path

    @cached_property
    def builder(self) -> ExampleBuilder:
        return ExampleBuilder(self.origin.tokenizer, self.origin.config)


class Validation(Protocol):
    """Says how good a denoiser is."""

    def compute_scores(self, trainer: Any) -> dict[str, float]:
        """Scores by name, the same on every process; all take part."""


class Task:
    """One objective. A step consists of `items`, which the processes split into batches.

    Apart from its run and data, a task depends only on its arguments. What changes during a run is its
    `TaskState`, which the trainer keeps and saves. Only the task knows what a batch is, but for its
    `counts`: what is known of it beforehand, always under the same names, `rows`, `tokens` that the layers
    run, `supervised` ones whose logits are computed, and whatever loss and metrics need.
    """

    name: ClassVar[str]  # in what is said of it
    can_prefetch: ClassVar[bool] = True  # batches may be made by others during the steps before
    needs_trained_model: ClassVar[bool] = False
    forwards_before = 0.0  # of each row of a step, in rollouts; for the plan

    def __init__(self, run: Run) -> None:
        self.run, self.train, self._config, self._origin = run, run.config.train, run.config, run.origin
        # Steps that the run had when it began, by which curricula go: they do not go back when
        # --resume raises `train.max_steps`.
        self.planned_steps = self.train.max_steps
        self.items, rows = self.count_items(self.train)
        self.rows = self.items * rows

    @staticmethod
    def count_items(train: TrainConfig) -> tuple[int, int]:
        """Items in a step, over all processes, and rows in an item."""
        return train.passage_sets_per_step, train.rows_per_set

    @classmethod
    def check_settings(cls, config: Config) -> None:
        """Raises `ConfigError` for settings that do not go with the objective."""

    @classmethod
    def rollout_settings(cls, config: Config) -> DecodeConfig | None:
        """How the objective decodes in training; None if it does not."""
        return None

    def open_data(self) -> Validation:
        """Opens what batches come from; returns the validation. Raises `UserError` for unusable data."""
        raise NotImplementedError

    def objective(self, denoiser: Denoiser) -> nn.Module:
        """The loss as a module that holds the denoiser: what DDP and FSDP wrap; called as

            objective(batch, counts) -> (loss, {name: sum})

        The loss is divided by `counts` of the whole step: the losses of all batches on all processes add up
        to that of the step, and so do the sums, scalars on the device without gradients.
        """
        raise NotImplementedError

    def conditions(self, step: int, state: TaskState) -> Any:
        """What the batches of a step depend on besides its number; {} is the state in worker processes."""
        return None

    def make_batch(self, step: int, items: Sequence[int], conditions: Any) -> Any:
        """Some items of step number `step`.

        Without `can_prefetch`, the denoiser may be called meanwhile, by every process as often as it needs
        (`Trainer.evaluation_mode`).
        """
        raise NotImplementedError

    def sample_batch(self, shape: DenoiserConfig, count: int) -> Any:
        """A typical batch of `count` items, for the plan; the objective was asked for before."""
        raise ConfigError(f"objective={self.name} has no plan: leave --plan out")

    def finish_step(self, sums: Sums, counts: Sums, state: TaskState) -> tuple[Sums, TaskState]:
        """Metrics of a step, `loss` included, from sums and counts over all batches; the state after."""
        raise NotImplementedError
