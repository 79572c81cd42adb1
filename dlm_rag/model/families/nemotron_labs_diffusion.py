"""Nemotron-Labs-Diffusion: Ministral 3, trained to fill blocks in place and to predict the next token.

One head does both: `diffusion_head`. Text before the current block is seen causally. The LoRA beside the
weights is for self-speculation alone, and is not read.
"""

from typing import Any

from dlm_rag.errors import CheckpointError
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.families.base import (
    Family,
    read_transformers_config,
    require_key,
    require_supported_values,
)

PUBLIC_BLOCK_SIZE = 32  # of a config that names none, as in the public class


def read_nemotron_config(raw: dict[str, Any]) -> DenoiserConfig:
    """The shape in our words; raises `CheckpointError` for what is not supported."""
    require_supported_values(raw, attention_bias=False, sliding_window=None)
    if raw.get("vision_config") is not None:
        refuse_vision(raw)
    if raw.get("dlm_paradigm") == "autoregressive":
        raise CheckpointError("dlm_paradigm='autoregressive': this one was not trained to fill in masks")
    require_key(raw, "mask_token_id")
    return read_transformers_config(
        raw, shifted=False, causal_context=True, block_size=raw.get("block_size") or PUBLIC_BLOCK_SIZE
    )


def refuse_vision(raw: dict[str, Any]) -> DenoiserConfig:
    """Raises `CheckpointError`: of the model that sees images nothing is read."""
    raise CheckpointError(
        f"{raw['model_type']} sees images, which is not supported: take nvidia/Nemotron-Labs-Diffusion-8B"
    )


def to_public_name(ours: str) -> str:
    """The name of a tensor in the public checkpoints."""
    return "diffusion_head.weight" if ours == "lm_head.weight" else f"encoder.{ours}"


NEMOTRON_FAMILIES = {
    "nemotron_labs_diffusion": Family(read_nemotron_config, to_public_name),
    "nemotron_labs_diffusion_vlm": Family(refuse_vision, to_public_name),
}
