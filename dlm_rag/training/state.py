"""Where a run stands, beside its weights and optimizers."""

from dataclasses import asdict, dataclass, field
from typing import Any

from dlm_rag.errors import CheckpointError
from dlm_rag.training.task import State


@dataclass
class TrainState:
    """All that is needed to go on: every step follows from it, the weights and the optimizers."""

    step: int = 0  # of the run
    phase: str = ""
    phase_step: int = 0
    tasks: dict[str, State] = field(default_factory=dict)  # of each task so far, by its name

    @classmethod
    def read(cls, record: Any) -> "TrainState":
        """The state in a record; raises `CheckpointError` for what is none."""
        wanted = asdict(cls())
        for name, value in wanted.items():
            if not isinstance(record, dict) or type(record.get(name)) is not type(value):
                raise CheckpointError(f"the state has no {name}")
        found = cls(**{name: record[name] for name in wanted})
        if not 0 <= found.phase_step <= found.step:
            raise CheckpointError(
                f"step {found.phase_step} of a phase does not fit step {found.step} of the run"
            )
        if not all(isinstance(state, dict) for state in found.tasks.values()):
            raise CheckpointError("the state of a task is not an object")
        return found
