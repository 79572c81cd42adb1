"""An objective: what a trainer, a plan and the checks of settings ask of it. It is a subclass of `Task`,
named in `TASKS` alone, or one's own, `train.objective=module:Class`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dlm_rag.config import Config, DecodeConfig, RetrievalConfig, TrainConfig
from dlm_rag.config.fields import import_object, resolve_or_import
from dlm_rag.config.sections import RETRIEVAL_NAMES
from dlm_rag.errors import ConfigError

if TYPE_CHECKING:  # `--help` lists the names without torch
    from torch import nn

    from dlm_rag.model.denoiser import Denoiser
    from dlm_rag.training.batches import Sums
    from dlm_rag.training.initial_model import InitialModel

TASKS = {  # by the names that `train.objective` gives them
    "sft": "dlm_rag.training.supervised_tasks:SftTask",
    "pretrain": "dlm_rag.training.supervised_tasks:PretrainTask",
    "rl": "dlm_rag.training.rl:RlTask",
}
TaskState = dict[str, Any]  # JSON values; empty at first


@dataclass(frozen=True)
class Run:
    """What a run is made of: its settings, what it begins with, its folder."""

    config: Config
    origin: InitialModel
    folder: Path

    @property
    def top_k(self) -> int:
        """How many passages a search of an invented world finds: as given, or the checkpoint's own."""
        return int(self.origin.config.retrieval_settings.get("top_k", self.config.retrieval.top_k))


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
    needs_denoiser: ClassVar[bool] = False  # `make_batch` calls it, every process as often as it needs
    forwards_before = 0.0  # of each row of a step, in rollouts; for the plan

    def __init__(self, run: Run) -> None:
        self.run, self.train = run, run.config.train
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
    def rollout_settings(cls, config: Config, own_rule: str | None = None) -> DecodeConfig | None:
        """How the objective decodes a checkpoint of this commit rule; None if it does not."""
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

    def make_batch(self, step: int, items: Sequence[int], state: TaskState) -> Any:
        """Some items of step number `step`, which begins in this state."""
        raise NotImplementedError

    def sample_batch(self, count: int) -> Any:
        """A typical batch of `count` items, for the plan."""
        raise ConfigError(f"objective={self.name} has no plan: leave --plan out")

    def finish_step(self, sums: Sums, counts: Sums, state: TaskState) -> tuple[Sums, TaskState]:
        """Metrics of a step, `loss` included, from sums and counts over all batches; the state after."""
        raise NotImplementedError


def find_task(train: TrainConfig) -> type[Task]:
    """The task of a run; raises `ConfigError`."""
    found = resolve_or_import(TASKS, train.objective, "train.objective")
    if isinstance(found, str):
        found = import_object(found, "train.objective")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(f"train.objective={train.objective} is not a subclass of training.task.Task")
    return found


def check_task_settings(config: Config) -> None:
    """Raises `ConfigError` for settings that do not go with the objective of a run."""
    if config.model.quantize != "none":
        raise ConfigError(f"model.quantize={config.model.quantize} is for decoding alone: leave it out")
    if config.engine.store is not None:
        raise ConfigError("engine.store keeps what weights compute, which training changes: leave it out")
    if config.engine.cache_dtype != "auto" and config.train.parallel == "fsdp":
        raise ConfigError(
            f"engine.cache_dtype={config.engine.cache_dtype} needs whole weights, and train.parallel=fsdp "
            "has shards of them: leave it out, or set train.parallel=ddp"
        )
    if config.data.corpus is None and config.train.objective in ("sft", "rl"):
        default = RetrievalConfig()
        for name in ("method", *RETRIEVAL_NAMES[1:]):
            if getattr(config.retrieval, name) != getattr(default, name):
                raise ConfigError(f"retrieval.{name} needs data.corpus: invented worlds have plain BM25")
    find_task(config.train).check_settings(config)
