"""The architecture as numbers: its config, and the names and shapes of its tensors."""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any

from annotated_types import Ge, Gt, Lt
from pydantic import ConfigDict, GetPydanticSchema, Strict
from pydantic.dataclasses import dataclass
from pydantic_core.core_schema import literal_schema

from dlm_rag.errors import ConfigError
from dlm_rag.model.evidence_layouts import EVIDENCE_LAYOUTS

# Kinds of scaled rotary positions, with the numbers that each needs; others depend on the text's length.
ROPE_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
QUERY_SCALE_KEY = "llama_4_scaling_beta"  # queries grow with the logarithm of the position
# Settings of `decode` that are fields of the architecture, by which training goes too.
SHAPE_FIELDS = {
    "max_new_tokens": "canvas_length", "block_length": "block_length", "abstain": "abstain",
    "finished_block_context": "finished_block_context",
}  # fmt: skip
GROUPED_MATMUL_MULTIPLE = 8  # numbers: grouped matrix products take rows of a multiple of 16 bytes
Size = Annotated[int, Strict(), Ge(1)]
SizeOrZero = Annotated[int, Strict(), Ge(0)]
Real = Annotated[float, Strict(), Gt(1e-37), Lt(1e38)]  # which float32 can hold
Flag = Annotated[bool, Strict()]


def _one_of(*choices: str) -> GetPydanticSchema:
    """Checks as `Literal` does, for a field whose type is a text."""
    return GetPydanticSchema(lambda *_: literal_schema([*choices]))


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ExpertsConfig:
    """Many feed-forward nets in place of one, a few for each token; names as in public configs."""

    num_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    shared_intermediate_size: SizeOrZero = 0  # of the one that all tokens take too; 0: there is none
    first_k_dense_replace: SizeOrZero = 0  # layers at the bottom that have one net for all
    score_function: Annotated[str, _one_of("softmax", "sigmoid")] = "softmax"  # of the router
    expert_bias: Flag = False  # added to the scores for the choice, not to the weights of the chosen
    n_group: Size = 1  # groups of experts; the best `topk_group` are chosen from
    topk_group: Size = 1
    # Number of experts that a block of attention uses, those that one of its tokens scores highest, as in
    # LLaDA2.2; 0: all.
    expert_capacity: SizeOrZero = 0
    norm_topk_prob: Flag = False  # the weights of the chosen sum to 1
    routed_scaling_factor: Real = 1.0

    def __post_init__(self) -> None:
        count, groups, chosen = self.num_experts, self.n_group, self.num_experts_per_tok
        best, choice = self.topk_group, count // groups * self.topk_group
        most = self.expert_capacity
        _require(
            (count % groups == 0, f"n_group={groups} must divide num_experts={count}"),
            (groups == 1 or count >= 2 * groups, f"n_group={groups} leaves groups of less than 2 experts"),
            (best <= groups, f"topk_group={best} is more than n_group={groups}"),
            (chosen <= choice, f"num_experts_per_tok={chosen} is more than the {choice} to choose from"),
            (not most or groups == 1, f"expert_capacity={most} needs n_group=1"),
            (
                not most or chosen <= most <= count,
                f"expert_capacity={most} must be from num_experts_per_tok={chosen} to num_experts={count}",
            ),
            _is_multiple("moe_intermediate_size", self.moe_intermediate_size),
        )


@dataclass(frozen=True)
class DenoiserConfig:
    """The architecture, in Hugging Face's names where they exist; it travels in `config.json`."""

    vocab_size: Size
    hidden_size: Size = 128
    num_hidden_layers: Size = 4
    num_attention_heads: Size = 4
    num_key_value_heads: Size = 4
    head_dim: Size = 32
    intermediate_size: Size = 352
    max_position_embeddings: Size = 4096
    rms_norm_eps: Real = 1e-6
    rope_theta: Real = 10000.0
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: Real = 1.0  # share of each head that positions turn, its first numbers
    qk_norm: Flag = False
    qkv_bias: Flag = False
    tie_word_embeddings: Flag = False
    experts: ExpertsConfig | None = None
    mask_token_id: SizeOrZero | None = None
    excluded_token_ids: tuple[SizeOrZero, ...] = ()  # never proposed, as the mask: LLaDA2.2's edit tokens
    # True where the network's row i predicts token i + 1 (autoregressive ancestry: Dream, Qwen).
    # The denoiser un-shifts its output, so that logits[:, i] always predicts token i.
    shifted: Flag = False
    evidence_layout: Annotated[str, _one_of(*EVIDENCE_LAYOUTS)] = "joint"
    # `independent` only: positions 0 to passage_length - 1 belong to each passage, the question
    # follows. A longer passage is cut.
    passage_length: Size = 512
    canvas_length: Size = 100  # response positions where the config names no other number
    block_length: SizeOrZero | None = None  # as in DecodeConfig, where the config names none
    # Who sees whom. None: every token every other; n: blocks of n tokens see themselves and what is before
    # (1: causal), counted from the first token of the prompt (SDAR, LLaDA2, Fast-dLLM v2) or of the canvas.
    block_size: Size | None = None
    block_grid: Annotated[str, _one_of("prompt", "canvas")] = "canvas"
    # Of a model trained in both ways, with one head: tokens before the current block see only themselves
    # and what is before them, and the state of the last of them predicts the first token of the block. With
    # blocks of 1 that is an autoregressive model.
    causal_context: Flag = False
    # These as in DecodeConfig, where the config names none.
    finished_block_context: Annotated[str, _one_of("recompute", "no_evidence")] = "recompute"
    abstain: Annotated[str, _one_of("never", "answer", "response")] = "never"

    # Settings of `decode` and `retrieval` that the family or the checkpoint's generation_config.json names;
    # not in config.json.
    decode_settings: dict[str, Any] = field(default_factory=dict)
    retrieval_settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        heads, kv_heads, mask = self.num_attention_heads, self.num_key_value_heads, self.mask_token_id
        share, turned = self.partial_rotary_factor, self.rotary_dim
        even = share <= 1 and turned >= 2 and turned % 2 == 0
        _require(
            (
                not heads % kv_heads,
                f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}",
            ),
            (self.head_dim % 2 == 0, f"head_dim={self.head_dim} must be even"),
            (even, f"partial_rotary_factor={share} of head_dim={self.head_dim} must be an even number"),
            (mask is None or mask < self.vocab_size, f"mask_token_id={mask} is outside the vocabulary"),
            (
                all(token < self.vocab_size for token in self.excluded_token_ids),
                f"excluded tokens {self.excluded_token_ids} are not in the vocabulary",
            ),
            (
                not self.causal_context or bool(self.block_size and self.block_grid == "canvas"),
                "causal_context needs a block_size, block_grid=canvas and shifted=false",
            ),
        )
        if self.experts is not None:
            routed = not self.experts.expert_capacity or self.routes_blocks
            _require(
                _is_multiple("hidden_size", self.hidden_size),
                (routed, "expert_capacity needs a block_size"),
            )
        if self.rope_scaling is not None:
            _check_scaling(self.rope_scaling)
            _require((turned == self.head_dim, "rope_scaling needs partial_rotary_factor=1"))

    def add_settings(self, decode: Mapping[str, Any], **retrieval: Any) -> "DenoiserConfig":
        """The config with more settings of `decode` and `retrieval` as its own."""
        shape = {
            field: decode[name] for name, field in SHAPE_FIELDS.items() if decode.get(name) is not None
        }
        rest = {name: value for name, value in decode.items() if name not in SHAPE_FIELDS}
        return replace(
            self, **shape, decode_settings=self.decode_settings | rest,
            retrieval_settings=self.retrieval_settings | retrieval,
        )  # fmt: skip

    @property
    def adapter(self) -> Any:
        """The module that says how a model of another library's class decodes; None: a `Denoiser`."""
        return None

    @property
    def rotary_dim(self) -> int:
        """Numbers of each head that positions turn."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def routes_blocks(self) -> bool:
        """Whether the tokens of a block of attention share a choice of experts, as in LLaDA2.2."""
        return bool(self.experts is not None and self.experts.expert_capacity and self.block_size)

    @property
    def predicts_next_block(self) -> bool:
        """Whether the state before a block predicts its first token."""
        return self.shifted or self.causal_context

    @property
    def decode_modes(self) -> tuple[str, ...]:
        """The values of `decode.mode` that the model was trained for, first the one where none is named."""
        if not self.causal_context:
            return ("diffusion",)
        return ("autoregressive",) if self.block_size == 1 else ("diffusion", "autoregressive")

    @property
    def dense_layers(self) -> int:
        """Layers at the bottom that have one feed-forward net for all tokens."""
        own = self.num_hidden_layers
        return own if self.experts is None else min(self.experts.first_k_dense_replace, own)


def _require(*checks: tuple[bool, str]) -> None:
    """Raises `ConfigError` with the message of the first one that does not hold."""
    if wrong := [message for holds, message in checks if not holds]:
        raise ConfigError(wrong[0])


def _is_multiple(name: str, value: int) -> tuple[bool, str]:
    unit = GROUPED_MATMUL_MULTIPLE
    return value % unit == 0, f"{name}={value} must be a multiple of {unit} where there are experts"


def _check_scaling(scaling: dict[str, Any]) -> None:
    """Raises `ConfigError` for a scaling of rotary positions that is unknown or incomplete."""
    kind = str(scaling.get("rope_type"))
    known = f"null, {', '.join(ROPE_SCALINGS)} are; others depend on the length of the text"
    _require((kind in ROPE_SCALINGS, f"rope_scaling of type {kind!r:.60} is not supported ({known})"))
    needed = (QUERY_SCALE_KEY, "original_max_position_embeddings") if QUERY_SCALE_KEY in scaling else ()
    for key in (*ROPE_SCALINGS[kind], *needed):
        value = scaling.get(key)
        holds = isinstance(value, int | float) and not isinstance(value, bool) and 1e-37 < value < 1e38
        _require(
            (holds, f"rope_scaling: {key}={value!r:.60} must be a number above 0 that float32 can hold")
        )
