"""The largest numbers of layers, against what a look at every product finds."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_rag.model.activation_range import FLOAT16_MAX, ActivationRange, describe_range
from dlm_rag.model.denoiser_config import ExpertsConfig
from dlm_rag.model.quantize import quantize_linear_layers
from tests.support.tiny_models import tiny_denoiser

IDS = torch.arange(40).view(2, 20)
PRODUCTS = torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten._grouped_mm


class Products(TorchDispatchMode):
    """The largest number that goes into products with matrices and comes out of them."""

    def __init__(self):
        super().__init__()
        self.largest = 0.0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        if operator.overloadpacket in PRODUCTS:
            x = args[1] if operator.overloadpacket is torch.ops.aten.addmm else args[0]
            self.largest = max(self.largest, *(t.abs().max().item() for t in (x, made)))
        return made


def look(denoiser):
    with torch.no_grad(), Products() as products, ActivationRange(denoiser) as seen:
        denoiser(IDS)
    return seen.largest_by_layer(), products.largest


@pytest.mark.parametrize("experts", [None, ExpertsConfig(4, 2, 16, first_k_dense_replace=1)])
def test_the_largest_is_what_products_take_and_give(experts):
    """What goes into a down-projection is large where the one before it is; then nothing is watched."""
    denoiser = tiny_denoiser(num_hidden_layers=3, experts=experts)
    block = denoiser.layers[1].mlp
    with torch.no_grad():
        (block.up_proj.weight if experts is None else block.experts.gate_up_proj).mul_(1000)
        (block.down_proj.weight if experts is None else block.experts.down_proj).mul_(1e-4)
    kept = [dict(vars(module)) for module in denoiser.modules() if hasattr(module, "matmul_by_expert")]
    largest, expected = look(denoiser)
    assert len(largest) == 3 and largest.index(max(largest)) == 1
    assert max(largest) == pytest.approx(expected)
    assert not any(module._forward_hooks for module in denoiser.modules())
    after = [vars(module) for module in denoiser.modules() if hasattr(module, "matmul_by_expert")]
    assert after == kept


@pytest.mark.parametrize("experts", [None, ExpertsConfig(4, 2, 16)])
def test_quantised_layers_are_seen_too(experts):
    denoiser = tiny_denoiser(experts=experts)
    plain, _ = look(denoiser)
    quantize_linear_layers(denoiser, "int8", experts=True)
    low, _ = look(denoiser)
    assert low == pytest.approx(plain, rel=0.1) and low != plain


def test_what_float16_cannot_hold_is_seen_in_float16_as_in_float32():
    found = []
    for dtype in (torch.float32, torch.float16):
        denoiser = tiny_denoiser()
        with torch.no_grad():
            denoiser.layers[1].mlp.up_proj.weight.fill_(3000)
            denoiser.layers[1].mlp.gate_proj.weight.mul_(100)
        (first, last), _ = look(denoiser.to(dtype))
        assert first < FLOAT16_MAX and not last <= FLOAT16_MAX
        found.append(describe_range([first, last]))
    assert all("in layer 1" in text for text in found)
