"""The memory of keys and values: one block, in which a token of any segment has a place in every layer.

Which tokens a row sees is a list of places, so nothing has to lie together, and nothing is moved. Keys and
values are kept in the model's dtype, or as int8 with a float16 scale for each token and head behind its
numbers. Keys of projections with a bias have channels that are large for every token (Qwen2, so Dream and
Fast-dLLM v2; measured by KVQuant, Hooper et al. 2024): the bias, turned to the token's position, is taken
off before and added after.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.device_io import to_device
from dlm_rag.model.layers import Attention, apply_rope
from dlm_rag.model.packed_batch import Places

SCALE_BYTES = 2  # float16
SMALLEST_SCALE = 2.0**-24  # of a float16 above 0


class KVFormat:
    """Between keys and values in a denoiser's dtype and what is kept of them.

    cache_dtype: as `engine.cache_dtype`.
    """

    def __init__(self, denoiser: Denoiser, cache_dtype: str = "auto") -> None:
        shape = denoiser.config
        self._denoiser, self.dtype = denoiser, denoiser.compute_dtype
        self.devices = denoiser.layer_devices
        self.is_compressed = cache_dtype == "int8"
        self.kept_dtype = torch.int8 if self.is_compressed else self.dtype
        self.heads = shape.num_key_value_heads, shape.head_dim + SCALE_BYTES * self.is_compressed
        self.has_key_bias = self.is_compressed and has_plain_key_bias(shape)

    @property
    def token_bytes(self) -> int:
        """The bytes of the keys and values of a token in all layers."""
        heads, width = self.heads
        return 2 * len(self.devices) * heads * width * self.kept_dtype.itemsize

    def empty(self, tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """Room for so many tokens in all layers, (N, 2, tokens, Hk, D or a little more)."""
        return torch.empty(len(self.devices), 2, tokens, *self.heads, dtype=self.kept_dtype, device=device)

    def pack(self, keys_values: Tensor, start: int) -> Tensor:
        """What is kept of keys and values (N, 2, n, Hk, D) of tokens at the positions from `start` on."""
        positions = torch.arange(start, start + keys_values.shape[2], device=keys_values.device)
        layers = [self.pack_layer(kv, layer, positions) for layer, kv in enumerate(keys_values)]
        return torch.stack(layers)

    def pack_layer(self, keys_values: Tensor, layer: int, positions: Tensor | None) -> Tensor:
        """What is kept of the keys and values (2, n, Hk, D) of a layer; positions: (n,), for a key bias."""
        if not self.is_compressed:
            return keys_values
        if self.has_key_bias:
            k, v = keys_values
            keys_values = torch.stack((k - self._key_bias(layer, positions), v))
        return quantize_int8(keys_values)

    def unpack_layer(self, kept: Tensor, layer: int, positions: Tensor | None) -> Tensor:
        """Keys and values (2, n, Hk, D) of a layer from what is kept of them."""
        if not self.is_compressed:
            return kept
        found = dequantize_int8(kept, self.dtype)
        if self.has_key_bias:
            found[0] += self._key_bias(layer, positions)
        return found

    def _key_bias(self, layer: int, positions: Tensor | None) -> Tensor:
        """(n, Hk, D)"""
        attention = self._denoiser.layers[layer].self_attn
        assert isinstance(attention, Attention) and attention.k_proj.bias is not None
        assert positions is not None
        bias = attention.k_proj.bias.to(positions.device, self.dtype).view(1, -1, attention.head_dim)
        rope = self._denoiser.compute_rope(positions.to(self._denoiser.device))
        rope = tuple(part.to(positions.device) for part in rope)
        return apply_rope(bias.expand(len(positions), -1, -1), rope)


class KVMemory:
    """Places for tokens, in one tensor for each run of layers on one device; taken at its first use.

    capacity: tokens that it has room for; it grows when more are taken.
    """

    def __init__(self, format: KVFormat, capacity: int) -> None:
        self.format, self.capacity = format, capacity
        self._parts: list[Tensor] = []  # each (layers, 2, capacity, Hk, D or a little more)
        self._positions: list[Tensor] = []  # of the tokens, (capacity,), where keys are kept without bias
        self._touched = 0  # places that have been used; those after them are free
        self._free: list[int] = []  # places before, the last one is taken first

    @property
    def free(self) -> int:
        """How many tokens fit without growing."""
        return self.capacity - self._touched + len(self._free)

    @property
    def taken(self) -> int:
        return self._touched - len(self._free)

    def take(self, tokens: int) -> Places:
        """Places for so many tokens; the memory grows where there are too few."""
        again = min(tokens, len(self._free))
        found = self._free[len(self._free) - again :]
        del self._free[len(self._free) - again :]
        end = self._touched + tokens - again
        if end > self.capacity:
            self._grow(end + end // 8)
        new = np.arange(self._touched, end)
        self._touched = end
        return np.concatenate((np.array(found[::-1], dtype=np.int64), new)) if found else new

    def give_back(self, places: Places) -> None:
        self._free.extend(places[::-1].tolist())

    def layer(self, number: int) -> Tensor:
        """What is kept in a layer, (2, capacity, Hk, D or a little more), on its device."""
        part, number = self._part_of(number)
        return self._allocated()[part][number]

    def write_layer(self, layer: int, places: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Writes keys and values, each (n, Hk, D), of tokens at `positions` (n,) to their places (n,)."""
        held = self.layer(layer)
        if not self.format.is_compressed:
            held[0].index_copy_(0, places, k)
            held[1].index_copy_(0, places, v)
            return
        held.index_copy_(1, places, self.format.pack_layer(torch.stack((k, v)), layer, positions))
        if self.format.has_key_bias:
            self._positions[self._part_of(layer)[0]][places] = positions.int()

    def read_layer(self, layer: int, places: Tensor) -> Tensor:
        """Keys and values (2, n, Hk, D) of the tokens at these places (n,)."""
        kept, positions = self.layer(layer).index_select(1, places), None
        if self.format.has_key_bias:
            positions = self._positions[self._part_of(layer)[0]][places]
        return self.format.unpack_layer(kept, layer, positions)

    def write(self, places: Places, kept: Tensor, start: int) -> None:
        """Writes what is kept of tokens at the positions from `start` on, (N, 2, n, ...), in all layers."""
        parts = self._allocated()
        for number, own in enumerate(kept.split([*map(len, parts)])):
            (at,) = to_device([places], parts[number].device)
            parts[number].index_copy_(2, at, own.to(at.device, non_blocking=True))
            if self.format.has_key_bias:
                positions = torch.arange(start, start + len(places), dtype=torch.int32, device=at.device)
                self._positions[number][at] = positions

    def read(self, places: Places) -> Tensor:
        """A copy of what is kept at these places, (N, 2, n, ...), on the first device."""
        first, *rest = (
            part.index_select(2, *to_device([places], part.device)) for part in self._allocated()
        )
        return torch.cat([first, *(part.to(first.device) for part in rest)]) if rest else first

    def _part_of(self, layer: int) -> tuple[int, int]:
        """The tensor that a layer is in, and its number there."""
        for number, part in enumerate(self._allocated()):
            if layer < len(part):
                return number, layer
            layer -= len(part)
        raise IndexError

    def _allocated(self) -> list[Tensor]:
        if not self._parts:
            self._parts, self._positions = self._allocate()
        return self._parts

    def _allocate(self) -> tuple[list[Tensor], list[Tensor]]:
        homes = [(device, len([*same])) for device, same in groupby(self.format.devices)]
        shape, dtype = (2, self.capacity, *self.format.heads), self.format.kept_dtype
        parts = [torch.empty((layers, *shape), device=device, dtype=dtype) for device, layers in homes]
        positions = [torch.empty(self.capacity, dtype=torch.int32, device=device) for device, _ in homes]
        return parts, positions if self.format.has_key_bias else []

    def _grow(self, capacity: int) -> None:
        """Takes more room; what is kept stays at its places."""
        self.capacity, held = capacity, (self._parts, self._positions)
        if not self._parts:
            return
        self._parts, self._positions = self._allocate()
        for old, new in zip(held[0], self._parts, strict=True):
            new[:, :, : self._touched] = old[:, :, : self._touched]
        for old, new in zip(held[1], self._positions, strict=True):
            new[: self._touched] = old[: self._touched]


def concatenate_places(parts: Sequence[Places]) -> Places:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


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
