"""Tiny checkpoints with public field and tensor names, made from a seed: no weights are committed.

The streams of `numpy.random.RandomState` are frozen, so a family's weights are the same everywhere. The
weights are toys; what public code does with them is the reference.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LAYERS, WIDTH, HEADS, KEY_HEADS, HEAD_DIM, INNER = 3, 64, 4, 2, 16, 128
PAD, TURN, END, MASK, VOCABULARY = 256, 257, 258, 259, 260  # behind the 256 bytes

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {
    "attention_dropout": 0.0,
    "bos_token_id": PAD,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": 1024,
    "max_window_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KEY_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "float32",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}
CONFIGS: dict[str, dict[str, Any]] = {  # config.json, with the fields that the public ones have
    "sdar": SIZES
    | {
        "architectures": ["SDARForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_sdar.SDARConfig",
            "AutoModel": "modeling_sdar.SDARModel",
            "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
        },
        "model_type": "sdar",
        "attention_bias": False,
        "debug": False,
        "eos_token_id": PAD,
        "ep_size": 1,
        "fuse_cross_entropy": True,
        "head_dim": HEAD_DIM,
        "micro_forward": False,
        "skip_checkpoint": False,
        "tie_word_embeddings": False,
        "use_deepep": False,
    },
    "fast-dllm-v2": SIZES
    | {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration.Fast_dLLM_QwenConfig",
            "AutoModel": "modeling.Fast_dLLM_QwenModel",
            "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM",
        },
        "model_type": "Fast_dLLM_Qwen",
        "bd_size": 32,
        "conplemenrary_mask": True,  # as it is spelled there
        "eos_token_id": END,
        "layer_types": ["full_attention"] * LAYERS,
        "pad_token_id": END,
        "tie_word_embeddings": False,
        "use_cache": True,
    },
    "a2d-qwen3": SIZES
    | {
        "architectures": ["A2DQwen3LMHeadModel"],
        "auto_map": {
            "AutoConfig": "modeling_qwen3.A2DQwen3Config",
            "AutoModel": "modeling_qwen3.A2DQwen3LMHeadModel",
            "AutoModelForMaskedLM": "modeling_qwen3.A2DQwen3LMHeadModel",
        },
        "model_type": "a2d-qwen3",
        "attention_bias": False,
        "eos_token_id": END,
        "head_dim": HEAD_DIM,
        "layer_types": ["full_attention"] * LAYERS,
        "tie_word_embeddings": True,
    },
}
MASKS = {"sdar": "<|MASK|>", "fast-dllm-v2": "|<MASK>|", "a2d-qwen3": "<|mask|>"}
ENDS = {"sdar": PAD, "fast-dllm-v2": END, "a2d-qwen3": END}  # what the tokenizer calls eos


def write_checkpoint(family: str, folder: Path) -> None:
    """A checkpoint of one of the families of `CONFIGS`: config, weights in float32 and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[family]
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": PAD, "eos_token_id": [END, PAD]})
    save_file(dict(_weights(config)), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder, family)


def fingerprint(family: str) -> str:
    """A digest of the family's names and weights: a trace holds for these alone."""
    found = hashlib.sha256()
    for name, value in _weights(CONFIGS[family]):
        found.update(name.encode() + value.tobytes())
    return found.hexdigest()


def _weights(config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Names of Qwen2 or Qwen3 with weights that make some confidences clear a threshold and some not.

    The mask's embedding is small: what is guessed at a mask comes from its place and its context.
    """
    draw = np.random.RandomState(0)
    queries, keys = HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM

    def normal(std: float, *shape: int) -> np.ndarray:
        return (std * draw.standard_normal(shape)).astype(np.float32)

    def gains(around: float, width: int) -> np.ndarray:
        return (around * (1 + 0.1 * draw.standard_normal(width))).astype(np.float32)

    tied = config["tie_word_embeddings"]
    embedding = normal(1.0, VOCABULARY, WIDTH)
    embedding[MASK] *= 0.1
    yield "model.embed_tokens.weight", embedding
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        yield f"{layer}.input_layernorm.weight", gains(1.0, WIDTH)
        for name, width in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{layer}.self_attn.{name}.weight", normal(0.2, width, WIDTH)
            if "attention_bias" not in config:  # Qwen2 always has these, Qwen3 has norms
                yield f"{layer}.self_attn.{name}.bias", normal(0.5, width)
        yield f"{layer}.self_attn.o_proj.weight", normal(0.2, WIDTH, queries)
        if "attention_bias" in config:
            yield f"{layer}.self_attn.q_norm.weight", gains(1.5, HEAD_DIM)
            yield f"{layer}.self_attn.k_norm.weight", gains(1.5, HEAD_DIM)
        yield f"{layer}.post_attention_layernorm.weight", gains(1.0, WIDTH)
        yield f"{layer}.mlp.gate_proj.weight", normal(0.15, INNER, WIDTH)
        yield f"{layer}.mlp.up_proj.weight", normal(0.15, INNER, WIDTH)
        yield f"{layer}.mlp.down_proj.weight", normal(0.15, WIDTH, INNER)
    yield "model.norm.weight", gains(0.7 if tied else 1.0, WIDTH)
    if not tied:
        head = normal(1.3, VOCABULARY, WIDTH)
        head[MASK] *= 0.1  # no mask is ever proposed,
        head[END] *= 1.7  # an end now and then
        yield "lm_head.weight", head


def _write_tokenizer(folder: Path, family: str) -> None:
    """Bytes as tokens, in the order of their stand-ins, and the special tokens behind them.

    Fast-dLLM v2 does not say which of its special tokens is the mask: its code has the id.
    """
    mask = MASKS[family]
    special = {PAD: "<|endoftext|>", TURN: "<|im_start|>", END: "<|im_end|>", MASK: mask}
    masked = {"additional_special_tokens": [mask]} if family == "fast-dllm-v2" else {"mask_token": mask}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special.values()))
    backend.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT,
            "eos_token": special[ENDS[family]],
            "pad_token": special[PAD],
        }
        | masked,
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
