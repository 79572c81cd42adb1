"""Public architectures: how their configs and tensor names read in our words."""

from dataclasses import fields
from typing import Any

from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.families.base import BLOCK_SIZE_KEY, Family, require_key
from dlm_rag.model.families.dense import DENSE_FAMILIES
from dlm_rag.model.families.diffusion_gemma import DIFFUSION_GEMMA_FAMILY
from dlm_rag.model.families.moe import MOE_FAMILIES


def _read_dlm_rag_config(raw: dict[str, Any]) -> DenoiserConfig:
    require_key(raw, "vocab_size")
    known = {item.name for item in fields(DenoiserConfig)} - {"attention_patterns"}
    found = {key: value for key, value in raw.items() if key in known}
    if raw.get(BLOCK_SIZE_KEY):  # 0: whole
        found["block_size"] = raw[BLOCK_SIZE_KEY]
    return DenoiserConfig(**found)


FAMILIES = {
    "dlm_rag": Family(_read_dlm_rag_config, lambda name: name, separate_experts=False), **DENSE_FAMILIES,
    **MOE_FAMILIES, "diffusion_gemma": DIFFUSION_GEMMA_FAMILY
}  # fmt: skip


def get_family_name(raw: dict[str, Any]) -> str:
    """The name in `FAMILIES` of a config, or what it calls itself."""
    if raw["model_type"] == "llada" and "moe_layer_freq" in raw:  # the public LLaDA-MoE says no more
        return "lladamoe"
    return str(raw["model_type"])
