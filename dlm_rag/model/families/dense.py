"""Families whose layers are all alike: LLaDA, Dream, SDAR, Fast-dLLM v2, Tiny-A2D, WeDLM, Qwen, Llama."""

from functools import partial
from typing import Any

from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.families.base import (
    BLOCK_SIZE_KEY,
    Family,
    read_transformers_config,
    require_key,
    require_positive_int,
    require_supported_values,
    to_transformers_name,
)

_qwen2 = partial(read_transformers_config, qkv_bias=True)


def _llama(raw: dict[str, Any], **differences: Any) -> DenoiserConfig:
    require_supported_values(raw, attention_bias=False)
    return read_transformers_config(raw, **differences)


_qwen3 = partial(_llama, qk_norm=True)


def read_sdar_config(raw: dict[str, Any], **differences: Any) -> DenoiserConfig:
    """Qwen3 that predicts in place, in blocks counted from the first token of the prompt."""
    require_supported_values(raw, use_regular_causal=False)
    if raw.get(BLOCK_SIZE_KEY) is None:
        require_key(raw, "block_size", ": set model.block_size to the length of the model's blocks")
    return _qwen3(raw, shifted=False, block_size=raw.get("block_size"), block_grid="prompt", **differences)


def _fast_dllm(raw: dict[str, Any]) -> DenoiserConfig:
    """Qwen2.5 in blocks, which are written in shorter ones."""
    return _qwen2(raw, block_size=require_key(raw, "bd_size"), block_grid="prompt", block_length=8)


def _wedlm(raw: dict[str, Any]) -> DenoiserConfig:
    """Qwen2.5 or Qwen3 that predicts in place under causal attention."""
    kind = {"qkv_bias": require_key(raw, "attention_bias"), "qk_norm": require_key(raw, "qk_norm")}
    return read_transformers_config(raw, shifted=False, block_size=1, block_grid="prompt", **kind)


def _llada(raw: dict[str, Any]) -> DenoiserConfig:
    require_supported_values(
        raw, activation_type="silu", alibi=False, attention_layer_norm=False,
        bias_for_layer_norm=False, block_type="llama", include_bias=False, include_qkv_bias=False,
        input_emb_norm=False, layer_norm_type="rms", rope=True, scale_logits=False,
    )  # fmt: skip
    heads, width = require_positive_int(raw, "n_heads"), require_positive_int(raw, "d_model")
    return DenoiserConfig(
        vocab_size=raw.get("embedding_size") or require_key(raw, "vocab_size"),
        hidden_size=width,
        num_hidden_layers=require_key(raw, "n_layers"),
        num_attention_heads=heads,
        num_key_value_heads=raw.get("n_kv_heads") or heads,
        head_dim=width // heads,
        intermediate_size=require_key(raw, "mlp_hidden_size"),
        max_position_embeddings=require_key(raw, "max_sequence_length"),
        rms_norm_eps=require_key(raw, "rms_norm_eps"),
        rope_theta=require_key(raw, "rope_theta"),
        tie_word_embeddings=raw.get("weight_tying") or False,
        mask_token_id=require_key(raw, "mask_token_id"),
    )


_LLADA_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
    "embed_tokens": "wte",
    "norm": "ln_f",
    "lm_head": "ff_out",
}


def _llada_name(ours: str) -> str:
    path, _, kind = ours.rpartition(".")
    if path.startswith("layers."):
        _, index, part = path.split(".", 2)
        return f"model.transformer.blocks.{index}.{_LLADA_NAMES[part]}.{kind}"
    return f"model.transformer.{_LLADA_NAMES[path]}.{kind}"


DENSE_FAMILIES = {
    "llada": Family(_llada, _llada_name),
    "Dream": Family(_qwen2, to_transformers_name),
    "qwen2": Family(_qwen2, to_transformers_name),
    "qwen3": Family(_qwen3, to_transformers_name),
    "llama": Family(_llama, to_transformers_name),
    "sdar": Family(read_sdar_config, to_transformers_name, mask_token="<|MASK|>"),
    "Fast_dLLM_Qwen": Family(_fast_dllm, to_transformers_name, mask_token="|<MASK>|"),
    "wedlm": Family(_wedlm, to_transformers_name, mask_token="<|mask|>"),
} | {
    # Autoregressive families trained to predict in place (Tiny-A2D), with whole attention or in blocks:
    # the config does not say which.
    f"a2d-{name}": Family(partial(read, shifted=False), to_transformers_name, mask_token="<|mask|>")
    for name, read in (("qwen2", _qwen2), ("qwen3", _qwen3), ("llama", _llama))
}
