"""Public architectures: how their configs and tensor names read in our words, by name, nothing guessed.

With layers that are all alike: LLaDA, Dream, SDAR, Fast-dLLM v2, Tiny-A2D, Nemotron-Labs-Diffusion, Qwen,
Llama. With mixtures of experts: LLaDA2, LLaDA-MoE, SDAR-MoE.
"""

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dlm_rag.config.fields import import_object
from dlm_rag.errors import CheckpointError, suggest_nearest, translate_failures
from dlm_rag.files.hub import read_checkpoint_json
from dlm_rag.model.denoiser_config import DenoiserConfig, ExpertsConfig
from dlm_rag.model.stored_tensors import Family

BLOCK_SIZE_KEY = "attention_block"  # our key: a public `block_size` may be something else


def read_transformers_config(raw: dict[str, Any], **differences: Any) -> DenoiserConfig:
    """Fields that most families share; autoregressive ancestry shifts the output."""
    require_supported_values(raw, hidden_act="silu", use_sliding_window=False, mlp_bias=False)
    heads, width = (require_positive_int(raw, key) for key in ("num_attention_heads", "hidden_size"))
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"  # as transformers has it
    rope = raw.get(key) or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{key}={rope!r:.60} must be an object or null")
    if "partial_rotary_factor" not in differences:
        for said in (raw, rope):
            require_supported_values(said, partial_rotary_factor=1.0)
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise CheckpointError("layer_types may be full_attention only")
    kind = rope.get("rope_type", rope.get("type", "default"))
    same = (
        "vocab_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings", "rms_norm_eps",
    )  # fmt: skip
    shared = {name: require_key(raw, name) for name in same} | {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or width // heads,
        "rope_theta": rope.get("rope_theta") or raw.get("rope_theta"),
        "rope_scaling": None if kind == "default" else {**rope, "rope_type": kind},
        "tie_word_embeddings": raw.get("tie_word_embeddings"),
        "mask_token_id": raw.get("mask_token_id"),
        "shifted": True,
    }
    return _make_config(**(shared | differences))


def _make_config(**said: Any) -> DenoiserConfig:
    """A config, with its defaults where nothing is said."""
    return DenoiserConfig(**{name: value for name, value in said.items() if value is not None})


def require_key(raw: dict[str, Any], key: str, remedy: str = "") -> Any:
    """The value of a key; raises `CheckpointError` where it is missing."""
    if raw.get(key) is None:
        raise CheckpointError(f"the key '{key}' is missing{remedy or suggest_nearest(key, raw)}")
    return raw[key]


def require_positive_int(raw: dict[str, Any], key: str) -> int:
    value = require_key(raw, key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{key}={value!r:.60} must be a whole number of at least 1")
    return value


def require_supported_values(raw: dict[str, Any], **supported: Any) -> None:
    """Raises `CheckpointError` for a key with a value that the denoiser does not support."""
    for key, value in supported.items():
        if raw.get(key, value) not in (value, None):
            raise CheckpointError(f"{key}={raw[key]!r:.60} is not supported (only {value!r} is)")


def find_mask_token_id(folder: Path, usual: str) -> int:
    """The id of the token that the folder declares as its mask, else of the family's `usual` one."""
    declared, ids = None, dict[str, Any]()
    for path in (folder / "tokenizer_config.json", folder / "tokenizer.json"):
        if (declared or usual) in ids:
            break  # the second is long
        raw = read_checkpoint_json(path) if path.exists() else {}
        with translate_failures(CheckpointError, f"{path} has a token that is none"):
            if mask := raw.get("mask_token"):
                declared = declared or (mask if isinstance(mask, str) else mask["content"])
            ids |= {token["content"]: token["id"] for token in raw.get("added_tokens") or ()}
            by_id = raw.get("added_tokens_decoder") or {}
            ids |= {token["content"]: int(number) for number, token in by_id.items()}
    found = ids.get(declared or usual)
    if type(found) is not int:
        raise CheckpointError(
            "the key 'mask_token_id' is missing, and the tokenizer has not added "
            f"{declared or usual!r:.60}{', which it declares' if declared else ''}: add the key"
        )
    return found


def _read_dlm_rag_config(raw: dict[str, Any]) -> DenoiserConfig:
    require_key(raw, "vocab_size")
    require_supported_values(raw, noise=None)
    known = {item.name for item in fields(DenoiserConfig)} - {"decode_settings", "retrieval_settings"}
    found = {key: value for key, value in raw.items() if key in known}
    if raw.get(BLOCK_SIZE_KEY):  # 0: whole
        found["block_size"] = raw[BLOCK_SIZE_KEY]
    return DenoiserConfig(**found)


_qwen2 = partial(read_transformers_config, qkv_bias=True)


def _llama(raw: dict[str, Any], **differences: Any) -> DenoiserConfig:
    require_supported_values(raw, attention_bias=False)
    return read_transformers_config(raw, **differences)


_qwen3 = partial(_llama, qk_norm=True)


def _sdar(raw: dict[str, Any], **differences: Any) -> DenoiserConfig:
    """Qwen3 that predicts in place, in blocks counted from the first token of the prompt."""
    require_supported_values(raw, use_regular_causal=False)
    if raw.get(BLOCK_SIZE_KEY) is None:
        require_key(raw, "block_size", ": set model.block_size to the length of the model's blocks")
    return _qwen3(raw, shifted=False, block_size=raw.get("block_size"), block_grid="prompt", **differences)


def _fast_dllm(raw: dict[str, Any]) -> DenoiserConfig:
    """Qwen2.5 in blocks, which are written in shorter ones."""
    return _qwen2(raw, block_size=require_key(raw, "bd_size"), block_grid="prompt", block_length=8)


def _nemotron(raw: dict[str, Any]) -> DenoiserConfig:
    """Ministral 3 with one head that fills blocks and predicts the token after the text before them, which
    is seen causally. The LoRA beside it is for self-speculation, and is not read."""
    require_supported_values(raw, attention_bias=False, sliding_window=None, vision_config=None)
    if raw.get("dlm_paradigm") == "autoregressive":
        raise CheckpointError("dlm_paradigm='autoregressive': this one was not trained to fill in masks")
    require_key(raw, "mask_token_id")
    block = raw.get("block_size") or 32
    return read_transformers_config(raw, shifted=False, causal_context=True, block_size=block)


def _llada(raw: dict[str, Any]) -> DenoiserConfig:
    require_supported_values(
        raw, activation_type="silu", alibi=False, attention_layer_norm=False,
        bias_for_layer_norm=False, block_type="llama", include_bias=False, include_qkv_bias=False,
        input_emb_norm=False, layer_norm_type="rms", rope=True, scale_logits=False,
    )  # fmt: skip
    heads, width = require_positive_int(raw, "n_heads"), require_positive_int(raw, "d_model")
    return _make_config(
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
        tie_word_embeddings=raw.get("weight_tying"),
        mask_token_id=require_key(raw, "mask_token_id"),
    )


def _read_experts(raw: dict[str, Any], *same: str, **given: Any) -> ExpertsConfig:
    """same: the keys of `raw` that have our names."""
    keys = ("num_experts", "num_experts_per_tok", *same)
    return ExpertsConfig(**{key: require_key(raw, key) for key in keys}, **given)


def _sdar_moe(raw: dict[str, Any]) -> DenoiserConfig:
    """SDAR with the experts of Qwen3-MoE."""
    require_supported_values(raw, decoder_sparse_step=1, mlp_only_layers=[])
    return _sdar(raw, experts=_read_experts(raw, "moe_intermediate_size", "norm_topk_prob"))


def _llada_moe(raw: dict[str, Any]) -> DenoiserConfig:
    """OLMoE that predicts in place; whole attention. Refused are keys that the public class ignores."""
    require_supported_values(
        raw, attention_bias=False, clip_qkv=None, norm_topk_prob=False, moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False, routed_scaling_factor=1, router_num_group=None,
        router_topk_group=None,
    )  # fmt: skip
    sparse = require_key(raw, "moe_layer_freq")
    lowest = sparse.count(0) if isinstance(sparse, list) else 0
    if sparse != [0] * lowest + [1] * (require_positive_int(raw, "num_hidden_layers") - lowest):
        raise CheckpointError(
            f"moe_layer_freq={sparse!r:.60} must have an entry for each layer: 0 at the bottom, then 1"
        )
    experts = _read_experts(
        raw, moe_intermediate_size=require_key(raw, "expert_intermediate_size"),
        shared_intermediate_size=raw.get("shared_expert_intermediate_size") or 0,
        first_k_dense_replace=lowest,
    )  # fmt: skip
    dense = require_key(raw, "dense_intermediate_size") if lowest else experts.moe_intermediate_size
    return read_transformers_config(
        raw | {"intermediate_size": dense}, qk_norm=require_key(raw, "qk_layernorm"), shifted=False,
        experts=experts, partial_rotary_factor=raw.get("partial_rotary_factor"),
    )  # fmt: skip


def _llada2(raw: dict[str, Any]) -> DenoiserConfig:
    """LLaDA2.0 to 2.2, in blocks; the tokens of 2.2 that delete and insert are excluded here."""
    if capacity := raw.get("expert_capacity") or 0:  # the public class of 2.2 passes over groups
        raw = raw | {"n_group": 1, "topk_group": 1}
    require_supported_values(
        raw, use_bias=False, norm_head=False, norm_topk_prob=True, score_function="sigmoid",
        moe_router_enable_expert_bias=True, rope_scaling=None,
    )  # fmt: skip
    inner = require_positive_int(raw, "moe_intermediate_size")
    experts = _read_experts(
        raw, "first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor",
        moe_intermediate_size=inner, shared_intermediate_size=inner * (raw.get("num_shared_experts") or 0),
        score_function="sigmoid", expert_bias=True, expert_capacity=capacity,
        norm_topk_prob=raw.get("num_experts_per_tok") != 1,  # a single one counts what it scores
    )  # fmt: skip
    for key in ("num_key_value_heads", "rope_theta"):
        require_key(raw, key)
    if not experts.first_k_dense_replace:
        raw = raw | {"intermediate_size": inner}
    edits = ("delete_token_id", "split_token_id")
    return read_transformers_config(
        raw, qkv_bias=raw.get("use_qkv_bias"), qk_norm=raw.get("use_qk_norm") is not False, shifted=False,
        experts=experts, block_size=raw.get("block_size") or 32, block_grid="prompt",
        excluded_token_ids=[raw[key] for key in edits if raw.get(key) is not None],
        partial_rotary_factor=require_key(raw, "partial_rotary_factor"),
    )  # fmt: skip


# By family, the names of modules in our words and in theirs, where these differ.
_NAMES = yaml.safe_load(Path(__file__).with_name("module_names.yaml").read_text("utf-8"))
TRANSFORMERS_NAMES: dict[str, str] = _NAMES["transformers"]
# How families are decoded as published. (Public answers are longer; 128 tokens are enough for an answer and
# its evidence.)
_LLADA = {"max_new_tokens": 128, "block_length": 32, "commit_rule": "top_k"}  # arXiv 2502.09992
_SDAR = {"max_new_tokens": 128, "commit_threshold": 0.85}  # github.com/JetAstra/SDAR
_A2D = _LLADA | {"steps_per_block": 32, "schedule": "rounded"}  # github.com/ZHZisZZ/dllm
_FAST_DLLM = {"max_new_tokens": 128, "block_length": 8}  # arXiv 2509.26328
_LLADA2 = {"max_new_tokens": 128, "commit_threshold": 0.95}  # the model's own `generate`, as in the next
_NEMOTRON = {"max_new_tokens": 128}

FAMILIES: dict[str, Family | str] = {
    "dlm_rag": Family(_read_dlm_rag_config, {}, separate_experts=False),
    "llada": Family(_llada, _NAMES["llada"], _LLADA),
    "Dream": Family(_qwen2, TRANSFORMERS_NAMES),
    "qwen2": Family(_qwen2, TRANSFORMERS_NAMES, autoregressive=True),
    "qwen3": Family(_qwen3, TRANSFORMERS_NAMES, autoregressive=True),
    "llama": Family(_llama, TRANSFORMERS_NAMES, autoregressive=True),
    "sdar": Family(_sdar, TRANSFORMERS_NAMES, _SDAR, mask_token="<|MASK|>"),
    "Fast_dLLM_Qwen": Family(_fast_dllm, TRANSFORMERS_NAMES, _FAST_DLLM, mask_token="|<MASK>|"),
    "sdar_moe": Family(_sdar_moe, TRANSFORMERS_NAMES, _SDAR, mask_token="<|MASK|>"),
    "lladamoe": Family(_llada_moe, _NAMES["llada_moe"], _LLADA, mask_token="<|mask|>"),
    "llada2_moe": Family(_llada2, _NAMES["llada2"], _LLADA2, mask_token="<|mask|>", fused_qkv=True),
    "diffusion_gemma": "dlm_rag.diffusion_gemma.decoding:FAMILY",  # it has a folder of its own
    "nemotron_labs_diffusion": Family(_nemotron, _NAMES["nemotron"], _NEMOTRON),
}
for _name, _read in (("qwen2", _qwen2), ("qwen3", _qwen3), ("llama", _llama)):
    # An autoregressive family trained to predict in place (Tiny-A2D), with whole attention or in blocks:
    # the config does not say which.
    _in_place = partial(_read, shifted=False)
    FAMILIES[f"a2d-{_name}"] = Family(_in_place, TRANSFORMERS_NAMES, _A2D, mask_token="<|mask|>")


def find_family(raw: dict[str, Any]) -> Family:
    """The family of a config; raises `CheckpointError` for one that is not in `FAMILIES`."""
    kind = str(require_key(raw, "model_type"))
    if kind == "llada" and "moe_layer_freq" in raw:  # the public LLaDA-MoE says no more
        kind = "lladamoe"
    if kind not in FAMILIES:
        own_code = ", which needs code of its own that is never executed" if "auto_map" in raw else ""
        known = f"{', '.join(FAMILIES)}{suggest_nearest(kind, FAMILIES)}"
        raise CheckpointError(f"this is a '{kind:.60}' model{own_code}; supported are {known}")
    found = FAMILIES[kind]
    return import_object(found, "model_type") if isinstance(found, str) else found
