"""Public architectures: how their configs and tensor names read in our words."""

from dataclasses import fields
from typing import Any

from dlm_rag.model.families.base import Family, need
from dlm_rag.model.families.dense import DENSE
from dlm_rag.model.shape import DenoiserConfig


def _ours(raw: dict[str, Any]) -> DenoiserConfig:
    known = {item.name for item in fields(DenoiserConfig)}
    need(raw, "vocab_size")
    return DenoiserConfig(**{key: value for key, value in raw.items() if key in known})


FAMILIES = {"dlm_rag": Family(_ours, lambda name: name), **DENSE}
