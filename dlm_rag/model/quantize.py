"""Low precision (`model.quantize`) for the linear layers and experts inside the transformer layers.

Head, embeddings, norms and routers stay as they are. Every output row of a weight has its own scale, and
so has every token: a scale for a whole batch would let a question change the tokens of another. Weights are
quantised one by one while they are read, so that no second copy of the model is held.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_rag.errors import ConfigError, suggest_nearest
from dlm_rag.machine import has_bfloat16
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.layers import (
    ExpertStack,
    Linear,
    TransformerWeights,
    get_compute_dtype,
    list_tensor_shapes,
)
from dlm_rag.progress import format_bytes, quiet_imports

PACKED_AT_ONCE = 2**18  # numbers: what is made of them on the way is small and leaves no holes in memory
SMALLEST_ABSOLUTE = 1e-12  # of a row that is divided by its largest value
INT8_MIN_ROWS = 32  # `torch._int_mm` wants more than 16 on CUDA
NVFP4_LARGEST = 448 * 6.0  # the largest scale of a block times the largest number
SCALE_BYTES = 4  # float32, one a row


class QuantizationMethod(NamedTuple):
    """How a weight is packed and multiplied, what that takes, and where it works.

    pack: a weight (out, in) -> its numbers, and the scales of its rows (out, 1). matmul: tokens (n, in),
    numbers, scales -> the product (n, out). multiple: what widths must be multiples of. capability: compute
    capability of CUDA devices from which it works. scratch: bytes a weight of the one layer that is
    dequantised at a time.
    """

    pack: Callable[[Tensor], tuple[Tensor, Tensor]]
    matmul: Callable[[Tensor, Tensor, Tensor], Tensor]
    bytes_per_weight: float
    multiple: int
    capability: tuple[int, int]
    on_cpu: bool = True
    scratch: int = 0


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (n, in) in int8 or float8, and the scale (n, 1) of each row, not finite where the row is not."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST_ABSOLUTE) / largest
    numbers = x / scale  # in float32
    return (numbers.round_() if dtype == torch.int8 else numbers).to(dtype), scale


def _pack_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    numbers = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scales = torch.empty(len(weight), 1, device=weight.device)
    step = len(weight) if weight.is_meta else max(1, PACKED_AT_ONCE // weight.shape[1])
    for at in range(0, len(weight), step):
        rows = slice(at, at + step)
        numbers[rows], scales[rows] = quantize_rows(weight[rows], dtype)
    return numbers, scales


def _matmul_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    numbers, token_scale = quantize_rows(x, torch.int8)
    if x.is_cuda and len(x) < INT8_MIN_ROWS:
        numbers = F.pad(numbers, (0, 0, 0, INT8_MIN_ROWS - len(x)))
    return torch._int_mm(numbers, weight.t())[: len(x)].mul(token_scale).mul_(scale.t())


def _matmul_int8_weight(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    wide = torch.empty(weight.shape, dtype=get_compute_dtype(x), device=x.device)
    return F.linear(x, torch.mul(weight, scale, out=wide))


def _matmul_fp8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    numbers, token_scale = quantize_rows(x, torch.float8_e4m3fn)
    out = torch.bfloat16 if x.is_cuda else torch.float32  # all that scales by row give on CUDA
    return torch._scaled_mm(numbers, weight.t(), token_scale, scale.t(), out_dtype=out)


def _row_powers_of_two(x: Tensor) -> Tensor:
    """Powers of 2, which round nothing, that bring each row (n, in) just below `NVFP4_LARGEST`.

    NVFP4 has float8 scales of blocks, too coarse for small numbers; torchao would scale the whole batch.
    """
    largest = x.float().abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest / NVFP4_LARGEST).exponent
    return torch.ldexp(torch.ones_like(largest), exponent) + 0 * largest  # not finite where the row is not


def _pack_by_torchao(weight: Tensor, config: str, **settings: bool) -> tuple[Tensor, Tensor]:
    with quiet_imports():
        from torchao.prototype import mx_formats
        from torchao.quantization import quantize_

    scale = _row_powers_of_two(weight)
    with torch.device("meta"):
        linear = Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter((weight / scale).bfloat16(), requires_grad=False)
    quantize_(linear, getattr(mx_formats, config)(**settings))
    return linear.weight.detach(), scale


def _matmul_by_torchao(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    token_scale = _row_powers_of_two(x)
    with torch.autocast(x.device.type, enabled=False):
        y = F.linear((x / token_scale).bfloat16(), weight)
    return y.float().mul_(token_scale).mul_(scale.t())


def _matmul_nvfp4_weight(x: Tensor, weight: Any, scale: Tensor) -> Tensor:
    if has_bfloat16(x.device):
        return _matmul_by_torchao(x, weight, scale)
    wide = weight.dequantize(torch.float32).mul_(scale).to(get_compute_dtype(x))
    return F.linear(x, wide)


_int8, _fp8 = partial(_pack_rows, dtype=torch.int8), partial(_pack_rows, dtype=torch.float8_e4m3fn)
_nvfp4 = partial(_pack_by_torchao, use_dynamic_per_tensor_scale=False)
_mxfp8 = partial(_pack_by_torchao, config="MXDynamicActivationMXWeightConfig")
_nvfp4_weight = partial(_nvfp4, config="NVFP4WeightOnlyConfig")
_nvfp4 = partial(_nvfp4, config="NVFP4DynamicActivationNVFP4WeightConfig", use_triton_kernel=False)
METHODS = {
    "int8": QuantizationMethod(_int8, _matmul_int8, 1.0, 8, (7, 5)),
    "int8_weight": QuantizationMethod(_int8, _matmul_int8_weight, 1.0, 8, (0, 0), scratch=4),
    "fp8": QuantizationMethod(_fp8, _matmul_fp8, 1.0, 16, (8, 9)),
    "mxfp8": QuantizationMethod(_mxfp8, _matmul_by_torchao, 1 + 1 / 32, 32, (10, 0), on_cpu=False),
    # Two numbers lie in a byte, and `torch._scaled_mm` wants rows of a multiple of 16 bytes.
    "nvfp4": QuantizationMethod(_nvfp4, _matmul_by_torchao, 0.5 + 1 / 16, 32, (10, 0), on_cpu=False),
    "nvfp4_weight": QuantizationMethod(  # torchao 0.18 unpacks by many operators, whose peak this is
        _nvfp4_weight, _matmul_nvfp4_weight, 0.5 + 1 / 16, 16, (0, 0), scratch=30
    ),
}


class QuantizedLinear(nn.Module):
    """A linear layer with its weight in one of `METHODS`; sums and scales are float32."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, method: str) -> None:
        super().__init__()
        self.out_features, self.method = weight.shape[0], method
        numbers, scale = METHODS[method].pack(weight)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        dtype = get_compute_dtype(x)
        if not len(x):
            return x.new_empty(0, self.out_features, dtype=dtype)
        y = METHODS[self.method].matmul(x.contiguous(), self.weight, self.weight_scale)
        return (y if self.bias is None else y + self.bias).to(dtype)


def check_dtypes_kept(model: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Raises `ConfigError` for a change, as of `Module.to`, of the dtype of quantised numbers."""
    layers = (module for module in model.modules() if isinstance(module, QuantizedLinear))
    for value in (value for layer in layers for value in (layer.weight, layer.weight_scale)):
        if fn(torch.empty(0, dtype=value.dtype, device=value.device)).dtype != value.dtype:
            raise ConfigError("quantised weights keep their dtype: load the model in the one wanted")


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


def quantize_weight(model: TransformerWeights, name: str, value: Tensor, method: str) -> None:
    """Puts one weight, quantised, into the place of the layer that it belongs to."""
    home, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(home)
    if isinstance(module, ExpertStack):
        delattr(module, leaf)
        setattr(module, leaf, nn.ModuleList(QuantizedLinear(each, None, method) for each in value))
        module.matmul_by_expert = multiply_by_expert
    else:
        model.set_submodule(home, QuantizedLinear(value, module.bias, method))


def quantize_linear_layers(model: TransformerWeights, method: str, experts: bool = False) -> None:
    """Quantises the weights of a model that is in memory, those of experts only if asked."""
    for name, value in list_quantized_weights(model).items():
        if experts or value.dim() == 2:
            quantize_weight(model, name, value.detach(), method)


def find_problem(method: str, device: torch.device) -> str:
    """Why a method does not work on a device, in words; empty where it does."""
    needs = METHODS[method]
    works = device.type == "cpu" and needs.on_cpu
    if device.type == "cuda":
        works = torch.cuda.get_device_capability(device) >= needs.capability
    if not works:
        or_cpu = " or a CPU" if needs.on_cpu else ""
        return f"it needs a GPU of compute capability {needs.capability[0]}.{needs.capability[1]}{or_cpu}"
    if needs.matmul in (_matmul_by_torchao, _matmul_nvfp4_weight) and find_spec("torchao") is None:
        return "it needs torchao: pip install 'dlm_rag[quantize]'"
    return ""


def check_quantize(method: str, device: torch.device, config: DenoiserConfig) -> None:
    """Raises `ConfigError` for an unknown method, or one that a device or a model's widths do not allow."""
    if method == "none":
        return
    if method not in METHODS:
        nearest = suggest_nearest(str(method), METHODS)
        raise ConfigError(f"quantize={method} is not one of none, {', '.join(METHODS)}{nearest}")
    if problem := find_problem(method, device):
        works = ", ".join(name for name in METHODS if not find_problem(name, device))
        raise ConfigError(f"model.quantize={method}: {problem}; set one that works here: {works or 'none'}")
    with torch.device("meta"):
        weights = list_quantized_weights(TransformerWeights(config))
    for name, value in weights.items():
        if any(width % METHODS[method].multiple for width in value.shape[-2:]):
            raise ConfigError(
                f"model.quantize={method} needs widths that are multiples of {METHODS[method].multiple}, "
                f"and {name} has {[*value.shape]}: choose another one"
            )


def count_weight_bytes(config: DenoiserConfig, size: int, quantize: str = "none") -> int:
    """Bytes of all weights, a tied head once; size: of a number that is not quantised."""
    whole = size * sum(map(prod, list_tensor_shapes(config).values()))
    if quantize == "none":
        return whole
    with torch.device("meta"):
        weights = list_quantized_weights(TransformerWeights(config)).values()
    saved = (size - METHODS[quantize].bytes_per_weight) * sum(value.numel() for value in weights)
    return whole - int(saved) + SCALE_BYTES * sum(value.numel() // value.shape[-1] for value in weights)


def count_scratch_bytes(config: DenoiserConfig, quantize: str) -> int:
    """The most bytes that dequantised weights take during a step."""
    if quantize == "none" or not METHODS[quantize].scratch:
        return 0
    with torch.device("meta"):
        weights = list_quantized_weights(TransformerWeights(config)).values()
    return METHODS[quantize].scratch * max(prod(value.shape[-2:]) for value in weights)


def describe_precision(denoiser: Any) -> str:
    """Device and dtype of a denoiser, and which of its layers are quantised, in words."""
    text = f"{denoiser.device.type} {str(denoiser.dtype).removeprefix('torch.')}"
    if denoiser.quantize == "none":
        return text
    size = count_weight_bytes(denoiser.config, denoiser.dtype.itemsize, denoiser.quantize)
    where = f"the linear layers of {len(denoiser.layers)} transformer layers"
    return f"{text} with {denoiser.quantize} in {where} (weights of {format_bytes(size)})"
