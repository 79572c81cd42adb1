"""The policies that learn by reward, by `train.trainable`: how each samples, and what it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlm_rag.config import TrainConfig
from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser_config import DenoiserConfig


@dataclass(frozen=True)
class LearnedPolicy:
    """rollout_settings: the fields of `DecodeConfig` that make it sample. runs_denoiser: in its loss."""

    rollout_settings: Callable[[TrainConfig], dict[str, Any]]
    runs_denoiser: bool


DENOISER_POLICY = LearnedPolicy(
    lambda train: {
        "commit_rule": "sampled",
        "temperature": train.rollout_temperature,
        "retrieval_gate": "always",
    },
    runs_denoiser=True,
)
LEARNED_POLICIES = {
    "all": DENOISER_POLICY,
    "lora": DENOISER_POLICY,
    "policy_heads": LearnedPolicy(
        lambda train: {"commit_rule": "policy_head", "head_threshold": None, "temperature": 0.0},
        runs_denoiser=False,
    ),
}


def find_policy(train: TrainConfig) -> LearnedPolicy:
    """The policy that a phase teaches."""
    return LEARNED_POLICIES[train.trainable or "all"]


def check_policy_shape(shape: DenoiserConfig, train: TrainConfig) -> None:
    """Raises `ConfigError` for a denoiser whose steps cannot be computed again as they were."""
    if not find_policy(train).runs_denoiser or not shape.block_size:
        return
    if shape.shifted or shape.finished_block_context in ("append", "frozen"):
        reason = (
            "shifted models in blocks"
            if shape.shifted
            else f"finished_block_context={shape.finished_block_context}"
        )
        raise ConfigError(
            f"rl of the denoiser computes steps again from the canvas alone, which excludes {reason}: set "
            "train.trainable=policy_heads"
        )
