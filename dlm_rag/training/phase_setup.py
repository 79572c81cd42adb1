"""A phase put together: its task with its data, its validation, its trainer."""

from pathlib import Path

from dlm_rag.config import Config
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.initial_model import InitialModel
from dlm_rag.training.model_init import open_initial_model
from dlm_rag.training.task import Phase, Task, Validation
from dlm_rag.training.tasks import find_task
from dlm_rag.training.trainer import Trainer


def open_trainer(
    config: Config,
    folder: Path,
    processes: DistributedContext | None = None,
    phase: str | None = None,
    origin: InitialModel | None = None,
) -> tuple[Trainer, Validation]:
    """The trainer of a phase (the first where none is named) and its validation; weights are read.

    Raises `UserError`.
    """
    processes, origin = processes or DistributedContext(0, 1, 0), origin or open_initial_model(config)
    phase = next(iter(config.train.get_phase_configs())) if phase is None else phase
    task, validation = open_phase(config, phase, origin, folder)
    return Trainer(Phase(config, phase, origin, folder), task, processes), validation


def open_phase(config: Config, phase: str, origin: InitialModel, folder: Path) -> tuple[Task, Validation]:
    """The task of a phase and its validation; raises `UserError` for unusable data."""
    train = config.train.get_phase_configs()[phase]
    task = find_task(train, origin.config.noise)
    source, validation = task.open_source(Phase(config, phase, origin, folder))
    return task(source, config, train, origin), validation
