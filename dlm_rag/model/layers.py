"""The layers of the denoiser: projections, rotary positions, feed-forward nets, experts; and attention.

Shapes: T packed tokens, Tq of queries, Tk of keys; H heads, Hk key-value heads, D head width; W model
width; E experts, k a token.

Rows are packed without padding, so a question gets the same arithmetic alone and in a batch. Those that
need a mask run under SDPA on a CPU, which adds it, and under FlexAttention on a GPU: there SDPA would
compute grouped heads with a mask from whole matrices of scores. `indexed` has masks of its own.
No block tables: kernels want pages of 256 tokens, while a passage has about 100. Keys are gathered, but for
SDPA on a CPU, which reads rows one by one, and for `indexed`, which reads them where they are: it is ours,
and chosen by name alone until it has been measured on a GPU.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser_config import DenoiserConfig, ExpertsConfig
from dlm_rag.model.packed_batch import AttentionMetadata, PackedRows

log = logging.getLogger(__name__)

torch.backends.cuda.enable_cudnn_sdp(False)  # SDPA prefers it on Hopper, where it plans each new shape anew

FLASH_MODULE = "flash_attn.flash_attn_interface"
ATTENTION_BACKENDS = ("flash", "varlen", "sdpa")  # the first that works is taken
FLEX_MIN_HEAD_DIM = 16  # FlexAttention has no narrower heads on a GPU
FLEX_GRAPHS = 64  # of one process: lengths below and above a tile, one row or more, dtypes, with gradients
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


def compute_attention(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata, backend: str) -> Tensor:
    """Row r of `q` (Tq, H, D) attends to row r of `k`, `v` (Tk, Hk, D); returns (Tq, H, D).

    With `sight.key_places`, for sdpa and indexed, `k` and `v` are all that a memory holds, (tokens, Hk, D),
    and rows see the places that are theirs. `backend`: one of `choose_backend`'s.
    """
    if backend == "indexed":  # which has no backward
        backend = "sdpa" if torch.is_grad_enabled() and q.requires_grad else backend
    elif any(sight.partial_view_rows) and not sight.causal:
        backend = "sdpa"  # no other kernel takes a mask
    return _KERNELS[backend](q, k, v, sight)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata) -> Tensor:
    partial = sight.partial_view_rows or (False,) * len(sight.query_lengths)
    shapes = list(zip(sight.query_lengths, sight.key_lengths, partial, strict=True))
    seen_by_them: Iterable[tuple[Tensor, ...]]
    if sight.key_places is None:  # consecutive rows of equal lengths are one call
        runs = [(len(list(same)), *shape) for shape, same in groupby(shapes)]
        # Not slices: the gradient of each would be as long as all keys.
        lengths = [rows * seen for rows, _, seen, _ in runs]
        seen_by_them = zip(k.split(lengths), v.split(lengths), strict=True)
    else:
        runs, seen_by_them = [(1, *shape) for shape in shapes], _read_rows(k, v, sight)
    found, at, row, queries = [], 0, 0, q.split([rows * n for rows, n, _, _ in runs])
    for (rows, n, seen, bounded), own, seen_by_it in zip(runs, queries, seen_by_them, strict=True):
        run_q = own.unflatten(0, (rows, n)).transpose(1, 2)
        run_k, run_v = (x.unflatten(0, (rows, seen)).transpose(1, 2) for x in seen_by_it)
        if n and bounded and not sight.causal:
            assert sight.visible_counts is not None
            limits = sight.visible_counts[at : at + rows * n].view(rows, n)
            out = attend_masked(run_q, run_k, run_v, limits, sight.masks, row)
        else:
            causal = bounded and sight.causal
            out = F.scaled_dot_product_attention(run_q, run_k, run_v, is_causal=causal, enable_gqa=True)
        found.append(out.transpose(1, 2).flatten(0, 1))
        at, row = at + rows * n, row + rows
    return found[0] if len(found) == 1 else torch.cat(found)


def _read_rows(k: Tensor, v: Tensor, sight: AttentionMetadata) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of each row, one after another through the same small room, which stays in cache."""
    assert sight.key_places is not None
    room = k.new_empty((2, max(sight.key_lengths), *k.shape[1:]))
    for places, queries in zip(sight.key_places.split(sight.key_lengths), sight.query_lengths, strict=True):
        read = room[:, : len(places)]
        if queries:
            torch.index_select(k, 0, places, out=read[0])
            torch.index_select(v, 0, places, out=read[1])
        yield read[0], read[1]


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, limits: Tensor, masks: dict[Any, Any], name: Any
) -> Tensor:
    """Attention of q (rows, H, n, D), each to the first `limits` (rows, n) of its k, v (rows, Hk, m, D)."""
    flex = q.is_cuda and q.shape[-1] >= FLEX_MIN_HEAD_DIM
    if name not in masks:  # kept by name, for the other layers
        masks[name] = (build_flex_mask if flex else build_dense_mask)(limits, q, k)
    if flex:
        return attend_flex(q, k, v, masks[name])
    repeat = q.is_cuda and q.shape[1] > k.shape[1]  # with a mask SDPA's kernels take no grouped heads there
    if repeat:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, masks[name], enable_gqa=not repeat)


def build_dense_mask(limits: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """(rows, 1, n, m): 0 where a query sees a key, else minus infinity; all layers add it."""
    seen = torch.arange(k.shape[2], device=q.device) < limits[:, None, :, None]
    return q.new_full(seen.shape, float("-inf")).masked_fill_(seen, 0.0)


def build_flex_mask(limits: Tensor, q: Tensor, k: Tensor) -> Any:
    """The mask of FlexAttention, which knows the tiles that nobody or everybody sees."""

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < limits[row, query]

    return _import_flex(q.is_cuda)[0](is_seen, len(q), None, q.shape[2], k.shape[2], device=q.device)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """FlexAttention, compiled on a GPU; without its decoding kernel, which splits keys by the batch."""
    options = {"FORCE_USE_FLEX_ATTENTION": True} if q.is_cuda else None
    attend = _import_flex(q.is_cuda)[1]
    return attend(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)


@cache
def _import_flex(compiled: bool) -> tuple[Any, ...]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return create_block_mask, flex_attention
    # Beyond its limit torch runs what is left uncompiled, with whole matrices of scores.
    torch._dynamo.config.recompile_limit = max(FLEX_GRAPHS, torch._dynamo.config.recompile_limit)
    attend = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return torch.compile(create_block_mask, dynamic=True), attend


def _varlen(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata) -> Tensor:
    """A row is not split, which would depend on the others, where that can be said."""
    from torch.nn.attention.varlen import varlen_attn

    made, options = tuple(map(int, torch.__version__.split(".")[:2])), dict[str, Any]()
    # torch 2.12 refuses `num_splits`, even 1, of FlashAttention 2 (pytorch #179760).
    if made >= (2, 13) or torch.nn.attention.current_flash_attention_impl():
        options["num_splits"] = 1
    if made >= (2, 12):  # before, it goes without saying
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return _call_ragged(varlen_attn, q, k, v, sight, **options)


def _flash(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata) -> Tensor:
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    return _call_ragged(flash_attn_varlen_func, q, k, v, sight)


def _call_ragged(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata, **options: Any
) -> Tensor:
    """At least 2 queries: for single ones FlashAttention 2 has a path for grouped heads that fails where a
    row has no query, and that may split keys by how many rows there are."""
    longest = max(2, *sight.query_lengths), max(sight.key_lengths)
    window = -1, 0 if sight.causal else -1
    return kernel(q, k, v, sight.query_ends, sight.key_ends, *longest, window_size=window, **options)


def _indexed(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata) -> Tensor:
    from dlm_rag.model.indexed_attention import attend_by_index

    places = torch.arange(len(k), device=k.device) if sight.key_places is None else sight.key_places
    ends = sight.query_ends, sight.key_ends
    return attend_by_index(q, k, v, places, ends, max(sight.query_lengths), sight.visible_counts)


_KERNELS: dict[str, Callable[..., Any]] = {
    "sdpa": _sdpa, "varlen": _varlen, "flash": _flash, "indexed": _indexed
}  # fmt: skip


def choose_backend(
    requested: str, device: torch.device, dtype: torch.dtype, causal_context: bool = False
) -> str:
    """The kernel to use: `requested`, or for "auto" the first of flash, varlen, sdpa that works here.

    causal_context: as in `DenoiserConfig`; in one call some rows are causal then, which only SDPA can mask.
    Raises `ConfigError` when a kernel is asked for by name and cannot run here.
    """
    if causal_context and requested != "indexed":
        if requested not in ("auto", "sdpa"):
            raise ConfigError(f"attn_implementation={requested} has no masks, needed here: set it to sdpa")
        return "sdpa"
    if requested == "auto":
        return _first_working(device, dtype)
    if reason := get_backend_problem(requested, device, dtype):
        raise ConfigError(f"attn_implementation={requested} cannot be used here: {reason}")
    return requested


@cache
def _first_working(device: torch.device, dtype: torch.dtype) -> str:
    chosen = next(name for name in ATTENTION_BACKENDS if not get_backend_problem(name, device, dtype))
    kernel = describe_kernel_version(chosen)
    log.info("attention kernel: %s (%s) on %s in %s", chosen, kernel, device, dtype)
    return chosen


@cache
def get_backend_problem(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why a kernel cannot run here, with the remedy; empty where it can."""
    if backend == "sdpa":
        return ""
    if backend == "indexed":
        if find_spec("triton") is None:
            return "it needs Triton, which comes with torch's CUDA builds; set attn_implementation=sdpa"
        if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
            return "it needs a CUDA device; set attn_implementation=sdpa"
    elif device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "it needs a CUDA device and dtype=bfloat16 or float16; set attn_implementation=sdpa"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 or newer; set attn_implementation=sdpa"
    if backend == "flash" and not _has_flash_attn():
        return "install it with `pip install 'dlm_rag[flash]'` (FlashAttention 4 alone is another package)"
    return ""


def _has_flash_attn() -> bool:
    """FlashAttention 4 alone is named `flash_attn`, too, but lacks the function of flash-attn 2."""
    try:
        return find_spec(FLASH_MODULE) is not None and bool(version("flash-attn"))
    except (ModuleNotFoundError, PackageNotFoundError):
        return False


def describe_kernel_version(backend: str) -> str:
    """The kernel and the version of the package it is in, as stamped on results."""
    if package := {"flash": "flash-attn", "indexed": "triton"}.get(backend):
        return f"{package} {version(package)}"
    return f"torch {torch.__version__}"
