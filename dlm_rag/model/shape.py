"""The architecture as numbers: its config, and the names and shapes of its tensors."""

from dataclasses import dataclass, fields
from typing import Any, get_args

EVIDENCE_LAYOUTS = ("joint", "prefix", "independent")
BLOCK_GRIDS = ("prompt", "canvas")
FINISHED_BLOCKS = ("reread", "text", "append", "kept")  # what they see: `evidence/layout.py`
# Kinds of scaled rotary positions, with the numbers that each needs; others depend on the text's length.
ROPE_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class DenoiserConfig:
    """The architecture, in Hugging Face's names where they exist; it travels in `config.json`."""

    vocab_size: int
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 32
    intermediate_size: int = 352
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    tie_word_embeddings: bool = False
    mask_token_id: int | None = None
    # True where the network's row i predicts token i + 1 (autoregressive ancestry: Dream, Qwen).
    # The denoiser un-shifts its output, so that logits[:, i] always predicts token i.
    shifted: bool = False
    evidence_layout: str = "joint"
    # `independent` only: positions 0 to passage_length - 1 belong to each passage, the question
    # follows. A longer passage is cut.
    passage_length: int = 512
    canvas_length: int = 100  # response positions where the config names no other number
    block_length: int | None = None  # as in DecodeConfig, where the config names none
    # Who sees whom. None: every token every other; n: blocks of n tokens see themselves and what is before
    # (1: causal), counted from the first token of the prompt or of the canvas.
    attention_block: int | None = None
    block_grid: str = "canvas"
    finished_blocks: str = "reread"  # as in DecodeConfig, where the config names none

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            kind, *others = get_args(item.type) or (item.type,)
            if value is None and others:
                continue
            given = f"{item.name}={value!r:.60}"
            if kind is bool and not isinstance(value, bool):
                raise ValueError(f"{given} must be true or false")
            lowest = {"mask_token_id": 0, "block_length": 0}.get(item.name, 1)
            if kind is int and (not _is_number(value, int) or value < lowest):
                raise ValueError(f"{given} must be a whole number of at least {lowest}")
            if kind is float and not _is_positive(value):
                raise ValueError(f"{given} must be a number above 0 that float32 can hold")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even")
        if self.mask_token_id is not None and self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id={self.mask_token_id} is outside the vocabulary")
        for name, known in (
            ("evidence_layout", EVIDENCE_LAYOUTS),
            ("block_grid", BLOCK_GRIDS),
            ("finished_blocks", FINISHED_BLOCKS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r:.60} is none of {', '.join(known)}")
        if self.rope_scaling is not None:
            _check_scaling(self.rope_scaling)


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    """Whether it is a number above 0 that is one in float32 too."""
    return _is_number(value, int | float) and 1e-37 < value < 1e38


def _check_scaling(scaling: Any) -> None:
    """Raises `ValueError` for a scaling of rotary positions that is unknown or lacks a number."""
    kind = scaling.get("rope_type") if isinstance(scaling, dict) else None
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        raise ValueError(
            f"rope_scaling of type {kind!r:.60} is none that the denoiser does: it may be null, "
            f"{', '.join(ROPE_SCALINGS)} (others depend on the length of the text)"
        )
    for key in ROPE_SCALINGS[kind]:
        value = scaling.get(key)
        if not _is_positive(value):
            raise ValueError(
                f"rope_scaling of type '{kind}' needs a number above 0 as {key}, not {value!r:.60}"
            )


def tensor_shapes(config: DenoiserConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a denoiser by its name, in the order of its modules; a tied head too."""
    c = config
    width, queries, keys = (
        c.hidden_size,
        c.num_attention_heads * c.head_dim,
        c.num_key_value_heads * c.head_dim,
    )
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (width,)}
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        layer[f"self_attn.{name}.weight"] = (rows, width)
        if c.qkv_bias:
            layer[f"self_attn.{name}.bias"] = (rows,)
    layer["self_attn.o_proj.weight"] = (width, queries)
    if c.qk_norm:
        layer |= {"self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,)}
    layer["post_attention_layernorm.weight"] = (width,)
    for name in ("gate_proj", "up_proj"):
        layer[f"mlp.{name}.weight"] = (c.intermediate_size, width)
    layer["mlp.down_proj.weight"] = (width, c.intermediate_size)
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c.vocab_size, width)}
    for n in range(c.num_hidden_layers):
        found |= {f"layers.{n}.{name}": shape for name, shape in layer.items()}
    return found | {"norm.weight": (width,), "lm_head.weight": (c.vocab_size, width)}
