"""Tiny checkpoints of the families with mixtures of experts: public field and tensor names, fixed weights.

No weights are kept: a tensor is drawn from the legacy generator of numpy, whose stream is frozen, seeded
with its name. The scales make confidences vary around the thresholds of the traces.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
LLADA_TOKENS = {"eos": "<|endoftext|>", "mask": "<|mask|>", "turns": ("<role>", "</role>", "<|role_end|>")}
SDAR_TOKENS = {"eos": "<|endoftext|>", "mask": "<|MASK|>", "turns": ("<|im_start|>", "<|im_end|>")}
WIDTH, HEADS, SHARED_HEADS, HEAD, EXPERT, EXPERTS, VOCABULARY = 64, 4, 2, 32, 32, 8, 272

COMMON = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": SHARED_HEADS,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
}
LLADA2 = {  # as public: it is the class that has norms of queries and keys where `use_qk_norm` is not there
    **COMMON,
    "architectures": ["LLaDA2MoeModelLM"],
    "auto_map": {
        "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
        "AutoModel": "modeling_llada2_moe.LLaDA2MoeModel",
        "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
    },
    "model_type": "llada2_moe",
    "intermediate_size": 96,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": EXPERT,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "head_dim": HEAD,
    "partial_rotary_factor": 0.5,
    "rotary_dim": HEAD // 2,
    "rope_theta": 600000,
    "use_qkv_bias": False,
    "use_bias": False,
    "use_rmsnorm": True,
    "norm_head": False,
    "norm_softmax": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "use_sliding_window": False,
    "embedding_dropout": 0.0,
    "output_dropout": 0.0,
    "output_router_logits": False,
    "pad_token_id": len(BYTES),
}
LLADA_MOE = {
    **COMMON,
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "llada",
    "expert_intermediate_size": EXPERT,
    "dense_intermediate_size": 96,
    "shared_expert_intermediate_size": None,
    "moe_layer_freq": [1, 1, 1],
    "norm_topk_prob": None,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "routed_scaling_factor": 1,
    "router_num_group": None,
    "router_topk_group": None,
    "router_aux_loss_coef": 0.01,
    "output_router_logits": False,
    "qk_layernorm": True,
    "attention_bias": False,
    "clip_qkv": None,
    "partial_rotary_factor": 1,
    "rope_theta": 50000,
    "eos_token_id": len(BYTES),
    "pad_token_id": len(BYTES),
}
SDAR_MOE = {
    **COMMON,
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "intermediate_size": 96,
    "moe_intermediate_size": EXPERT,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "attention_bias": False,
    "head_dim": HEAD,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "bos_token_id": len(BYTES),
    "eos_token_id": len(BYTES),
}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # config.json, special tokens
    "llada2_moe": (LLADA2, LLADA_TOKENS),
    "llada21_moe": (LLADA2, LLADA_TOKENS),  # the public config is no other
    "lladamoe": (LLADA_MOE, LLADA_TOKENS),
    "sdar_moe": (SDAR_MOE, SDAR_TOKENS),
}
END, MASK = len(BYTES), len(BYTES) + 1


def mlp(prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The three matrices of a feed-forward net."""
    yield f"{prefix}.gate_proj.weight", (width, WIDTH)
    yield f"{prefix}.up_proj.weight", (width, WIDTH)
    yield f"{prefix}.down_proj.weight", (WIDTH, width)


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every public tensor name of a config and its shape."""
    fused = config["model_type"] == "llada2_moe"
    head = config.get("head_dim") or WIDTH // HEADS
    yield f"model.{'word_embeddings' if fused else 'embed_tokens'}.weight", (VOCABULARY, WIDTH)
    yield "model.norm.weight", (WIDTH,)
    yield "lm_head.weight", (VOCABULARY, WIDTH)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (WIDTH,)
        yield f"{layer}.post_attention_layernorm.weight", (WIDTH,)
        if fused:
            yield f"{layer}.attention.query_key_value.weight", ((HEADS + 2 * SHARED_HEADS) * head, WIDTH)
            yield f"{layer}.attention.dense.weight", (WIDTH, HEADS * head)
            norms = (f"{layer}.attention.query_layernorm", f"{layer}.attention.key_layernorm")
        else:
            for name, heads in (("q", HEADS), ("k", SHARED_HEADS), ("v", SHARED_HEADS)):
                yield f"{layer}.self_attn.{name}_proj.weight", (heads * head, WIDTH)
            yield f"{layer}.self_attn.o_proj.weight", (WIDTH, HEADS * head)
            norms = (f"{layer}.self_attn.q_norm", f"{layer}.self_attn.k_norm")
        yield from ((f"{norm}.weight", (head,)) for norm in norms)
        if number < config.get("first_k_dense_replace", 0):
            yield from mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        yield f"{layer}.mlp.gate.weight", (EXPERTS, WIDTH)
        for expert in range(EXPERTS):
            yield from mlp(f"{layer}.mlp.experts.{expert}", EXPERT)
        if fused:
            yield f"{layer}.mlp.gate.expert_bias", (EXPERTS,)
            yield from mlp(f"{layer}.mlp.shared_experts", EXPERT * config["num_shared_experts"])


def drawn(family: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The values of a tensor: norms around one, matrices that keep the size of what they are given."""
    values = np.random.RandomState(zlib.crc32(f"{family}/{name}".encode())).standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 1 + 0.1 * values
    elif name.endswith("expert_bias"):
        values *= 0.1  # enough to change who is chosen
    elif "embed" not in name and name != "lm_head.weight":
        values *= 2 / sqrt(shape[1])
    return values.astype(np.float32)


def tokenizer(tokens: dict[str, Any]) -> Tokenizer:
    """Bytes, then the end, mask and turn tokens of a family."""
    made = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(BYTES)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(text, special=True) for text in (tokens["eos"], tokens["mask"], *tokens["turns"])]
    )
    return made


def weights(family: str) -> dict[str, np.ndarray]:
    """Every tensor of a family by its public name."""
    tensors = {name: drawn(family, name, shape) for name, shape in shapes(FAMILIES[family][0])}
    tensors["lm_head.weight"][MASK] = 0  # no mask is ever written
    return tensors


def fingerprint(family: str) -> str:
    """A digest of a family's names and weights: a trace holds for these alone."""
    digest = hashlib.sha256()
    for name, value in weights(family).items():
        digest.update(name.encode() + value.tobytes())
    return digest.hexdigest()


def write_checkpoint(family: str, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer of a family, by its public names."""
    config, tokens = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer(tokens).save(str(folder / "tokenizer.json"))
    names = {"eos_token": tokens["eos"], "pad_token": tokens["eos"], "mask_token": tokens["mask"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n")
    save_file(weights(family), folder / "model.safetensors", metadata={"format": "pt"})
