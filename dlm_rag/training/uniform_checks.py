"""Which settings of training go with uniform noise, and which with it alone."""

from collections.abc import Mapping

from dlm_rag.config import Config
from dlm_rag.config.effects import check_checkpoint_effects
from dlm_rag.decode.engine import with_checkpoint_defaults
from dlm_rag.errors import ConfigError
from dlm_rag.model.checkpoint import Checkpoint

# By setting: the values that go with uniform noise, the one to set first.
SUPPORTED_OF_MODEL = {"evidence_layout": ("prefix", None), "attn_implementation": ("sdpa", "auto")}
SUPPORTED_OF_PHASE = {
    "objective": ("sft",), "trainable": ("all", None), "parallel": ("ddp", "single"),
    "activation_checkpointing": ("full", "none"), "lora_rank": (0,),
}  # fmt: skip


def check_noise_settings(config: Config, checkpoint: Checkpoint | None) -> None:
    """Raises `ConfigError` for settings that do not go with how the model is noised.

    checkpoint: what the run begins with; None or one without `noise` is a model of masks.
    """
    phases = list(config.train.get_phase_configs().values())
    noise = "mask" if checkpoint is None or checkpoint.config.noise is None else "uniform"
    for train in phases:
        check_checkpoint_effects("train", train, {"noise": noise})
    if checkpoint is None or noise == "mask":
        return
    for train in phases:
        _check_supported(train, SUPPORTED_OF_PHASE, checkpoint)
    with_checkpoint_defaults(config.decode, checkpoint.config)  # validation decodes
    _check_supported(config.model, SUPPORTED_OF_MODEL, checkpoint)


def _check_supported(settings: object, supported: Mapping[str, tuple[object, ...]], of: Checkpoint) -> None:
    for name, values in supported.items():
        if (value := getattr(settings, name)) not in values:
            raise ConfigError(
                f"{name}={value} is not supported by {of.folder}, a model of uniform noise: set "
                f"{name}={values[0]}, or leave it out"
            )
