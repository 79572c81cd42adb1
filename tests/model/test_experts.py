"""Mixtures of experts: two ways to one product, what they hold, what they cost."""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch

from dlm_rag import Denoiser
from dlm_rag.model.denoiser import count_encode_flops
from dlm_rag.model.denoiser_config import ExpertsConfig
from dlm_rag.model.layers import MixtureOfExperts, grouped_matmul, multiply_by_expert
from tests.support.tiny_models import tiny_denoiser

FEW = ExpertsConfig(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
ALL_OF_IT = replace(
    FEW, shared_intermediate_size=24, first_k_dense_replace=1, score_function="sigmoid", expert_bias=True,
    n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
)  # fmt: skip


def mixture(experts, width=16):
    torch.manual_seed(0)
    found = MixtureOfExperts(experts, width)
    for value in found.parameters():
        torch.nn.init.normal_(value, std=0.5)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[3, 0, 4, 1], [0, 0, 0, 5], [0, 0, 0, 0]])
def test_the_grouped_product_equals_one_by_one(dtype, sizes):
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), 16, dtype=dtype, requires_grad=True)
    weights = torch.randn(len(sizes), 24, 16, dtype=dtype, requires_grad=True)
    ends = torch.tensor(sizes).cumsum(0).int()
    found = []
    one_by_one = [partial(torch.nn.functional.linear, weight=weight) for weight in weights]
    for out in (grouped_matmul(x, weights, ends), multiply_by_expert(x, one_by_one, ends)):
        found.append((out, *torch.autograd.grad(out.float().square().sum(), (x, weights))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("experts", [FEW, ALL_OF_IT])
def test_a_token_gets_the_sum_of_its_experts_whoever_is_beside_it(experts):
    """Against the definition, token by token and expert by expert."""
    mixed = mixture(experts)
    x = torch.randn(9, 16)
    with torch.no_grad():
        counts, chosen = mixed.gate(x)
        expected = torch.zeros_like(x)
        for n, token in enumerate(x):
            for count, expert in zip(counts[n], chosen[n], strict=True):
                gate, up = (mixed.experts.gate_up_proj[expert] @ token).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                expected[n] += count * (mixed.experts.down_proj[expert] @ inner)
        if mixed.shared_experts is not None:
            expected += mixed.shared_experts(x)
        torch.testing.assert_close(mixed(x), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mixed(x[3:4]), expected[3:4], rtol=1e-5, atol=1e-5)
        assert mixed(x[:0]).shape == (0, 16)


def test_sigmoids_choose_in_float32_whatever_autocast_says():
    router, x = mixture(replace(ALL_OF_IT, num_experts=64)).gate, torch.randn(200, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = router(x)
    for one, other in zip(found, router(x), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("experts", [FEW, ALL_OF_IT])
def test_a_saved_mixture_comes_back_the_same(tmp_path, experts):
    denoiser = tiny_denoiser(experts=experts, partial_rotary_factor=0.5)
    with torch.no_grad():
        for name, value in denoiser.named_parameters():
            if "experts" in name or "gate" in name:
                torch.nn.init.normal_(value, std=0.3)
    denoiser.save_pretrained(tmp_path)
    again = Denoiser.from_pretrained(tmp_path)
    assert again.config == denoiser.config
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids), denoiser(ids))


def test_each_token_pays_for_its_experts_and_each_expert_is_read_once():
    config = tiny_denoiser(experts=FEW).config
    plain = tiny_denoiser(intermediate_size=2 * 16).config  # as wide as the two experts of a token
    router = 2 * 2 * 32 * 8  # layers, FLOPs, width, experts
    for tokens in (1, 50):
        ours, dense = (count_encode_flops(c, [tokens], [tokens], [tokens], 4) for c in (config, plain))
        assert ours.flops == dense.flops + tokens * router
        experts = 8 * (1 - 0.75**tokens)
        assert ours.bytes_moved - dense.bytes_moved == pytest.approx(
            4 * 2 * 32 * (8 + 3 * 16 * (experts - 2))
        )


def test_experts_and_their_choice_learn():
    denoiser = tiny_denoiser(experts=FEW)
    denoiser(torch.arange(12)[None]).square().sum().backward()
    for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        assert denoiser.get_parameter(f"layers.0.mlp.{name}").grad.abs().sum() > 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_layers_leave_the_products_of_experts_out():
    plain, compiled = tiny_denoiser(experts=FEW), tiny_denoiser(experts=FEW)
    torch._dynamo.reset()
    compiled.compile_layers()
    with torch.inference_mode():
        for length in (5, 9, 30):
            ids = torch.arange(length)[None]
            torch.testing.assert_close(compiled(ids), plain(ids), rtol=1e-4, atol=1e-4)
