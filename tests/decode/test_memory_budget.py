"""A limit of memory: what the pool gets of it, and what does not fit is refused."""

import pytest
import torch

from dlm_rag.commands.prepare_decoder import check_memory_limit
from dlm_rag.config import EngineConfig
from dlm_rag.engine.runner import MaskedModelRunner
from dlm_rag.errors import ConfigError
from dlm_rag.machine import default_pool_bytes
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
        runner = MaskedModelRunner(denoiser, 0, engine)
        assert runner.cache.budget_tokens == int(expected) // runner.cache.memory.token_bytes


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
