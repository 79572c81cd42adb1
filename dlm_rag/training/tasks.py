"""The objectives, by the names that `train.objective` gives them."""

from typing import TYPE_CHECKING

from dlm_rag.config import Config, TrainConfig
from dlm_rag.config.fields import import_object, resolve_or_import
from dlm_rag.errors import ConfigError

if TYPE_CHECKING:
    from dlm_rag.training.task import Task

# Subclasses of `training.task.Task`, imported when they are needed: `--help` lists the names without torch.
TASKS = {
    "sft": "dlm_rag.training.supervised_tasks:SftTask",
    "pretrain": "dlm_rag.training.supervised_tasks:PretrainTask",
    "rl": "dlm_rag.training.rl:RlTask",
}


def find_task(train: TrainConfig) -> "type[Task]":
    """The task of a run; raises `ConfigError`."""
    from dlm_rag.training.task import Task

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
    task = find_task(config.train)
    if task.needs_trained_model and config.model.path is None:
        raise ConfigError(f"{task.name} begins with a model that answers: set model.path")
    task.check_settings(config)
