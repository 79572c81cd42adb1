"""Public architectures: how their configs and tensor names read in our words."""

from dataclasses import fields
from typing import Any

from dlm_rag.model.families.base import Family, need
from dlm_rag.model.families.dense import DENSE
from dlm_rag.model.families.sparse import SPARSE
from dlm_rag.model.shape import DenoiserConfig, Experts


def _ours(raw: dict[str, Any]) -> DenoiserConfig:
    known = {item.name for item in fields(DenoiserConfig)}
    need(raw, "vocab_size")
    found = {key: value for key, value in raw.items() if key in known}
    if found.get("experts") is not None:
        found["experts"] = Experts(**found["experts"])
    return DenoiserConfig(**found)


FAMILIES = {"dlm_rag": Family(_ours, lambda name: name, apart=False), **DENSE, **SPARSE}


def family_of(raw: dict[str, Any]) -> str:
    """The name in `FAMILIES` of a config, or what it calls itself."""
    if raw["model_type"] == "llada" and "moe_layer_freq" in raw:  # the public LLaDA-MoE says no more
        return "lladamoe"
    return str(raw["model_type"])
