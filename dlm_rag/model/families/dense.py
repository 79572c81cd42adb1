"""Public architectures: how their configs and tensor names read in our words."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from dlm_rag.errors import CheckpointError, nearest
from dlm_rag.model.shape import DenoiserConfig


@dataclass(frozen=True)
class Family:
    """A public architecture: how its config and its tensor names read in our words."""

    read: Callable[[dict[str, Any]], DenoiserConfig]
    rename: Callable[[str], str]  # our tensor name -> theirs


def _transformers_config(raw: dict[str, Any], **differences: Any) -> DenoiserConfig:
    """Fields that Dream, Qwen2, Qwen3 and Llama share; autoregressive ancestry shifts the output."""
    _refuse(raw, hidden_act="silu", use_sliding_window=False, mlp_bias=False, partial_rotary_factor=1.0)
    heads, width = _count(raw, "num_attention_heads"), _count(raw, "hidden_size")
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(key) or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{key}={rope!r:.60} must be an object or null")
    _refuse(rope, partial_rotary_factor=1.0)
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise CheckpointError("layer_types may be full_attention only")
    return DenoiserConfig(
        vocab_size=_need(raw, "vocab_size"),
        hidden_size=width,
        num_hidden_layers=_need(raw, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or width // heads,
        intermediate_size=_need(raw, "intermediate_size"),
        max_position_embeddings=_need(raw, "max_position_embeddings"),
        rms_norm_eps=_need(raw, "rms_norm_eps"),
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or 10000.0,
        rope_scaling=_rope_scaling(rope),
        tie_word_embeddings=_tied(raw, "tie_word_embeddings"),
        mask_token_id=raw.get("mask_token_id"),
        shifted=True,
        **differences,
    )


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    return None if kind == "default" else {**rope, "rope_type": kind}


def _qkv_bias_family(raw: dict[str, Any]) -> DenoiserConfig:
    return _transformers_config(raw, qkv_bias=True)


def _qwen3(raw: dict[str, Any]) -> DenoiserConfig:
    _refuse(raw, attention_bias=False)
    return _transformers_config(raw, qk_norm=True)


def _llama(raw: dict[str, Any]) -> DenoiserConfig:
    _refuse(raw, attention_bias=False)
    return _transformers_config(raw)


def _llada(raw: dict[str, Any]) -> DenoiserConfig:
    _refuse(
        raw, activation_type="silu", alibi=False, attention_layer_norm=False,
        bias_for_layer_norm=False, block_type="llama", include_bias=False, include_qkv_bias=False,
        input_emb_norm=False, layer_norm_type="rms", rope=True, scale_logits=False,
    )  # fmt: skip
    heads, width = _count(raw, "n_heads"), _count(raw, "d_model")
    return DenoiserConfig(
        vocab_size=raw.get("embedding_size") or _need(raw, "vocab_size"),
        hidden_size=width,
        num_hidden_layers=_need(raw, "n_layers"),
        num_attention_heads=heads,
        num_key_value_heads=raw.get("n_kv_heads") or heads,
        head_dim=width // heads,
        intermediate_size=_need(raw, "mlp_hidden_size"),
        max_position_embeddings=_need(raw, "max_sequence_length"),
        rms_norm_eps=_need(raw, "rms_norm_eps"),
        rope_theta=_need(raw, "rope_theta"),
        tie_word_embeddings=_tied(raw, "weight_tying"),
        mask_token_id=_need(raw, "mask_token_id"),
    )


def _ours(raw: dict[str, Any]) -> DenoiserConfig:
    known = {item.name for item in fields(DenoiserConfig)}
    _need(raw, "vocab_size")
    return DenoiserConfig(**{key: value for key, value in raw.items() if key in known})


def _transformers_name(ours: str) -> str:
    return ours if ours.startswith("lm_head.") else f"model.{ours}"


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


FAMILIES = {
    "dlm_rag": Family(_ours, lambda name: name),
    "llada": Family(_llada, _llada_name),
    "Dream": Family(_qkv_bias_family, _transformers_name),
    "qwen2": Family(_qkv_bias_family, _transformers_name),
    "qwen3": Family(_qwen3, _transformers_name),
    "llama": Family(_llama, _transformers_name),
}


def _need(raw: dict[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise CheckpointError(f"the key '{key}' is missing{nearest(key, raw)}")
    return raw[key]


def _count(raw: dict[str, Any], key: str) -> int:
    value = _need(raw, key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{key}={value!r:.60} must be a whole number of at least 1")
    return value


def _tied(raw: dict[str, Any], key: str) -> Any:
    value = raw.get(key)
    return False if value is None else value  # checked by `DenoiserConfig`


def _refuse(raw: dict[str, Any], **supported: Any) -> None:
    for key, value in supported.items():
        if raw.get(key, value) not in (value, None):
            raise CheckpointError(f"{key}={raw[key]!r:.60} is not supported (only {value!r} is)")
