"""The architecture as numbers: its config, and the names and shapes of its tensors."""

from dataclasses import dataclass, fields
from typing import Any, get_args

from dlm_rag.model.attention_patterns import AttentionPattern

EVIDENCE_LAYOUTS = ("joint", "prefix", "independent")
BLOCK_GRIDS = ("prompt", "canvas")
# what they see: `evidence/prompt_segments.py`
FINISHED_BLOCKS = ("recompute", "no_evidence", "append", "frozen")
# Kinds of scaled rotary positions, with the numbers that each needs; others depend on the text's length.
ROPE_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
ROUTER_SCORE_FUNCTIONS = ("softmax", "sigmoid")
GROUPED_MATMUL_MULTIPLE = 8  # numbers: grouped matrix products want rows of whole 16 bytes


@dataclass(frozen=True)
class ExpertsConfig:
    """Many feed-forward nets in place of one, of which each token takes a few; in public configs' names."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0  # of the one that all tokens take too; 0: there is none
    first_k_dense_replace: int = 0  # layers at the bottom that have one net for all
    score_function: str = "softmax"  # of the router
    expert_bias: bool = False  # added to the scores for the choice, not for what the chosen count
    n_group: int = 1  # experts stand in so many groups, and are chosen from the best `topk_group`
    topk_group: int = 1
    norm_topk_prob: bool = False  # what the chosen count comes to 1
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_fields(self, shared_intermediate_size=0, first_k_dense_replace=0)
        if self.score_function not in ROUTER_SCORE_FUNCTIONS:
            raise ValueError(
                f"score_function={self.score_function!r:.60} is none of {', '.join(ROUTER_SCORE_FUNCTIONS)}"
            )
        if self.num_experts % self.n_group:
            raise ValueError(f"n_group={self.n_group} must divide num_experts={self.num_experts}")
        if self.n_group > 1 and self.num_experts < 2 * self.n_group:
            raise ValueError(f"n_group={self.n_group} leaves groups of less than 2 experts")
        if self.topk_group > self.n_group:
            raise ValueError(f"topk_group={self.topk_group} is more than n_group={self.n_group}")
        choice = self.num_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > choice:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is more than the {choice} experts that a "
                "token may choose from"
            )
        if self.moe_intermediate_size % GROUPED_MATMUL_MULTIPLE:
            raise ValueError(
                f"moe_intermediate_size={self.moe_intermediate_size} is no multiple of "
                f"{GROUPED_MATMUL_MULTIPLE}"
            )


@dataclass(frozen=True)
class UniformNoiseConfig:
    """How a canvas of uniform noise is denoised, as the checkpoint says; see `DecodeConfig` for each."""

    steps: int
    entropy_bound: float
    temperature_high: float
    temperature_low: float
    convergence_steps: int
    stop_entropy: float


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
    partial_rotary_factor: float = 1.0  # of each head so much is turned by positions, its first numbers
    qk_norm: bool = False
    qkv_bias: bool = False
    tie_word_embeddings: bool = False
    experts: ExpertsConfig | None = None
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
    block_size: int | None = None
    block_grid: str = "canvas"
    # What a family's layers hide otherwise, one pattern a layer (None: nothing); empty: all see all. Only a
    # family's file sets it: it is not written to config.json.
    attention_patterns: tuple[AttentionPattern | None, ...] = ()
    # As in DecodeConfig, where the config names none; `policy_head` where heads lie beside the weights.
    finished_block_context: str = "recompute"
    commit_rule: str = "threshold"
    retrieval_gate: str = "always"
    # Of a model that denoises from uniform noise; None: from masks. Its canvas is a block of ours.
    noise: UniformNoiseConfig | None = None

    def __post_init__(self) -> None:
        _check_fields(self, mask_token_id=0, block_length=0)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even")
        if self.partial_rotary_factor > 1 or not self.rotary_dim or self.rotary_dim % 2:
            raise ValueError(
                f"partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} must be "
                "an even number of at least 2"
            )
        if self.experts is not None and self.hidden_size % GROUPED_MATMUL_MULTIPLE:
            raise ValueError(
                f"hidden_size={self.hidden_size} is no multiple of {GROUPED_MATMUL_MULTIPLE}, as experts "
                "need"
            )
        if self.mask_token_id is not None and self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id={self.mask_token_id} is outside the vocabulary")
        for name, known in (
            ("evidence_layout", EVIDENCE_LAYOUTS),
            ("block_grid", BLOCK_GRIDS),
            ("finished_block_context", FINISHED_BLOCKS),
            ("commit_rule", ("threshold", "policy_head", "entropy_bound")),
            ("retrieval_gate", ("always", "policy_head")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r:.60} is none of {', '.join(known)}")
        if len(self.attention_patterns) not in (0, self.num_hidden_layers):
            raise ValueError(
                f"attention_patterns must have one entry for each of {self.num_hidden_layers} layers"
            )
        if self.attention_patterns and (self.block_size or self.evidence_layout != "joint"):
            raise ValueError("attention_patterns need evidence_layout=joint and no block_size")
        if self.rope_scaling is not None:
            _check_scaling(self.rope_scaling)
            if self.rotary_dim < self.head_dim:
                raise ValueError("rope_scaling is done only where partial_rotary_factor is 1")

    @property
    def rotary_dim(self) -> int:
        """Numbers of each head that positions turn."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def dense_layers(self) -> int:
        """Layers at the bottom that have one feed-forward net for all tokens."""
        own = self.num_hidden_layers
        return own if self.experts is None else min(self.experts.first_k_dense_replace, own)


def _check_fields(config: Any, **lowest: int) -> None:
    """Raises `ValueError` for a field of a wrong type, or a number below its `lowest`, else 1."""
    for item in fields(config):
        value = getattr(config, item.name)
        kind, *others = get_args(item.type) or (item.type,)
        if value is None and others:
            continue
        given = f"{item.name}={value!r:.60}"
        if kind is bool and not isinstance(value, bool):
            raise ValueError(f"{given} must be true or false")
        low = lowest.get(item.name, 1)
        if kind is int and (not _is_number(value, int) or value < low):
            raise ValueError(f"{given} must be a whole number of at least {low}")
        if kind is float and not _is_positive(value):
            raise ValueError(f"{given} must be a number above 0 that float32 can hold")


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


def list_tensor_shapes(config: DenoiserConfig) -> dict[str, tuple[int, ...]]:
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
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c.vocab_size, width)}
    dense, sparse = _feed_forward("mlp", width, c.intermediate_size), _sparse_shapes(c.experts, width)
    for n in range(c.num_hidden_layers):
        shapes = layer | (dense if n < c.dense_layers else sparse)
        found |= {f"layers.{n}.{name}": shape for name, shape in shapes.items()}
    return found | {"norm.weight": (width,), "lm_head.weight": (c.vocab_size, width)}


def _feed_forward(name: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    inward = {f"{name}.{part}.weight": (inner, width) for part in ("gate_proj", "up_proj")}
    return {**inward, f"{name}.down_proj.weight": (width, inner)}


def _sparse_shapes(experts: ExpertsConfig | None, width: int) -> dict[str, tuple[int, ...]]:
    """Of the experts of a layer and what chooses among them."""
    if experts is None:
        return {}
    count, inner = experts.num_experts, experts.moe_intermediate_size
    found: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (count, width)}
    if experts.expert_bias:
        found["mlp.gate.expert_bias"] = (count,)
    found |= {
        "mlp.experts.gate_up_proj": (count, 2 * inner, width),
        "mlp.experts.down_proj": (count, width, inner),
    }
    shared = experts.shared_intermediate_size
    return found | (_feed_forward("mlp.shared_experts", width, shared) if shared else {})
