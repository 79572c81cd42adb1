"""A limit of memory: what the pool gets of it, and what does not fit is refused."""

from types import SimpleNamespace

import pytest
import torch

from dlm_rag.commands.prepare_decoder import check_memory_limit
from dlm_rag.config import EngineConfig
from dlm_rag.engine.runner import MaskedModelRunner
from dlm_rag.engine.segment_kv_cache import default_pool_bytes, has_unified_memory, measure_free_bytes
from dlm_rag.errors import ConfigError
from dlm_rag.machine import limit_cuda_allocator
from tests.support.tiny_models import tiny_denoiser

GIB = 2**30
CPU = torch.device("cpu")


def test_the_pool_is_a_share_of_what_weights_leave_of_the_limit():
    """Without one, of what is free; a pool that is named stays what it is."""
    denoiser = tiny_denoiser()
    weights = sum(p.nbytes for p in denoiser.parameters())
    assert default_pool_bytes(CPU, 0.5 * GIB, weights) == int(0.25 * (0.5 * GIB - weights))
    assert default_pool_bytes(CPU, weights / 2, weights) == 0
    for engine, expected in (
        (EngineConfig(memory_gib=0.5), 0.25 * (0.5 * GIB - weights)),
        (EngineConfig(memory_gib=0.5, prefix_cache_gib=0.25), 0.25 * GIB),
    ):
        assert MaskedModelRunner(denoiser, 0, engine).pool._near.budget == int(expected)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"memory_gib": 2**20}, "that are free on this cpu: lower it"),
        ({"memory_gib": 1e-3}, "weights and engine.prefix_cache_gib alone take"),
        ({"memory_gib": 0.1, "prefix_cache_gib": 0.1}, "weights and engine.prefix_cache_gib alone take"),
    ],
)
def test_a_limit_that_is_not_free_or_too_small_is_refused(engine, says):
    with pytest.raises(ConfigError, match=says):
        check_memory_limit(EngineConfig(**engine), CPU, 2 * 2**20)
    check_memory_limit(EngineConfig(memory_gib=0.1), CPU, 2 * 2**20)


def test_a_gpu_in_the_memory_of_the_host_has_what_the_host_has_free(monkeypatch):
    """A GB10: the driver calls taken what only caches files."""
    device, made = torch.device("cuda", 0), SimpleNamespace(is_integrated=True, total_memory=8 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: made)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 8 * GIB))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    assert has_unified_memory(device) and measure_free_bytes(device) == pytest.approx(
        measure_free_bytes(CPU), rel=0.1
    )
    made.is_integrated = False
    assert not has_unified_memory(device) and measure_free_bytes(device) == 1
    shares = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: shares.append(given))
    limit_cuda_allocator(2, device)
    limit_cuda_allocator(None, device)
    limit_cuda_allocator(2, CPU)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    limit_cuda_allocator(4, torch.device("cuda"))
    assert shares == [(0.25, 0), (0.5, 3)], "torch takes a number here, not `cuda`"
