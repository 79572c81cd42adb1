"""Weights in int8 (`model.quantize`), by torchao's `Int8WeightOnlyConfig`: a scale for each row.

Linear layers and experts inside the transformer layers; head, embeddings, norms and routers stay as they
are. Weights are quantised one by one while they are read, so that no second copy of the model is held.
"""

from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from dlm_rag.errors import ConfigError, suggest_nearest
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.layers import ExpertStack, Linear, TransformerWeights, list_tensor_shapes
from dlm_rag.progress import format_bytes, quiet_imports

QUANTIZED_BYTES = 1.0  # of a weight in int8
ROW_SCALE_BYTES = 5  # of a row: its scale, and the zero that torchao keeps beside it
SCRATCH_BYTES = 4  # a weight of the one layer that is dequantised at a time


def _quantize_linear(linear: nn.Linear, weight: Tensor) -> nn.Linear:
    """Gives a layer this weight, quantised."""
    with quiet_imports():
        torchao = import_module("torchao.quantization")
        # `set_inductor_config` would change how float32 is multiplied everywhere.
        config = torchao.Int8WeightOnlyConfig(set_inductor_config=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    torchao.quantize_(linear, config)
    return linear


def multiply_by_expert(x: Tensor, experts: nn.ModuleList, ends: Tensor) -> Tensor:
    """As `layers.grouped_matmul`, one expert after another: the host waits for the counts of tokens."""
    parts = x.tensor_split(ends[:-1].long().cpu())
    return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])


def list_quantized_weights(model: TransformerWeights) -> dict[str, nn.Parameter]:
    """The weights that are quantised by their names: of linear layers and experts inside the layers.

    Raises `ConfigError` where there are none.
    """
    found = {
        f"layers.{home}.{leaf}": value
        for home, module in model.layers.named_modules()
        if isinstance(module, Linear | ExpertStack)
        for leaf, value in module.named_parameters()
        if value.dim() > 1
    }
    if not found:
        raise ConfigError("model.quantize finds no linear layers in this model: leave it out")
    return found


def quantize_weight(model: TransformerWeights, name: str, value: Tensor) -> None:
    """Puts one weight, quantised, into the layer that it belongs to."""
    home, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(home)
    if not isinstance(module, ExpertStack):
        _quantize_linear(module, value)
        return
    with torch.device("meta"):
        experts = [Linear(each.shape[1], each.shape[0], bias=False) for each in value]
    delattr(module, leaf)
    quantized = (_quantize_linear(*pair) for pair in zip(experts, value, strict=True))
    setattr(module, leaf, nn.ModuleList(quantized))
    module.matmul_by_expert = multiply_by_expert


def quantize_linear_layers(model: TransformerWeights) -> None:
    """Quantises the weights of a model that is in memory."""
    for name, value in list_quantized_weights(model).items():
        quantize_weight(model, name, value.detach())


def check_quantize(method: str) -> None:
    """Raises `ConfigError` for a method that there is not, or without torchao."""
    if method not in ("none", "int8"):
        raise ConfigError(f"quantize={method} is not one of none, int8{suggest_nearest(method, ['int8'])}")
    if method == "int8" and find_spec("torchao") is None:
        raise ConfigError(
            "model.quantize=int8 needs torchao: pip install 'dlm_rag[quantize]', or leave it out"
        )


def count_weight_bytes(config: DenoiserConfig, size: int, quantize: str = "none") -> int:
    """Bytes of all weights, a tied head once; size: of a number that is not quantised."""
    whole = size * sum(map(prod, list_tensor_shapes(config).values()))
    if quantize == "none":
        return whole
    weights = _list_quantized_shapes(config)
    saved = (size - QUANTIZED_BYTES) * sum(map(prod, weights))
    return whole - int(saved) + ROW_SCALE_BYTES * sum(prod(shape[:-1]) for shape in weights)


def count_scratch_bytes(config: DenoiserConfig, quantize: str) -> int:
    """The most bytes that dequantised weights take during a step."""
    if quantize == "none":
        return 0
    return SCRATCH_BYTES * max(prod(shape[-2:]) for shape in _list_quantized_shapes(config))


def _list_quantized_shapes(config: DenoiserConfig) -> list[tuple[int, ...]]:
    with torch.device("meta"):
        weights = list_quantized_weights(TransformerWeights(config))
    return [tuple(value.shape) for value in weights.values()]


def describe_precision(denoiser: Any) -> str:
    """Device and dtype of a denoiser, and which of its layers are quantised, in words."""
    text = f"{denoiser.device.type} {str(denoiser.dtype).removeprefix('torch.')}"
    if denoiser.quantize == "none":
        return text
    size = count_weight_bytes(denoiser.config, denoiser.dtype.itemsize, denoiser.quantize)
    where = f"the linear layers of {len(denoiser.layers)} transformer layers"
    return f"{text} with {denoiser.quantize} in {where} (weights of {format_bytes(size)})"
