"""The state of a run except weights and optimizers, and the record in a checkpoint."""

from dataclasses import dataclass, field
from typing import Any

from dlm_rag.training.task import TaskState


@dataclass
class TrainState:
    """All that is needed to go on: every step follows from it, the weights and the optimizers."""

    step: int  # of the run
    phase: str
    phase_step: int
    tasks: dict[str, TaskState]  # of each task so far, by its name

    def __post_init__(self) -> None:
        if not 0 <= self.phase_step <= self.step:
            raise ValueError(f"phase_step={self.phase_step} does not fit step={self.step}")


@dataclass(frozen=True)
class CheckpointRecord:
    """What `state.json` holds; what older versions did not write is empty."""

    state: TrainState
    run: dict[str, Any]  # settings by their dotted keys, as in `fingerprint.py`
    phase: dict[str, Any]
    fingerprints: dict[str, str] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)  # bytes of each
    digests: dict[str, str] = field(default_factory=dict)
