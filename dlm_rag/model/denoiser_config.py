"""The architecture as numbers: its config, and the names and shapes of its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from dlm_rag.model.evidence_layouts import EVIDENCE_LAYOUTS

# Who sees whom inside a row, of tensors that broadcast: (query position, key position, key segment) ->
# whether the query sees the key. Positions count from the first token of the prompt; the segment is 0 in
# the prompt and 1 in the canvas. Blocks of tokens have a faster form of their own: `Segment.block`.
AttentionPattern = Callable[[Any, Any, Any], Any]
BLOCK_GRIDS = ("prompt", "canvas")
# what they see: `evidence/prompt_segments.py`
FINISHED_BLOCKS = ("recompute", "no_evidence")
# Kinds of scaled rotary positions, with the numbers that each needs; others depend on the text's length.
ROPE_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
ROUTER_SCORE_FUNCTIONS = ("softmax", "sigmoid")
CHOICES = {
    "evidence_layout": tuple(EVIDENCE_LAYOUTS), "block_grid": BLOCK_GRIDS,
    "finished_block_context": FINISHED_BLOCKS, "retrieval_gate": ("always", "policy_head"),
    "commit_rule": ("threshold", "policy_head", "entropy_bound"),
}  # fmt: skip
GROUPED_MATMUL_MULTIPLE = 8  # numbers: grouped matrix products take rows of a multiple of 16 bytes


@dataclass(frozen=True)
class ExpertsConfig:
    """Many feed-forward nets in place of one, a few for each token; names as in public configs."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0  # of the one that all tokens take too; 0: there is none
    first_k_dense_replace: int = 0  # layers at the bottom that have one net for all
    score_function: str = "softmax"  # of the router
    expert_bias: bool = False  # added to the scores for the choice, not to the weights of the chosen
    n_group: int = 1  # groups of experts; the best `topk_group` are chosen from
    topk_group: int = 1
    norm_topk_prob: bool = False  # the weights of the chosen sum to 1
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        known = {"score_function": ROUTER_SCORE_FUNCTIONS}
        _check_fields(self, known, shared_intermediate_size=0, first_k_dense_replace=0)
        count, groups, chosen = self.num_experts, self.n_group, self.num_experts_per_tok
        _require(count % groups == 0, f"n_group={groups} must divide num_experts={count}")
        _require(
            groups == 1 or count >= 2 * groups, f"n_group={groups} leaves groups of less than 2 experts"
        )
        _require(self.topk_group <= groups, f"topk_group={self.topk_group} is more than n_group={groups}")
        choice = count // groups * self.topk_group
        _require(chosen <= choice, f"num_experts_per_tok={chosen} is more than the {choice} to choose from")
        _require_multiple("moe_intermediate_size", self.moe_intermediate_size)


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
    partial_rotary_factor: float = 1.0  # share of each head that positions turn, its first numbers
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
    # As in DecodeConfig, where the config names none; `policy_head` if the folder holds heads.
    finished_block_context: str = "recompute"
    commit_rule: str = "threshold"
    retrieval_gate: str = "always"
    # Of a model that denoises from uniform noise; None: from masks. Its canvas is a block of ours.
    noise: UniformNoiseConfig | None = None

    def __post_init__(self) -> None:
        _check_fields(self, CHOICES, mask_token_id=0, block_length=0)
        heads, kv_heads, mask = self.num_attention_heads, self.num_key_value_heads, self.mask_token_id
        _require(
            heads % kv_heads == 0, f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}"
        )
        _require(self.head_dim % 2 == 0, f"head_dim={self.head_dim} must be even")
        share = f"partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim}"
        valid = self.partial_rotary_factor <= 1 and self.rotary_dim >= 2 and self.rotary_dim % 2 == 0
        _require(valid, f"{share} must be an even number of at least 2")
        if self.experts is not None:
            _require_multiple("hidden_size", self.hidden_size)
        _require(mask is None or mask < self.vocab_size, f"mask_token_id={mask} is outside the vocabulary")
        if patterns := len(self.attention_patterns):
            _require(
                patterns == self.num_hidden_layers,
                f"attention_patterns has {patterns} entries, not one a layer",
            )
            joint = not self.block_size and EVIDENCE_LAYOUTS[self.evidence_layout].runs_with_canvas
            _require(joint, "attention_patterns need evidence_layout=joint and no block_size")
        if self.rope_scaling is not None:
            _check_scaling(self.rope_scaling)
            _require(self.rotary_dim == self.head_dim, "rope_scaling needs partial_rotary_factor=1")

    @property
    def rotary_dim(self) -> int:
        """Numbers of each head that positions turn."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def dense_layers(self) -> int:
        """Layers at the bottom that have one feed-forward net for all tokens."""
        own = self.num_hidden_layers
        return own if self.experts is None else min(self.experts.first_k_dense_replace, own)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _require_multiple(name: str, value: int) -> None:
    unit = GROUPED_MATMUL_MULTIPLE
    _require(value % unit == 0, f"{name}={value} must be a multiple of {unit} where there are experts")


def _check_fields(config: Any, choices: Mapping[str, tuple[str, ...]], **lowest: int) -> None:
    """Raises `ValueError` for a wrong type, an unknown choice, a number below its `lowest` (else 1)."""
    for item in fields(config):
        value = getattr(config, item.name)
        kind, *others = get_args(item.type) or (item.type,)
        if value is None and others:
            continue
        given, low = f"{item.name}={value!r:.60}", lowest.get(item.name, 1)
        if item.name in choices:
            known = choices[item.name]
            _require(value in known, f"{given} must be one of {', '.join(known)}")
        elif kind is bool:
            _require(isinstance(value, bool), f"{given} must be true or false")
        elif kind is int:
            valid = isinstance(value, int) and not isinstance(value, bool) and value >= low
            _require(valid, f"{given} must be a whole number of at least {low}")
        elif kind is float:
            _require(_is_positive(value), f"{given} must be a number above 0 that float32 can hold")


def _is_positive(value: Any) -> bool:
    """Whether it is a number above 0, also in float32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-37 < value < 1e38


def _check_scaling(scaling: Any) -> None:
    """Raises `ValueError` for a scaling of rotary positions that is unknown or incomplete."""
    kind = scaling.get("rope_type") if isinstance(scaling, dict) else None
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        raise ValueError(
            f"rope_scaling of type {kind!r:.60} is not supported (null, {', '.join(ROPE_SCALINGS)} are; "
            "others depend on the length of the text)"
        )
    for key in ROPE_SCALINGS[kind]:
        given = f"rope_scaling: {key}={scaling.get(key)!r:.60}"
        _require(_is_positive(scaling.get(key)), f"{given} must be a number above 0 that float32 can hold")
