"""The layers of the denoiser: attention's projections, rotary positions, feed-forward nets and experts.

Shapes: T packed tokens, H heads, Hk key-value heads, D head width, W model width, E experts, k a token.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dlm_rag.model.attention import compute_attention
from dlm_rag.model.denoiser_config import QUERY_SCALE_KEY, DenoiserConfig, ExpertsConfig
from dlm_rag.model.packed_batch import AttentionMetadata, PackedRows

# cos, and sin that is negative in the first half, each (T, 1, D or what is turned of it), float32; behind
# them those of queries, where they differ.
Rope = tuple[Tensor, ...]


def is_autocast(x: Tensor) -> bool:
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)


def get_compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products of `x` are computed: that of autocast where it is on, else its own."""
    return torch.get_autocast_dtype(x.device.type) if is_autocast(x) else x.dtype


class _Uninitialised:
    """Gets its weights later; on the meta device, torch's own ones import its compiler for 1.5 seconds."""

    def reset_parameters(self) -> None: ...


class Linear(_Uninitialised, nn.Linear): ...


class Embedding(_Uninitialised, nn.Embedding): ...


class RMSNorm(nn.RMSNorm):
    """In the wider dtype of input and gains, which autocast may make differ: torch's kernel wants one."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        return F.rms_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps)


class Attention(nn.Module):
    """The projections of attention; who sees whom is decided in `PackedRows`."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        c, self.head_dim = config, config.head_dim
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, keys, c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, keys, c.qkv_bias)
        self.o_proj = Linear(queries, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=False)
        self.up_proj = Linear(width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Which experts a token goes to, and with which weights."""

    def __init__(self, experts: ExpertsConfig, width: int) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts.num_experts, width))
        self.expert_bias = None
        if experts.expert_bias:  # moved by how busy the experts are, never by gradients
            self.expert_bias = nn.Parameter(torch.empty(experts.num_experts), requires_grad=False)

    def forward(self, x: Tensor, blocks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x (T, W) -> the weight of each chosen expert, float32, and their numbers; both (T, k).

        blocks: (T,) the number of each token's block, which has an `expert_capacity`.
        """
        e = self.experts
        # As in the public code: sigmoids are float32 from the weights on, softmax from their sums on.
        if e.score_function == "sigmoid":
            with torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext():
                scores = F.linear(x.float(), self.weight.float()).sigmoid()
        else:
            scores = F.linear(x, self.weight).softmax(dim=-1, dtype=torch.float32)
        preferred = scores if self.expert_bias is None else scores + self.expert_bias
        if blocks is not None:  # a row for each possible one: the host does not wait for their number
            best = torch.full_like(preferred, -torch.inf)
            best = best.scatter_reduce(0, blocks[:, None].expand_as(best), preferred, "amax")
            kept = torch.zeros_like(best).scatter(1, best.topk(e.expert_capacity, dim=-1).indices, 1.0)
            preferred = preferred.masked_fill(~kept.bool()[blocks], -torch.inf)
        if e.n_group > 1:  # the groups whose two best experts are best together
            grouped = rearrange(preferred, "tokens (group expert) -> tokens group expert", group=e.n_group)
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(e.topk_group, dim=-1).indices
            kept = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1.0).bool()
            preferred = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        chosen = preferred.topk(e.num_experts_per_tok, dim=-1).indices
        counts = scores.gather(1, chosen)
        if e.norm_topk_prob:
            counts = counts / (counts.sum(-1, keepdim=True) + 1e-20)
        return counts * e.routed_scaling_factor, chosen


def grouped_matmul(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows of x (n, in), up to its entry in `ends` (E,), times its weights (E, out, in)."""
    low = get_compute_dtype(weights)  # autocast does this only for other products
    x, weights = x.to(low), weights.to(low)
    if (x.is_cuda and x.dtype != torch.bfloat16) or x.device.type not in ("cpu", "cuda"):
        return multiply_by_expert(x, [partial(F.linear, weight=weight) for weight in weights], ends)
    return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)


def multiply_by_expert(x: Tensor, experts: Iterable[Callable[[Tensor], Tensor]], ends: Tensor) -> Tensor:
    """As `grouped_matmul`, one expert after another: the host waits for the counts of tokens."""
    parts = x.tensor_split(ends[:-1].long().cpu())
    return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])


class ExpertStack(nn.Module):
    """The weights of all experts of a layer, stacked."""

    matmul_by_expert: Callable[..., Tensor] = staticmethod(grouped_matmul)

    def __init__(self, experts: ExpertsConfig, width: int) -> None:
        super().__init__()
        count, inner = experts.num_experts, experts.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x (n, W), sorted by expert, each expert's tokens up to its entry in `ends` (E,) -> the same."""
        gate, up = self.matmul_by_expert(x, self.gate_up_proj, ends).chunk(2, dim=-1)
        return self.matmul_by_expert(F.silu(gate) * up, self.down_proj, ends)


class MixtureOfExperts(nn.Module):
    def __init__(self, experts: ExpertsConfig, width: int) -> None:
        super().__init__()
        self.gate = Router(experts, width)
        self.experts = ExpertStack(experts, width)
        shared = experts.shared_intermediate_size
        self.shared_experts = FeedForward(width, shared) if shared else None

    def forward(self, x: Tensor, blocks: Tensor | None = None) -> Tensor:
        """x (T, W) -> the weighted sum of the chosen experts, in float32; the host does not wait."""
        counts, chosen = self.gate(x, blocks)
        sent, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(len(self.gate.weight), device=x.device)
        ends = torch.searchsorted(sent, numbers, right=True, out_int32=True)
        made = self.experts(x[order // chosen.shape[1]], ends)
        back = torch.empty_like(made).index_copy(0, order, made).unflatten(0, chosen.shape)
        mixed = (back * counts[..., None]).sum(1).to(x.dtype)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(x)


@dataclass
class AttentionProbe:
    """Queries and keys of one layer of a call, kept for a look at its attention."""

    layer: int
    queries: Tensor | None = None  # (T, H, D)
    keys: Tensor | None = None  # (Tk, Hk, D), row by row
    sight: AttentionMetadata | None = None


@dataclass(frozen=True)
class ForwardContext:
    """What all layers of one call share."""

    rows: PackedRows
    backend: str
    probe: AttentionProbe | None = None


class TransformerLayer(nn.Module):
    def __init__(self, config: DenoiserConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.input_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.mlp: nn.Module
        if config.experts is not None and layer >= config.dense_layers:
            self.mlp = MixtureOfExperts(config.experts, width)
        else:
            self.mlp = FeedForward(width, config.intermediate_size)
        self.routes_blocks = config.routes_blocks and layer >= config.dense_layers

    def forward(
        self, x: Tensor, rope: Rope, call: ForwardContext, layer: int, last: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, W) -> the same tokens one layer on, in the `last` layer those that are read (n, W); and the
        keys and values of all of them, each (T, Hk, D)."""
        rows, sight, read = call.rows, call.rows.attention_metadata, None
        if last and rows.last_layer_metadata is not sight:
            sight, read = rows.last_layer_metadata, rows.output_indices
        x, q, k, v = self.project_qkv(x, rope, read)
        if not len(x):
            if not torch.is_grad_enabled():
                return x, k, v
            # Processes sum the gradients of all weights: those of a part that hides nothing are zeros.
            return self.apply_attention_output(x, q + 0 * (k.sum() + v.sum())), k, v
        blocks = rows.attention_blocks if self.routes_blocks else None
        seen_k, seen_v = rows.gather_keys_values(k, v, layer)
        if (probe := call.probe) is not None and probe.layer == layer:
            probe.queries, probe.keys, probe.sight = q, seen_k, sight
        attended = compute_attention(q, seen_k, seen_v, sight, call.backend)
        return self.apply_attention_output(x, attended, blocks), k, v

    def project_qkv(self, x: Tensor, rope: Rope, read: Tensor | None) -> tuple[Tensor, ...]:
        """The tokens that go on (n, W), their queries (n, H, D), all keys and values, each (T, Hk, D)."""
        own, heads, normed = self.self_attn, (-1, self.self_attn.head_dim), self.input_layernorm(x)
        k, v = own.k_proj(normed).unflatten(-1, heads), own.v_proj(normed).unflatten(-1, heads)
        k = apply_rope(own.k_norm(k), rope).to(k.dtype)
        if read is not None:
            x, normed, rope = x[read], normed[read], tuple(part[read] for part in rope)
        q = own.q_proj(normed).unflatten(-1, heads)
        return x, apply_rope(own.q_norm(q), rope[-2:]).to(q.dtype), k, v

    def apply_attention_output(self, x: Tensor, attended: Tensor, blocks: Tensor | None = None) -> Tensor:
        """What follows it: attended (n, H, D) comes in, then the feed-forward."""
        x = x + self.self_attn.o_proj(attended.flatten(1))
        normed = self.post_attention_layernorm(x)
        return x + (self.mlp(normed) if blocks is None else self.mlp(normed, blocks))


class TransformerWeights(nn.Module):
    """All modules with weights of a denoiser; its `state_dict` has our names of tensors."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(TransformerLayer(config, layer) for layer in layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)


def list_tensor_shapes(config: DenoiserConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a denoiser's checkpoint by its name; a tied head is left out."""
    with torch.device("meta"):
        weights = TransformerWeights(config).state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return {name: tuple(value.shape) for name, value in weights.items()}


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotary positions (Su et al. 2021) on x (T, H, D), the halves of D paired, in float32."""
    cos, sin, *_ = rope
    if (turned := cos.shape[-1]) < x.shape[-1]:  # of a wider head the first numbers are
        return torch.cat((apply_rope(x[..., :turned], rope), x[..., turned:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return (x * cos).add_(torch.cat((second, first), dim=-1) * sin).to(x.dtype)


def compute_rope_frequencies(config: DenoiserConfig) -> tuple[Tensor, float]:
    """Inverse frequencies (`rotary_dim` / 2,) in float32 and the gain on cos and sin, on the CPU."""
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
