"""Checkpoints of a run: safetensors in shards, whole or not there, read by any number of processes.

torch.distributed.checkpoint writes and reads them in its safetensors form, so nothing is pickled. A
folder takes its name by one rename after every process has written its part.
"""

import json
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dlm_rag.errors import CheckpointError, ConfigError, RunError
from dlm_rag.training.failures import lost, lost_another
from dlm_rag.training.processes import Processes

KEPT_CHECKPOINTS = 2
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
RECORD = "state.json"
FORMAT = 2  # of the record; 1 had no tasks


def saved(folder: Path) -> list[Path]:
    """The whole checkpoints of the run in `folder`, the oldest first."""
    return sorted(p for p in (folder / "checkpoints").glob("step-*") if p.suffix != ".part")


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint of the run in `folder` and its record, or None without one.

    Raises `CheckpointError` where it cannot be read, or was written by a program of another format.
    """
    found = saved(folder)
    if not found:
        return None
    path = found[-1]
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no checkpoint of a run: {error}") from None
    written = record.get("format", 1) if isinstance(record, dict) else None
    if written != FORMAT:
        raise CheckpointError(
            f"{path} is of format {written} and this program goes on with format {FORMAT} only: end the "
            "run with the version that began it, or begin again in another --out"
        )
    return path, record


def position(folder: Path, phases: list[str]) -> tuple[int, list[str]]:
    """Where a run in `folder` stands: its step, and the phases from that of the newest checkpoint on.

    Raises `ConfigError` where that is none of `phases`.
    """
    found = newest(folder)
    if found is None:
        return 0, phases
    state = found[1]["state"]
    if state["phase"] not in phases:
        raise ConfigError(
            f"the run in {folder} is in its phase '{state['phase']}', which the config does not name"
        )
    return state["step"], phases[phases.index(state["phase"]) :]


class Checkpoints:
    """The checkpoints of the run in `folder`, named by step."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self._folder, self._processes = folder, processes

    def save(
        self,
        step: int,
        root: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        record: dict[str, Any],
    ) -> Path:
        """Writes a checkpoint and drops the oldest beyond two; every process takes part."""
        target = self._folder / "checkpoints" / f"step-{step:08d}"
        scratch = target.with_suffix(".part")
        if self._processes.first:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        self._processes.wait()
        tensors = state_of(root, optimizers)
        writer = HuggingFaceStorageWriter(str(scratch), save_distributed=True)
        try:
            with quietly():
                dcp.save(tensors, storage_writer=writer, no_dist=self._processes.count == 1)
        except (Exception, CheckpointException) as error:  # what torch wraps a failure in is no Exception
            if lost_another(error):
                raise lost(error) from error
            raise RunError(
                f"the checkpoint of step {step} could not be written to {target.parent} "
                f"({reason_of(error)}); the one before is as it was: make room and --resume"
            ) from error
        if self._processes.first:
            (scratch / RECORD).write_text(json.dumps({"format": FORMAT, **record}), encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            scratch.rename(target)
            for old in saved(self._folder)[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(old)
        self._processes.wait()
        return target

    def load(self, path: Path, root: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Reads weights, and the state of the optimizers where any are given, into their places."""
        tensors = state_of(root, optimizers)
        try:
            with quietly():
                reader = HuggingFaceStorageReader(str(path))
                dcp.load(tensors, storage_reader=reader, no_dist=self._processes.count == 1)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"{path} does not belong to this run: {reason_of(error)}") from error
        for optimizer, prefix in zip(optimizers, _prefixes(optimizers), strict=True):
            whole: dict[str, Any] = dict(get_optimizer_state_dict(root, optimizer, options=_FLAT))
            whole |= {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            set_optimizer_state_dict(root, optimizer, whole, options=_FLAT)


def state_of(root: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Weights and optimizer states by name, as they lie in memory (in shards, where there are any)."""
    # Neither a tied head, which would come twice, nor frozen weights, which have a checkpoint of their own.
    once = {name.removeprefix("module.") for name, value in root.named_parameters() if value.requires_grad}
    tensors: dict[str, Any] = {f"model.{k}": v for k, v in get_model_state_dict(root).items() if k in once}
    for optimizer, prefix in zip(optimizers, _prefixes(optimizers), strict=True):
        found = get_optimizer_state_dict(root, optimizer, options=_FLAT)
        tensors |= {f"{prefix}{k}": v for k, v in found.items() if k.startswith("state.")}
    return tensors


def whole_state(root: nn.Module) -> dict[str, Tensor]:
    """All weights of the denoiser by its own names, gathered in host memory of the first process."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: dict[str, Any] = dict(get_model_state_dict(root, options=options))
    return {name.removeprefix("denoiser."): value for name, value in found.items()}


@contextmanager
def quietly() -> Iterator[None]:
    """Without torch's remark that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def reason_of(error: BaseException) -> str:
    """The last line of an error's text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1]


def _prefixes(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    return [f"optimizer{number}." for number in range(len(optimizers))]
