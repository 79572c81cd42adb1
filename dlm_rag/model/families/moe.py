"""Families with mixtures of experts: LLaDA2, LLaDA-MoE, SDAR-MoE."""

from typing import Any

from dlm_rag.errors import CheckpointError
from dlm_rag.model.denoiser_config import DenoiserConfig, ExpertsConfig
from dlm_rag.model.families.base import (
    Family,
    read_transformers_config,
    require_key,
    require_positive_int,
    require_supported_values,
    to_transformers_name,
)
from dlm_rag.model.families.dense import read_sdar_config


def _read_experts(raw: dict[str, Any], *same: str, **given: Any) -> ExpertsConfig:
    """same: the keys of `raw` that have our names."""
    keys = ("num_experts", "num_experts_per_tok", *same)
    return ExpertsConfig(**{key: require_key(raw, key) for key in keys}, **given)


def _sdar_moe(raw: dict[str, Any]) -> DenoiserConfig:
    """SDAR with the experts of Qwen3-MoE."""
    require_supported_values(raw, decoder_sparse_step=1, mlp_only_layers=[])
    return read_sdar_config(raw, experts=_read_experts(raw, "moe_intermediate_size", "norm_topk_prob"))


def _llada_moe(raw: dict[str, Any]) -> DenoiserConfig:
    """OLMoE that predicts in place; whole attention.

    The public class ignores some keys. Where these ask for what it does not do, nobody knows what is meant.
    """
    require_supported_values(
        raw, attention_bias=False, clip_qkv=None, norm_topk_prob=False, moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False, routed_scaling_factor=1, router_num_group=None,
        router_topk_group=None,
    )  # fmt: skip
    sparse = require_key(raw, "moe_layer_freq")
    lowest = sparse.count(0) if isinstance(sparse, list) else 0
    if not isinstance(sparse, list) or sparse != [0] * lowest + [1] * (len(sparse) - lowest):
        raise CheckpointError("moe_layer_freq may be 0 for layers at the bottom, then 1 for all others")
    if len(sparse) != require_key(raw, "num_hidden_layers"):
        raise CheckpointError(f"moe_layer_freq={sparse!r:.60} must have an entry for each layer")
    experts = _read_experts(
        raw, moe_intermediate_size=require_key(raw, "expert_intermediate_size"),
        shared_intermediate_size=raw.get("shared_expert_intermediate_size") or 0,
        first_k_dense_replace=lowest,
    )  # fmt: skip
    dense = require_key(raw, "dense_intermediate_size") if lowest else experts.moe_intermediate_size
    return read_transformers_config(
        raw | {"intermediate_size": dense}, qk_norm=require_key(raw, "qk_layernorm"), shifted=False,
        experts=experts, partial_rotary_factor=raw.get("partial_rotary_factor") or 1.0,
    )  # fmt: skip


def _llada2(raw: dict[str, Any]) -> DenoiserConfig:
    """LLaDA2.0 and 2.1: blocks of 32 counted from the first token of the prompt."""
    for key in ("delete_token_id", "split_token_id", "expert_capacity"):
        if raw.get(key) is not None:
            raise CheckpointError(
                f"{key}={raw[key]!r:.60} is of LLaDA2.2, which inserts and deletes tokens: the canvas has "
                "fixed positions, take LLaDA2.0 or 2.1"
            )
    require_supported_values(
        raw, use_bias=False, norm_head=False, norm_topk_prob=True, score_function="sigmoid",
        moe_router_enable_expert_bias=True, rope_scaling=None,
    )  # fmt: skip
    inner = require_positive_int(raw, "moe_intermediate_size")
    experts = _read_experts(
        raw, "first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor",
        moe_intermediate_size=inner, shared_intermediate_size=inner * (raw.get("num_shared_experts") or 0),
        score_function="sigmoid", expert_bias=True,
        norm_topk_prob=raw.get("num_experts_per_tok") != 1,  # a single one counts what it scores
    )  # fmt: skip
    for key in ("num_key_value_heads", "rope_theta"):
        require_key(raw, key)
    if not experts.first_k_dense_replace:
        raw = raw | {"intermediate_size": inner}
    return read_transformers_config(
        raw, qkv_bias=raw.get("use_qkv_bias") or False, qk_norm=raw.get("use_qk_norm") is not False,
        shifted=False, experts=experts, block_size=32, block_grid="prompt",
        partial_rotary_factor=require_key(raw, "partial_rotary_factor"),
    )  # fmt: skip


_LLADA2_NAMES = {
    "embed_tokens": "word_embeddings",
    "self_attn.q_proj": "attention.query_key_value",
    "self_attn.k_proj": "attention.query_key_value",
    "self_attn.v_proj": "attention.query_key_value",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
}


def _llada2_name(ours: str) -> str:
    for part, theirs in _LLADA2_NAMES.items():
        ours = ours.replace(part, theirs)
    return to_transformers_name(ours)


def _llada_moe_name(ours: str) -> str:
    return to_transformers_name(ours.replace("mlp.shared_experts", "shared_expert"))


MOE_FAMILIES = {
    "sdar_moe": Family(_sdar_moe, to_transformers_name, mask_token="<|MASK|>"),
    "lladamoe": Family(_llada_moe, _llada_moe_name, mask_token="<|mask|>"),
    "llada2_moe": Family(_llada2, _llada2_name, mask_token="<|mask|>", fused_qkv=True),
}
