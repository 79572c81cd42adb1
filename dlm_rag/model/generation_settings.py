"""How families are decoded as published, and the settings that a checkpoint carries."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlm_rag.config.generation import GENERATION_FILE
from dlm_rag.model.denoiser_config import DenoiserConfig

_LLADA = {"max_new_tokens": 128, "block_length": 32, "commit_rule": "top_k"}
_SDAR = {"max_new_tokens": 128, "commit_threshold": 0.85}
_A2D = _LLADA | {"steps_per_block": 32, "schedule": "rounded"}
# How each family is decoded as published, by its name in `FAMILIES`. (Public answers are longer; 128 tokens
# are enough for an answer with its evidence.)
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "llada": _LLADA,  # arXiv 2502.09992: the most confident token of a block at each step
    "lladamoe": _LLADA,
    "sdar": _SDAR,  # github.com/JetAstra/SDAR
    "sdar_moe": _SDAR,
    "llada2_moe": {"max_new_tokens": 128, "commit_threshold": 0.95},  # the model's own `generate`
    "Fast_dLLM_Qwen": {"max_new_tokens": 128, "block_length": 8},  # arXiv 2509.26328
    "nemotron_labs_diffusion": {"max_new_tokens": 128},  # the model's own `generate`
    "a2d-qwen2": _A2D,  # github.com/ZHZisZZ/dllm
    "a2d-qwen3": _A2D,
    "a2d-llama": _A2D,
}
# Settings of `decode` that are fields of the architecture, by which training goes too.
SHAPE_FIELDS = {
    "max_new_tokens": "canvas_length", "block_length": "block_length", "abstain": "abstain",
    "finished_block_context": "finished_block_context",
}  # fmt: skip


def add_settings(config: DenoiserConfig, decode: Mapping[str, Any], **retrieval: Any) -> DenoiserConfig:
    """`config` with more settings of `decode` and `retrieval` as its own."""
    shape = {field: decode[name] for name, field in SHAPE_FIELDS.items() if decode.get(name) is not None}
    rest = {name: value for name, value in decode.items() if name not in SHAPE_FIELDS}
    return replace(
        config, **shape, decode_settings=config.decode_settings | rest,
        retrieval_settings=config.retrieval_settings | retrieval,
    )  # fmt: skip


def write_generation_config(folder: Path, config: DenoiserConfig, **extra: Any) -> None:
    """Writes the settings of `config` and `extra` keys into the folder's file, beside what is in it."""
    path = folder / GENERATION_FILE
    found = (json.loads(path.read_text()) if path.exists() else {}) | extra
    found |= {"decode": config.decode_settings, "retrieval": config.retrieval_settings}
    kept = {key: value for key, value in found.items() if value not in ({}, None)}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
