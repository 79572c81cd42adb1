"""The denoiser p_theta: one bidirectional transformer for every checkpoint.

RMSNorm, rotary positions, grouped-query attention, SwiGLU. Options cover LLaDA and Dream, our own
models, and Qwen2, Qwen3 and Llama as starting weights.

Shapes: B rows, L length, T packed tokens (rows behind one another), H heads, Hk key-value heads,
D head width, V vocabulary, N layers.

The smallest run: `Denoiser(DenoiserConfig(vocab_size=64))(torch.zeros(1, 8, dtype=torch.long))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dlm_rag.model.attention import Ragged, attention, choose_backend
from dlm_rag.model.checkpoint import Checkpoint, open_checkpoint, save_tensors
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.model.sharing import Stretches
from dlm_rag.model.store import StoredRows


class Linear(nn.Linear):
    """Takes its weights from a checkpoint or from `Denoiser.initialise`, not at construction.

    (On the meta device, torch's own initialisation imports its compiler, for 1.5 seconds.)
    """

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """As `Linear`."""

    def reset_parameters(self) -> None:
        pass


class Attention(nn.Module):
    """The projections of attention; who sees whom is decided in `Run`."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        c = config
        self.head_dim = c.head_dim
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim, c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, c.qkv_bias)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """x (n, hidden) -> queries (n, H, D)."""
        q = self._heads(self.q_proj(x))
        return rotate(self._normed(self.q_norm, q), rope).to(q.dtype)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """x (T, hidden) -> keys and values, each (T, Hk, D)."""
        k, v = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        return rotate(self._normed(self.k_norm, k), rope).to(k.dtype), v

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Under autocast the gains are float32 and x is not: torch's fused kernel wants one dtype."""
        return norm(x.to(norm.weight.dtype)) if isinstance(norm, nn.RMSNorm) else x

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "t (h d) -> t h d", d=self.head_dim)


class FeedForward(nn.Module):
    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, rope: Rope, run: Run, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, hidden) -> the same tokens, or those of `run.read`, one layer on (n, hidden); and the
        keys and values of all of them, each (T, Hk, D).
        """
        x, q, k, v = self.before(x, rope, run.read)
        if not len(x) and run.stretches is None:
            if not torch.is_grad_enabled():
                return x, k, v
            # Processes sum the gradients of all weights: those of a part that hides nothing are zeros.
            return self.after(x, q + 0 * (k.sum() + v.sum())), k, v
        return self.after(x, run.attend(q, k, v, layer)), k, v

    def before(self, x: Tensor, rope: Rope, read: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What attention needs: the tokens that go on, their queries, keys and values of all."""
        normed = self.input_layernorm(x)
        k, v = self.self_attn.keys_values(normed, rope)
        if read is not None:
            x, normed, rope = x[read], normed[read], (rope[0][read], rope[1][read])
        return x, self.self_attn.queries(normed, rope), k, v

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows it: attended (n, H, D) comes in, then the feed-forward."""
        x = x + self.self_attn.o_proj(rearrange(attended, "t h d -> t (h d)"))
        return x + self.mlp(self.post_attention_layernorm(x))


Rope = tuple[Tensor, Tensor]  # cos and sin, each (T, 1, D), float32
KeysValues = Sequence[tuple[Tensor, Tensor]]  # for each layer, each (n, Hk, D)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary positions (Su et al. 2021) on x (T, H, D), the halves of D paired, in float32."""
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


@dataclass
class Watch:
    """Queries (Tq, H, D) and keys (Tk, Hk, D) of one layer in a call, for losses on its attention."""

    layer: int
    queries: Tensor | None = None
    keys: Tensor | None = None
    lengths: tuple[int, ...] = ()  # keys of each row


@dataclass(frozen=True)
class Run:
    """One call of the transformer over packed rows, each of which may see a context before it."""

    queries: Ragged
    keys: Ragged
    context: Sequence[Sequence[KeysValues]] | StoredRows | None  # per row in parts
    backend: str
    ahead: int | None
    watch: Watch | None
    places: Tensor | None = None  # (T,) where the rows' own keys and values go, with `StoredRows`
    read: Tensor | None = None  # (n,) the packed tokens that go through the layer; all where None
    stretches: Stretches | None = None  # where other processes have the rest of the rows

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Attention of q (n, H, D) to what the rows see, their own k and v (T, Hk, D) included."""
        k, v = self._seen(k, v, layer)
        if self.watch is not None and self.watch.layer == layer:
            self.watch.queries, self.watch.keys, self.watch.lengths = q, k, self.keys.lengths
        stored = self.context if isinstance(self.context, StoredRows) else None
        return attention(q, k, v, self.queries, self.keys, self.backend, self.ahead, stored)

    def _seen(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that the rows see: of each row its context, then its own k and v (T, Hk, D)."""
        if self.stretches is not None:
            k, v = self.stretches.gather(torch.stack((k, v), dim=1)).unbind(1)
        if self.context is None:
            return k, v
        if isinstance(self.context, StoredRows):
            assert self.places is not None
            return self.context.write(layer, self.places, k, v)
        kept = [[part[layer] for part in parts] for parts in self.context]
        own = [
            whole - sum(len(part_k) for part_k, _ in parts)
            for whole, parts in zip(self.keys.lengths, kept, strict=True)
        ]
        rows = list(zip(kept, k.split(own), v.split(own), strict=True))
        seen_k = [x for parts, own_k, _ in rows for x in (*(part[0] for part in parts), own_k)]
        seen_v = [x for parts, _, own_v in rows for x in (*(part[1] for part in parts), own_v)]
        return Joined.apply(*seen_k), Joined.apply(*seen_v)


class Joined(torch.autograd.Function):
    """`torch.cat`, but that the gradient of each piece is a tensor of its own.

    A view would keep that of all rows alive, in every layer, until backward comes to the contexts.
    """

    @staticmethod
    def forward(ctx: Any, *pieces: Tensor) -> Tensor:
        ctx.lengths = [len(piece) for piece in pieces]
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, ...]:
        return tuple(piece.clone() for piece in slope.split(ctx.lengths))


class Denoiser(nn.Module):
    """ids -> logits; `logits[:, i]` always predicts token `i`.

    `forward` is the plain rectangular call. The decoder uses its two halves: `encode` runs the
    transformer over ragged rows, `read_out` gives logits at the positions that are asked for.
    """

    inverse_frequencies: Tensor

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        self.config = config
        self.attention = "auto"
        self.checkpointing = "none"  # while gradients are recorded: none, selective, full
        self._compiled_before: int | None = None
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()
        self.set_rope(config.rope_theta)
        if not self.embed_tokens.weight.is_meta:
            self.initialise()

    def tie(self) -> None:
        """Makes head and embedding one, where the config says so: after either was replaced."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def set_rope(self, theta: float) -> None:
        """Gives the rotary positions another base, as before training on longer contexts."""
        self.config = replace(self.config, rope_theta=theta)
        frequencies, self.rope_gain = rope_frequencies(self.config)
        if not self.embed_tokens.weight.is_meta:
            frequencies = frequencies.to(self.device)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    @torch.no_grad()
    def initialise(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Fresh weights: matrices normal with `std`, biases 0, gains 1."""
        for name, value in self.named_parameters():
            if value.dim() == 2:
                value.normal_(0.0, std, generator=generator)
            else:
                value.fill_(0.0 if name.endswith("bias") else 1.0)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | Checkpoint,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        attention: str = "auto",
    ) -> Denoiser:
        """The denoiser in a Hugging Face style folder or hub id (see `families.FAMILIES`).

        Reads safetensors straight into `dtype` on `device`. Never runs code from a checkpoint and
        never unpickles. Raises `CheckpointError` naming any missing, extra or misshapen tensor.
        """
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
        device = torch.device(device)
        choose_backend(attention, device, dtype)
        with torch.device("meta"):
            denoiser = cls(checkpoint.config)
        denoiser.load(checkpoint, device, dtype)
        denoiser.attention = attention
        return denoiser.eval()

    def load(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """Takes the weights of a checkpoint, in `dtype` on `device`."""
        values = {name: nn.Parameter(value) for name, value in checkpoint.tensors(device, dtype)}
        self.load_state_dict(values, strict=False, assign=True)
        self.tie()
        self.to(device)

    def save_pretrained(self, folder: str | Path, **extra: Any) -> None:
        """Writes `config.json` (with `extra` keys) and `model.safetensors`; see `save_tensors`."""
        save_tensors(self.state_dict(), self.config, Path(folder), extra)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def backend(self) -> str:
        """The attention kernel in use, as stamped on results."""
        kind, dtype = self.device.type, self.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return choose_backend(self.attention, self.device, dtype)

    def compile_layers(self) -> None:
        """Compiles what stands before and after attention, once for all layers and lengths.

        The first calls take half a minute; results change by rounding alone. `compilations` counts.
        """
        if self._compiled_before is None:
            self._compiled_before = _graphs()
            for block in self.layers:
                assert isinstance(block, Block)
                block.before = torch.compile(block.before, dynamic=True)  # type: ignore[method-assign]
                block.after = torch.compile(block.after, dynamic=True)  # type: ignore[method-assign]

    @property
    def compilations(self) -> int | None:
        """Graphs compiled since `compile_layers`, or None where it was not called."""
        return None if self._compiled_before is None else _graphs() - self._compiled_before

    def forward(self, input_ids: Tensor, ahead: int | None = None) -> Tensor:
        """(B, L) ids -> (B, L, V) logits; every position sees every other, or `ahead` after it.

        `ahead=0` is the causal attention of autoregressive models.
        """
        rows, length = input_ids.shape
        positions = torch.arange(length, device=input_ids.device).repeat(rows)
        hidden, _ = self.encode(input_ids.flatten(), positions, [length] * rows, ahead=ahead)
        source = torch.arange(rows * length, device=input_ids.device).view(rows, length)
        if self.config.shifted:
            source = torch.cat((source[:, :1], source[:, :-1]), dim=1)
        return self.read_out(hidden[source.flatten()]).view(rows, length, -1)

    def encode(
        self,
        ids: Tensor,
        positions: Tensor,
        lengths: Sequence[int],
        context: Sequence[Sequence[KeysValues]] | StoredRows | None = None,
        ahead: int | None = None,
        keep: bool = False,
        watch: Watch | None = None,
        read: Sequence[Sequence[int]] | None = None,
        stretches: Stretches | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Runs the layers over packed rows; each row sees its `context` and itself.

        ids, positions: (T,) rows of `lengths` behind one another. context: per row keys and values of
        earlier calls, in parts that rows may share, or their places in a `ContextStore`. read: per row
        the tokens (from 0, ascending) whose hidden states are asked for; the others are spared the last
        layer.
        Returns hidden states (T or number read, hidden) before the final norm and, with `keep`, the keys
        and values of all rows, for use as context after `of_rows`, else an empty list. `watch` is filled
        with the queries and keys of its layer. ahead: tokens after itself that each token of a row without
        context sees, 0 in a causal model; None: all. stretches: the whole rows, where this call has but a
        part of each.
        """
        device = ids.device
        seen = seen_by(context, len(lengths))
        whole = lengths if stretches is None else stretches.lengths
        run = Run(
            queries=Ragged(tuple(lengths), device),
            keys=Ragged(tuple(a + b for a, b in zip(seen, whole, strict=True)), device),
            context=context if isinstance(context, StoredRows) or any(seen) else None,
            backend=self.backend,
            ahead=ahead,
            watch=watch,
            stretches=stretches,
            places=context.places(lengths) if isinstance(context, StoredRows) else None,
        )
        reading = {} if read is None else _reading(read, lengths, device)
        # Who sees how far ahead is known for whole rows only.
        last = run if ahead is not None else replace(run, **reading)
        angles = positions.float()[:, None, None] * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        rope = (angles.cos() * self.rope_gain, angles.sin() * self.rope_gain)
        x = self.embed_tokens(ids)
        kept = []
        for layer, block in enumerate(self.layers):
            x, k, v = self._through(block, x, rope, last if layer == len(self.layers) - 1 else run, layer)
            if keep:
                kept.append((k, v))
        if ahead is not None and read is not None:
            x = x[reading["read"]]
        return x, kept

    def _through(self, block: nn.Module, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """One layer; with `checkpointing`, backward computes its activations again."""
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            found: tuple[Tensor, Tensor, Tensor] = block(*inputs)
            return found
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        options: dict[str, Any] = {}
        if self.checkpointing == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _kept_products())
        again: tuple[Tensor, Tensor, Tensor] = checkpoint(block, *inputs, use_reentrant=False, **options)
        return again

    def read_out(self, hidden: Tensor) -> Tensor:
        """Logits (n, V) from hidden states (n, hidden), through norm and head.

        The caller un-shifts: in a shifted model the row before a position predicts it.
        """
        return self.lm_head(self.norm(hidden))


@cache
def _kept_products() -> list[Any]:
    """What selective checkpointing keeps: the results of matrix products and of attention."""
    aten = torch.ops.aten
    attention = [
        getattr(aten, name).default
        for name in dir(aten)
        if name.startswith("_scaled_dot_product_") and not name.endswith("_backward")
    ]
    own = getattr(torch.ops, "torch_attn", None)  # of torch.nn.attention.varlen
    if own is not None and hasattr(own, "_varlen_attn"):
        attention.append(own._varlen_attn.default)
    return [aten.mm.default, aten.addmm.default, *attention]


def of_rows(kept: KeysValues, lengths: Sequence[int]) -> list[KeysValues]:
    """Keys and values of packed rows, row by row."""
    split = [(k.split(list(lengths)), v.split(list(lengths))) for k, v in kept]
    return [[(k[row], v[row]) for k, v in split] for row in range(len(lengths))]


def seen_by(context: Sequence[Sequence[KeysValues]] | StoredRows | None, rows: int) -> list[int]:
    """How many tokens each of the rows sees before its own."""
    if isinstance(context, StoredRows):
        return list(context.seen)
    return [sum(len(part[0][0]) for part in parts) for parts in context or [()] * rows]


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _reading(read: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """The fields of `Run` that let only the tokens of `read` through a layer."""
    starts = accumulate(lengths, initial=0)
    index = [start + token for start, tokens in zip(starts, read, strict=False) for token in tokens]
    return {
        "queries": Ragged(tuple(map(len, read)), device),
        "read": torch.tensor(index, dtype=torch.long, device=device),
    }


def rope_frequencies(config: DenoiserConfig) -> tuple[Tensor, float]:
    """Inverse frequencies (D / 2,) in float32 and the gain on cos and sin, on the CPU.

    Plain rotary positions by formula; scaled ones (llama3, yarn, linear) by transformers' own code.
    """
    kind = (config.rope_scaling or {}).get("rope_type", "default")
    if kind == "default":
        steps = torch.arange(0, config.head_dim, 2, device="cpu").float() / config.head_dim
        return 1.0 / config.rope_theta**steps, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    llama = LlamaConfig(
        hidden_size=config.num_attention_heads * config.head_dim,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_theta": config.rope_theta, **(config.rope_scaling or {})},
    )
    with torch.device("cpu"):  # the caller may be building on the meta device
        frequencies, gain = ROPE_INIT_FUNCTIONS[kind](llama, torch.device("cpu"))
    return frequencies.float(), float(gain)
