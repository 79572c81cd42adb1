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
CHAT_OF_ROLES = (
    "{% for m in messages %}<role>{{ 'HUMAN' if m['role'] == 'user' else m['role'] | upper }}</role>"
    "{{ m['content'] }}<|role_end|>{% endfor %}"
    "{% if add_generation_prompt %}<role>ASSISTANT</role>{% endif %}"
)
# config.json of each family, with the fields that the public ones have.
CONFIGS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "configs").glob("*.json"))
}
MASK_TOKENS = {"sdar": "<|MASK|>", "sdar_moe": "<|MASK|>", "fast-dllm-v2": "|<MASK>|"}  # others: "<|mask|>"
EDIT_TOKENS = ("delete_token_id", "split_token_id")  # often proposed, so that traces have edits
END_TOKEN_IDS = {"fast-dllm-v2": END, "a2d-qwen3": END}  # what the tokenizer calls eos; others: PAD
DEFAULT_TURNS = ("<|im_start|>", "<|im_end|>", CHAT)
TURN_MARKERS = dict.fromkeys(("llada2", "llada22", "lladamoe"), ("<role>", "<|role_end|>", CHAT_OF_ROLES))


def write_checkpoint(family: str, folder: Path) -> None:
    """A checkpoint of one of the families of `CONFIGS`: config, weights in float32 and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[family]
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": PAD, "eos_token_id": [END, PAD]})
    save_file(dict(_list_weights(config)), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder, family)


def digest_checkpoint(family: str) -> str:
    """A digest of the family's names and weights: a trace holds for these alone."""
    found = hashlib.sha256()
    for name, value in _list_weights(CONFIGS[family]):
        found.update(name.encode() + value.tobytes())
    return found.hexdigest()


# Of Qwen2 and Qwen3, by the end of a name: the spread of values, for gains what they are around. They make
# some confidences clear a threshold and some not.
SPREADS = {
    "embed_tokens.weight": 1.0, "_norm.weight": 1.5, "layernorm.weight": 1.0, "_proj.bias": 0.5,
    "gate_proj.weight": 0.15, "up_proj.weight": 0.15, "down_proj.weight": 0.15, "_proj.weight": 0.2,
    "lm_head.weight": 1.3,
}  # fmt: skip


def _list_weights(config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Names, as the family has them, and values."""
    for name, value in _draw_weights(config):
        yield _rename(config, name), value


def _draw_weights(config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Names of Qwen2, Qwen3, Qwen3-MoE or LLaDA2, whose queries, keys and values are one matrix.

    The mask's embedding is small: what is guessed at a mask comes from its place and its context; no mask
    is ever proposed, an end now and then.
    """
    experts, tied = "num_experts" in config, config["tie_word_embeddings"]
    draw = np.random.RandomState(1 if experts else 0)
    for name, shape in _list_shapes(config):
        if name == "lm_head.weight" and tied:
            continue
        values, is_gain = draw.standard_normal(shape), name.endswith("norm.weight")
        if experts:
            if is_gain:
                values = 1 + 0.1 * values
            elif name.endswith("expert_bias"):
                values *= 0.1  # enough to change who is chosen
            elif name.startswith("model.layers"):
                values *= 2 / shape[1] ** 0.5
            if name == "lm_head.weight":
                values[MASK] *= 0.1
                values[[config[key] for key in EDIT_TOKENS if key in config]] *= 1.5
            yield name, values.astype(np.float32)
            continue
        spread = next((size for end, size in SPREADS.items() if name.endswith(end)), 0.7 if tied else 1.0)
        if "dlm_paradigm" in config and name.endswith(("q_proj.weight", "k_proj.weight")):
            spread *= 0.6  # no norms follow: sharper attention would show how float32 is rounded
        values = (spread * (1 + 0.1 * values) if is_gain else spread * values).astype(np.float32)
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            values[MASK] *= 0.1
        if name == "lm_head.weight":
            values[END] *= 1.7
        yield name, values


def _list_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    head_dim, experts = config.get("head_dim", HEAD_DIM), config.get("num_experts", 0)
    queries, keys = HEADS * head_dim, KEY_HEADS * head_dim
    inner, llada2 = config.get("moe_intermediate_size", 32), "num_shared_experts" in config

    def mlp(prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}.gate_proj.weight", (width, WIDTH)
        yield f"{prefix}.up_proj.weight", (width, WIDTH)
        yield f"{prefix}.down_proj.weight", (WIDTH, width)

    yield f"model.{'word_embeddings' if llada2 else 'embed_tokens'}.weight", (VOCABULARY, WIDTH)
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        yield f"{layer}.input_layernorm.weight", (WIDTH,)
        if llada2:
            yield f"{layer}.attention.query_key_value.weight", (queries + 2 * keys, WIDTH)
            yield f"{layer}.attention.dense.weight", (WIDTH, queries)
            yield f"{layer}.attention.query_layernorm.weight", (head_dim,)
            yield f"{layer}.attention.key_layernorm.weight", (head_dim,)
        else:
            qwen2 = not experts and "attention_bias" not in config  # it has biases, most others have norms
            for name, width in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
                yield f"{layer}.self_attn.{name}.weight", (width, WIDTH)
                if qwen2:
                    yield f"{layer}.self_attn.{name}.bias", (width,)
            yield f"{layer}.self_attn.o_proj.weight", (WIDTH, queries)
            normed = not qwen2 and "dlm_paradigm" not in config
            for name in ("q_norm", "k_norm") if normed else ():
                yield f"{layer}.self_attn.{name}.weight", (head_dim,)
        yield f"{layer}.post_attention_layernorm.weight", (WIDTH,)
        if n < config.get("first_k_dense_replace", 0 if experts else LAYERS):
            yield from mlp(f"{layer}.mlp", INNER)
            continue
        yield f"{layer}.mlp.gate.weight", (experts, WIDTH)
        for expert in range(experts):
            yield from mlp(f"{layer}.mlp.experts.{expert}", inner)
        if llada2:
            yield f"{layer}.mlp.gate.expert_bias", (experts,)
            yield from mlp(f"{layer}.mlp.shared_experts", inner * config["num_shared_experts"])
    yield "model.norm.weight", (WIDTH,)
    yield "lm_head.weight", (VOCABULARY, WIDTH)


def _rename(config: dict[str, Any], name: str) -> str:
    """The name that a family has for a tensor of Qwen2 and its like."""
    if config["model_type"] != "nemotron_labs_diffusion":
        return name
    return name.replace("model.", "encoder.").replace("lm_head.", "diffusion_head.")


def special_tokens(family: str) -> dict[int, str]:
    """The special tokens of a family."""
    turn, end, _ = TURN_MARKERS.get(family, DEFAULT_TURNS)
    return {PAD: "<|endoftext|>", TURN: turn, END: end, MASK: MASK_TOKENS.get(family, "<|mask|>")}


def _write_tokenizer(folder: Path, family: str) -> None:
    """Bytes as tokens, in the order of their stand-ins, and the special tokens behind them.

    Some do not say which of the special tokens is the mask: their code has the id.
    """
    special = special_tokens(family)
    silent = family in ("fast-dllm-v2", "llada2", "llada22", "lladamoe")
    mask = special[MASK]
    masked = {"additional_special_tokens": [mask]} if silent else {"mask_token": mask}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special.values()))
    backend.save(str(folder / "tokenizer.json"))
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": TURN_MARKERS.get(family, DEFAULT_TURNS)[2],
        "eos_token": special[END_TOKEN_IDS.get(family, PAD)],
        "pad_token": special[PAD],
    }
    _write_json(folder / "tokenizer_config.json", said | masked)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
