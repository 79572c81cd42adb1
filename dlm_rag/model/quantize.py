"""Weights in low precision (`model.quantize`), by torchao's weight-only configurations.

Linear layers and experts inside the transformer layers; head, embeddings, norms and routers stay as they
are. Weights are quantised one by one while they are read, so that no second copy of the model is held.
"""

from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dlm_rag.errors import ConfigError, suggest_nearest
from dlm_rag.model import layers
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.progress import format_bytes, quiet_imports


class QuantizationMethod(NamedTuple):
    """A configuration of torchao's, and what it takes."""

    module: str
    config: str
    settings: dict[str, Any]
    bytes_per_weight: float
    row_bytes: int  # of the scale of a row
    multiple: int  # that widths must be multiples of
    scratch: int  # bytes a weight of the one layer that is dequantised at a time


METHODS = {
    # Without `set_inductor_config`, which changes how float32 is multiplied everywhere.
    "int8": QuantizationMethod(
        "torchao.quantization", "Int8WeightOnlyConfig", {"set_inductor_config": False}, 1.0, 5, 1, 4
    ),
    "nvfp4": QuantizationMethod(
        "torchao.prototype.mx_formats", "NVFP4WeightOnlyConfig", {}, 0.5 + 1 / 16, 0, 16, 30
    ),
}


def _quantize_linear(linear: nn.Linear, weight: Tensor, method: str) -> nn.Linear:
    """Gives a layer this weight, quantised."""
    with quiet_imports():
        quantize = import_module("torchao.quantization").quantize_
        found = METHODS[method]
        config = getattr(import_module(found.module), found.config)(**found.settings)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    quantize(linear, config)
    return linear


def list_quantized_weights(model: layers.TransformerWeights) -> dict[str, nn.Parameter]:
    """The weights that are quantised, by name; `ConfigError` where there are none."""
    found = {
        f"layers.{home}.{leaf}": value
        for home, module in model.layers.named_modules()
        if isinstance(module, layers.Linear | layers.ExpertStack)
        for leaf, value in module.named_parameters()
        if value.dim() > 1
    }
    if not found:
        raise ConfigError("model.quantize finds no linear layers in this model: leave it out")
    return found


def quantize_weight(model: layers.TransformerWeights, name: str, value: Tensor, method: str) -> None:
    """Puts one weight, quantised, into the layer that it belongs to."""
    home, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(home)
    if not isinstance(module, layers.ExpertStack):
        _quantize_linear(module, value, method)
        return
    with torch.device("meta"):
        experts = [layers.Linear(each.shape[1], each.shape[0], bias=False) for each in value]
    delattr(module, leaf)
    quantized = (_quantize_linear(*pair, method) for pair in zip(experts, value, strict=True))
    setattr(module, leaf, nn.ModuleList(quantized))
    module.matmul_by_expert = layers.multiply_by_expert


def check_quantize(method: str, config: DenoiserConfig, dtype: torch.dtype) -> None:
    """Raises `ConfigError` for a method, dtype or widths that cannot be, or without torchao."""
    if method == "none":
        return
    if method not in METHODS:
        nearest = suggest_nearest(str(method), METHODS)
        raise ConfigError(f"quantize={method} is not one of none, {', '.join(METHODS)}{nearest}")
    if find_spec("torchao") is None:
        raise ConfigError(f"model.quantize={method} needs torchao: pip install 'dlm_rag[quantize]'")
    if dtype == torch.float16:
        raise ConfigError(f"model.quantize={method} has no float16: set model.dtype to bfloat16 or float32")
    multiple = METHODS[method].multiple
    for name, shape in _list_quantized_shapes(config).items():
        if any(width % multiple for width in shape[-2:]):
            raise ConfigError(
                f"model.quantize={method} needs widths that are multiples of {multiple}, and {name} has "
                f"{[*shape]}: set int8"
            )


def count_weight_bytes(config: DenoiserConfig, size: int, quantize: str = "none") -> int:
    """Bytes of all weights, a tied head once; size: of a number that is not quantised."""
    whole = size * sum(map(prod, layers.list_tensor_shapes(config).values()))
    if quantize == "none":
        return whole
    method, shapes = METHODS[quantize], _list_quantized_shapes(config).values()
    saved = (size - method.bytes_per_weight) * sum(map(prod, shapes))
    return whole - int(saved) + method.row_bytes * sum(prod(shape[:-1]) for shape in shapes)


def count_scratch_bytes(config: DenoiserConfig, quantize: str) -> int:
    """The most bytes that dequantised weights take during a step."""
    if quantize == "none":
        return 0
    shapes = _list_quantized_shapes(config).values()
    return METHODS[quantize].scratch * max(prod(shape[-2:]) for shape in shapes)


def _list_quantized_shapes(config: DenoiserConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        weights = list_quantized_weights(layers.TransformerWeights(config))
    return {name: tuple(value.shape) for name, value in weights.items()}


def describe_precision(denoiser: Any) -> str:
    """Device and dtype of a denoiser, and which of its layers are quantised, in words."""
    text = f"{denoiser.device.type} {str(denoiser.dtype).removeprefix('torch.')}"
    if denoiser.quantize == "none":
        return text
    size = count_weight_bytes(denoiser.config, denoiser.dtype.itemsize, denoiser.quantize)
    return f"{text} with {denoiser.quantize} in the transformer layers (weights of {format_bytes(size)})"
