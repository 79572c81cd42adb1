"""The largest numbers of a denoiser's layers, against the most that float16 holds."""

import math
import re
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.layers import ExpertStack
from dlm_rag.model.quantize import QuantizedLinear

FLOAT16_MAX = torch.finfo(torch.float16).max


class ActivationRange(ExitStack):
    """While it is open, the largest absolute value of what goes into products with weights and comes out of
    them is recorded, layer by layer; the host does not wait.

    Sums of layers, which are float32 in float16 too, are left out.
    """

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self._largest: dict[int, Tensor] = {}
        for name, module in denoiser.named_modules():
            if (found := re.match(r"layers\.(\d+)\.", name)) is None:
                continue
            record = partial(self._record, int(found[1]))
            if isinstance(module, nn.Linear | QuantizedLinear):
                self.callback(module.register_forward_hook(record).remove)
            elif isinstance(module, ExpertStack):
                before = {k: v for k, v in vars(module).items() if k == "matmul_by_expert"}
                self.callback(vars(module).update, before)
                self.callback(delattr, module, "matmul_by_expert")
                module.matmul_by_expert = partial(_watch_matmul, record, module.matmul_by_expert)

    def largest_by_layer(self) -> list[float]:
        """Of each layer that ran, in their order; not finite where one of its values was not."""
        return [self._largest[layer].item() for layer in sorted(self._largest)]

    def _record(self, layer: int, _: Any, given: tuple[Tensor, ...], made: Tensor) -> None:
        for x in (given[0], made):
            if x.numel():
                largest = x.detach().abs().amax().float()
                self._largest[layer] = torch.maximum(largest, self._largest.get(layer, largest))


def _watch_matmul(record: Any, matmul: Any, x: Tensor, weights: Any, ends: Tensor) -> Tensor:
    made: Tensor = matmul(x, weights, ends)
    record(None, (x,), made)
    return made


def describe_range(largest: list[float]) -> str:
    """Where the largest is, and of each layer, in words."""
    top = max(largest, key=lambda value: value if math.isfinite(value) else math.inf)
    layers = ", ".join(f"{value:.3g}" for value in largest)
    return (
        f"at most {top:,.0f} in layer {largest.index(top)}, {top / FLOAT16_MAX:.1%} of the "
        f"{FLOAT16_MAX:,.0f} that float16 holds (layer by layer {layers})"
    )
