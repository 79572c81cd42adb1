"""Public architectures: how their configs and tensor names read in our words."""

from dataclasses import MISSING, fields
from typing import Any

from dlm_rag.errors import CheckpointError, nearest
from dlm_rag.model.families.base import Family, need
from dlm_rag.model.families.dense import DENSE
from dlm_rag.model.families.gemma import FAMILY as GEMMA
from dlm_rag.model.families.sparse import SPARSE
from dlm_rag.model.shape import DenoiserConfig, Experts


def _ours(raw: dict[str, Any]) -> DenoiserConfig:
    known = {item.name for item in fields(DenoiserConfig)}
    need(raw, "vocab_size")
    found = {key: value for key, value in raw.items() if key in known}
    if found.get("attention_block") == 0:  # whole
        del found["attention_block"]
    if found.get("experts") is not None:
        found["experts"] = _experts(found["experts"])
    return DenoiserConfig(**found)


def _experts(raw: Any) -> Experts:
    if not isinstance(raw, dict):
        raise CheckpointError(f"experts={raw!r:.60} must be an object or null")
    items = {item.name: item for item in fields(Experts)}
    if unknown := sorted(raw.keys() - items):
        raise CheckpointError(f"experts has no key '{unknown[0]:.60}'{nearest(unknown[0], items)}")
    if lacking := [name for name, item in items.items() if item.default is MISSING and name not in raw]:
        raise CheckpointError(f"the key '{lacking[0]}' of experts is missing")
    return Experts(**raw)


FAMILIES = {
    "dlm_rag": Family(_ours, lambda name: name, apart=False), **DENSE, **SPARSE, "diffusion_gemma": GEMMA
}  # fmt: skip


def family_of(raw: dict[str, Any]) -> str:
    """The name in `FAMILIES` of a config, or what it calls itself."""
    if raw["model_type"] == "llada" and "moe_layer_freq" in raw:  # the public LLaDA-MoE says no more
        return "lladamoe"
    return str(raw["model_type"])
