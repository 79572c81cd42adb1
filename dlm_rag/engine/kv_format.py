"""How keys and values are kept: in the model's dtype, or as int8 with a scale for each token and head.

A scale is float16 and lies behind its numbers, so that what is kept stays one tensor. Keys of projections
with a bias have channels that are large for every token (Qwen2, so Dream and Fast-dLLM v2; measured by
KVQuant, Hooper et al. 2024): the bias, turned to the token's position, is taken off before and added after.
"""

import torch
from torch import Tensor

from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.layers import Attention, apply_rope

SCALE_BYTES = 2  # float16
SMALLEST_SCALE = 2.0**-24  # of a float16 above 0


class KVFormat:
    """Between keys and values (N, 2, n, Hk, D) in a denoiser's dtype and what is kept of them.

    cache_dtype: as `engine.cache_dtype`.
    """

    def __init__(self, denoiser: Denoiser, cache_dtype: str = "auto") -> None:
        shape = denoiser.config
        self._denoiser, self.dtype = denoiser, denoiser.compute_dtype
        self.is_compressed = cache_dtype == "int8"
        self.kept_dtype = torch.int8 if self.is_compressed else self.dtype
        width = shape.head_dim + SCALE_BYTES * self.is_compressed
        self.layers_and_heads = shape.num_hidden_layers, shape.num_key_value_heads, width
        self._has_key_bias = self.is_compressed and has_plain_key_bias(shape)

    def empty(self, tokens: int) -> Tensor:
        """Room for so many tokens, (N, 2, tokens, Hk, D or a little more), as they are kept."""
        layers, heads, width = self.layers_and_heads
        return torch.empty(
            layers, 2, tokens, heads, width, dtype=self.kept_dtype, device=self._denoiser.device
        )

    @property
    def token_bytes(self) -> int:
        """Of the keys and values of a token in all layers."""
        layers, heads, width = self.layers_and_heads
        return 2 * layers * heads * width * self.kept_dtype.itemsize

    def pack(self, keys_values: Tensor, start: int) -> Tensor:
        """What is kept of the keys and values of tokens at the positions from `start` on."""
        if not self.is_compressed:
            return keys_values
        if self._has_key_bias:
            k, v = keys_values.unbind(1)
            keys_values = torch.stack((k - self._key_bias(start, k.shape[1]), v), dim=1)
        return quantize_int8(keys_values)

    def unpack(self, kept: Tensor, start: int) -> Tensor:
        if not self.is_compressed:
            return kept
        found = dequantize_int8(kept, self.dtype)
        if self._has_key_bias:
            found[:, 0] += self._key_bias(start, kept.shape[2])
        return found

    def unpack_layer(self, kept: Tensor, layer: int, positions: Tensor) -> Tensor:
        """Of one layer the keys and values (2, n, Hk, D) of tokens at `positions` (n,)."""
        kept = dequantize_int8(kept, self.dtype)
        if self._has_key_bias:
            kept[0] += self._layer_key_bias(layer, positions)
        return kept

    def _key_bias(self, start: int, tokens: int) -> Tensor:
        """(N, tokens, Hk, D)"""
        positions = torch.arange(start, start + tokens, device=self._denoiser.device)
        return torch.stack([self._layer_key_bias(n, positions) for n in range(self.layers_and_heads[0])])

    def _layer_key_bias(self, layer: int, positions: Tensor) -> Tensor:
        block = self._denoiser.layers[layer]
        attention = block.self_attn
        assert isinstance(attention, Attention) and attention.k_proj.bias is not None
        bias = attention.k_proj.bias.to(positions.device, self.dtype).view(1, -1, attention.head_dim)
        return apply_rope(bias.expand(len(positions), -1, -1), self._denoiser.compute_rope(positions))


def has_plain_key_bias(shape: DenoiserConfig) -> bool:
    """Whether keys have a bias, which no norm scales."""
    return shape.qkv_bias and not shape.qk_norm


def quantize_int8(x: Tensor) -> Tensor:
    """x (..., D) -> int8 (..., D + 2): numbers from -127 to 127, then the bytes of their float16 scale."""
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=SMALLEST_SCALE).half()
    numbers = (x / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((numbers, scale.view(torch.int8)), dim=-1)


def dequantize_int8(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 (..., D + 2) -> (..., D) in `dtype`."""
    scale = kept[..., -SCALE_BYTES:].contiguous().view(torch.float16).float()
    found = torch.empty(*kept.shape[:-1], kept.shape[-1] - SCALE_BYTES, dtype=dtype, device=kept.device)
    return torch.mul(kept[..., :-SCALE_BYTES], scale, out=found)  # no copy in float32
