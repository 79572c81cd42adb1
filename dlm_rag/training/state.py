"""Where a run stands beside its weights and optimizers, and which settings it may go on with."""

from dataclasses import asdict, dataclass, field
from typing import Any

from dlm_rag.config import Config, TrainConfig
from dlm_rag.errors import CheckpointError, ConfigError
from dlm_rag.training.task import State

# What may change while a run goes on: how long it is, what is reported, how the work is done.
FREE = {
    "timeout_minutes", "steps", "decay_share", "save_every", "validate_every", "validation_questions",
    "wandb", "phases", "accumulate", "checkpointing", "logit_chunk", "compile", "parallel",
    "context_parallel",
}  # fmt: skip


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


def refuse_others(what: str, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises `ConfigError` for the first setting that has another value than before.

    One that did not exist yet when the run was begun had its default.
    """
    then = run_settings(Config()) | phase_settings(TrainConfig()) | then
    for key, value in now.items():
        if then.get(key) != value:
            raise ConfigError(
                f"{what} was begun with {key}={then.get(key)}, not {value}: give the same, or another --out"
            )


def run_settings(config: Config) -> dict[str, Any]:
    """What the whole run depends on."""
    names = [
        "seed", "hidden_size", "head_dim", "intermediate_size", "num_hidden_layers", "vocabulary",
        "passage_length", "lora_rank", "learn",
    ]  # fmt: skip
    return {f"train.{name}": getattr(config.train, name) for name in names} | {
        "model.path": config.model.path,
        "model.evidence_layout": config.model.evidence_layout,
        "retrieval.top_k": config.retrieval.top_k,
        "decode.canvas_length": config.decode.canvas_length,
        **{f"data.{key}": value for key, value in asdict(config.data).items()},
    }


def phase_settings(train: TrainConfig) -> dict[str, Any]:
    """What the steps of a phase depend on; attention opens in a share of them, however many they are."""
    free = FREE - {"steps"} if train.objective == "adapt" else FREE
    return {f"train.{key}": value for key, value in asdict(train).items() if key not in free}
