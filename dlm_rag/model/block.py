"""One layer of the denoiser: norms, the projections of attention, rotary positions.

Shapes: T packed tokens, H heads, Hk key-value heads, D head width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dlm_rag.model.attention_kernels import compute_attention
from dlm_rag.model.attention_patterns import AttentionPattern
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.feedforward import Linear, build_feed_forward
from dlm_rag.model.packed_batch import AttentionMetadata, PackedRows

Rope = tuple[Tensor, Tensor]  # cos and sin, each (T, 1, D or what is turned of it), float32


class Embedding(nn.Embedding):
    """Without initialisation, as `Linear`."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the wider dtype of input and gains: torch's fused kernel wants them alike.

    Under autocast one of them may be float32 and the other not.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        return F.rms_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps)


class Attention(nn.Module):
    """The projections of attention; who sees whom is decided in `PackedRows`."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        c = config
        self.head_dim = c.head_dim
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim, c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, c.qkv_bias)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def project_queries(self, x: Tensor, rope: Rope) -> Tensor:
        """x (n, hidden) -> queries (n, H, D)."""
        q = self._heads(self.q_proj(x))
        return apply_rope(self.q_norm(q), rope).to(q.dtype)

    def project_keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """x (T, hidden) -> keys and values, each (T, Hk, D)."""
        k, v = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        return apply_rope(self.k_norm(k), rope).to(k.dtype), v

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "t (h d) -> t h d", d=self.head_dim)


@dataclass
class AttentionProbe:
    """Queries and keys of one layer of a call, kept for a look at its attention."""

    layer: int
    queries: Tensor | None = None  # (T, H, D)
    keys: Tensor | None = None  # (Tk, Hk, D), row by row
    key_lengths: tuple[int, ...] = ()  # keys of each row
    visible_counts: Tensor | None = None  # (T,) how many of them each query sees; None: all


@dataclass(frozen=True)
class ForwardContext:
    """What all layers of one call share."""

    rows: PackedRows
    backend: str
    probe: AttentionProbe | None = None
    patterns: tuple[AttentionPattern | None, ...] = ()  # one a layer, or none at all

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sight: AttentionMetadata) -> Tensor:
        """Attention of q (n, H, D) to what the rows see, their own k and v (T, Hk, D) included."""
        k, v = self.rows.gather_keys_values(k, v, layer)
        if self.probe is not None and self.probe.layer == layer:
            self.probe.queries, self.probe.keys, self.probe.key_lengths = q, k, sight.keys.lengths
            self.probe.visible_counts = sight.visible_counts
        pattern = self.patterns[layer] if self.patterns else None
        return compute_attention(q, k, v, sight, self.backend, pattern)


class TransformerLayer(nn.Module):
    def __init__(self, config: DenoiserConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = build_feed_forward(config, layer)

    def forward(
        self, x: Tensor, rope: Rope, call: ForwardContext, layer: int, last: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, hidden) -> the same tokens one layer on, in the `last` layer those that are read (n,
        hidden); and the keys and values of all of them, each (T, Hk, D).
        """
        rows = call.rows
        sight, read = (
            (rows.last_layer_metadata, rows.output_indices)
            if last and rows.last_layer_metadata is not rows.attention_metadata
            else (rows.attention_metadata, None)
        )
        x, q, k, v = self.project_qkv(x, rope, read)
        if not len(x) and rows.sharded_rows is None:
            if not torch.is_grad_enabled():
                return x, k, v
            # Processes sum the gradients of all weights: those of a part that hides nothing are zeros.
            return self.apply_attention_output(x, q + 0 * (k.sum() + v.sum())), k, v
        return self.apply_attention_output(x, call.attend(q, k, v, layer, sight)), k, v

    def project_qkv(
        self, x: Tensor, rope: Rope, read: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What attention needs: the tokens that go on, their queries, keys and values of all."""
        normed = self.input_layernorm(x)
        k, v = self.self_attn.project_keys_values(normed, rope)
        if read is not None:
            x, normed, rope = x[read], normed[read], (rope[0][read], rope[1][read])
        return x, self.self_attn.project_queries(normed, rope), k, v

    def apply_attention_output(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows it: attended (n, H, D) comes in, then the feed-forward."""
        x = x + self.self_attn.o_proj(rearrange(attended, "t h d -> t (h d)"))
        return x + self.mlp(self.post_attention_layernorm(x))


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotary positions (Su et al. 2021) on x (T, H, D), the halves of D paired, in float32.

    Of a head wider than `rope`, the first numbers are turned.
    """
    cos, sin = rope
    if (turned := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((apply_rope(x[..., :turned], rope), x[..., turned:]), dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def compute_rope_frequencies(config: DenoiserConfig) -> tuple[Tensor, float]:
    """Inverse frequencies (`rotary_dim` / 2,) in float32 and the gain on cos and sin, on the CPU.

    Plain rotary positions by formula; scaled ones (llama3, yarn, linear) by transformers' own code.
    """
    kind = (config.rope_scaling or {}).get("rope_type", "default")
    if kind == "default":
        steps = torch.arange(0, config.rotary_dim, 2, device="cpu").float() / config.rotary_dim
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
