"""The architecture as numbers, rotary frequencies, and the layouts of evidence.

Layouts say where the tokens of a prompt stand, and what stays valid when the evidence changes:

    joint         the prompt runs with the canvas: every token sees every other
    prefix        the prompt sees itself alone: valid until any passage of it changes
    independent   so does each passage, from position 0, and the question, from `passage_length`: a passage
                  is valid wherever it ranks and whatever the others are, and is cut to `passage_length`

In all of them the canvas sees the whole prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Gt, Lt
from pydantic import ConfigDict, GetPydanticSchema, Strict
from pydantic.dataclasses import dataclass
from pydantic_core.core_schema import literal_schema

from dlm_rag.config.sections import list_ruled_out
from dlm_rag.errors import ConfigError

PlacedTokens = tuple[Sequence[int], int]  # ids, and the position of the first


class EvidenceLayout(NamedTuple):
    """A layout of evidence.

    place: a `tokenizer.Prompt` and `passage_length` to the segments that see themselves alone, in the order
    in which the canvas sees them; empty ones are left out, the last one holds the question.
    runs_with_canvas: whether the last one runs at every step, with the canvas, and sees it.
    separate_passages: whether the segment of a passage depends on that alone: it stays valid when others
    change, is cut to `passage_length`, and its fact has no number.
    """

    place: Callable[[Any, int], Sequence[PlacedTokens]]
    runs_with_canvas: bool = False
    separate_passages: bool = False


def place_whole_prompt(prompt: Any, passage_length: int) -> list[PlacedTokens]:
    return [(prompt.ids, 0)]


def place_passages_apart(prompt: Any, passage_length: int) -> list[PlacedTokens]:
    """Each passage from position 0, then the question after the longest of them."""
    return [*((fact, 0) for fact in prompt.facts), (prompt.head + prompt.tail, passage_length)]


EVIDENCE_LAYOUTS = {
    "joint": EvidenceLayout(place_whole_prompt, runs_with_canvas=True),
    "prefix": EvidenceLayout(place_whole_prompt),
    "independent": EvidenceLayout(place_passages_apart, separate_passages=True),
    "parallel": EvidenceLayout(place_passages_apart, runs_with_canvas=True, separate_passages=True),
}


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
        _require(count % groups == 0, f"n_group={groups} must divide num_experts={count}")
        _require(groups == 1 or count >= 2 * groups, f"n_group={groups} leaves groups of a single expert")
        _require(best <= groups, f"topk_group={best} is more than n_group={groups}")
        _require(chosen <= choice, f"num_experts_per_tok={chosen} is more than the {choice} to choose from")
        if most:
            fits = f"must be from num_experts_per_tok={chosen} to num_experts={count}"
            _require(groups == 1, f"expert_capacity={most} needs n_group=1")
            _require(chosen <= most <= count, f"expert_capacity={most} {fits}")
        _require_multiple("moe_intermediate_size", self.moe_intermediate_size)


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
        shared = heads % kv_heads == 0
        _require(shared, f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}")
        _require(self.head_dim % 2 == 0, f"head_dim={self.head_dim} must be even")
        _require(even, f"partial_rotary_factor={share} of head_dim={self.head_dim} must be an even number")
        _require(mask is None or mask < self.vocab_size, f"mask_token_id={mask} is outside the vocabulary")
        known = max(self.excluded_token_ids, default=0) < self.vocab_size
        _require(known, f"excluded tokens {self.excluded_token_ids} are not in the vocabulary")
        fits = not self.causal_context or (self.block_size is not None and self.block_grid == "canvas")
        _require(fits, "causal_context needs a block_size and block_grid=canvas")
        if self.experts is not None:
            routed = not self.experts.expert_capacity or self.routes_blocks
            _require_multiple("hidden_size", self.hidden_size)
            _require(routed, "expert_capacity needs a block_size")
        if self.rope_scaling is not None:
            _check_scaling(self.rope_scaling)
            _require(turned == self.head_dim, "rope_scaling needs partial_rotary_factor=1")

    def add_settings(self, decode: Mapping[str, Any], **retrieval: Any) -> "DenoiserConfig":
        """The config with more settings of `decode` and `retrieval`, in place of what these rule out."""
        shape = {own: decode[name] for name, own in SHAPE_FIELDS.items() if decode.get(name) is not None}
        rest = {name: value for name, value in decode.items() if name not in SHAPE_FIELDS}
        own = {k: v for k, v in self.decode_settings.items() if k not in list_ruled_out(decode)}
        return replace(
            self, **shape, decode_settings=own | rest,
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

    @cached_property
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

    @cached_property
    def dense_layers(self) -> int:
        """Layers at the bottom that have one feed-forward net for all tokens."""
        dense = self.num_hidden_layers if self.experts is None else self.experts.first_k_dense_replace
        return min(dense, self.num_hidden_layers)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _require_multiple(name: str, value: int) -> None:
    unit = GROUPED_MATMUL_MULTIPLE
    _require(value % unit == 0, f"{name}={value} must be a multiple of {unit} where there are experts")


def _check_scaling(scaling: dict[str, Any]) -> None:
    """Raises `ConfigError` for a scaling of rotary positions that is unknown or incomplete."""
    kind = str(scaling.get("rope_type", scaling.get("type")))
    known = f"null, {', '.join(ROPE_SCALINGS)} are; others depend on the length of the text"
    _require(kind in ROPE_SCALINGS, f"rope_scaling of type {kind!r:.60} is not supported ({known})")
    needed = (QUERY_SCALE_KEY, "original_max_position_embeddings") if QUERY_SCALE_KEY in scaling else ()
    for key in (*ROPE_SCALINGS[kind], *needed):
        value = scaling.get(key)
        holds = isinstance(value, int | float) and not isinstance(value, bool) and 1e-37 < value < 1e38
        _require(holds, f"rope_scaling: {key}={value!r:.60} must be a number above 0 that float32 can hold")


def compute_rope_frequencies(config: DenoiserConfig) -> tuple[Any, float]:
    """Inverse frequencies (`rotary_dim` / 2,) in float32 and the gain on cos and sin, on the CPU."""
    import torch

    scaling = {key: value for key, value in (config.rope_scaling or {}).items() if key != QUERY_SCALE_KEY}
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        steps = torch.arange(0, config.rotary_dim, 2, device="cpu").float() / config.rotary_dim
        return 1.0 / config.rope_theta**steps, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    llama = LlamaConfig(
        hidden_size=config.num_attention_heads * config.head_dim, head_dim=config.head_dim,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={**scaling, "rope_theta": config.rope_theta},
    )  # fmt: skip
    with torch.device("cpu"):  # the caller may be building on the meta device
        frequencies, gain = ROPE_INIT_FUNCTIONS[kind](llama, torch.device("cpu"))
    return frequencies.float(), float(gain)
