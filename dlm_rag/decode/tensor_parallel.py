"""Decoding with one model on several devices: rank 0 decides, the others follow.

Rank 0 runs the whole program. What it asks of its model runner it sends to the other ranks, and they ask
the same of theirs: all make the same calls in the same order, so no rank waits for a sum that another does
not enter. What a call does must depend on nothing but what was sent: pools are of one size, and of the
evidence store only what all ranks find there is read.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch

from dlm_rag.config import EngineConfig
from dlm_rag.decode.memory_budget import limit_cuda_allocator
from dlm_rag.decode.model_runner import GIB, DecodeBudget, MaskedModelRunner, ModelRunner
from dlm_rag.decode.sampling import ModelInput
from dlm_rag.diffusion.commit_rules import Proposals
from dlm_rag.errors import RunError
from dlm_rag.evidence.prompt_segments import LaidOutPrompt
from dlm_rag.evidence.segment_kv_cache import CacheStats, default_pool_bytes, has_unified_memory
from dlm_rag.model.checkpoint import Checkpoint, open_checkpoint
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.families.base import BLOCK_SIZE_KEY
from dlm_rag.model.tensor_parallel import (
    TensorParallel,
    get_tensor_parallel,
    split_checkpoint,
)

Result = TypeVar("Result")


def load_on_all_ranks(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, attention: str, quantize: str = "none"
) -> Denoiser:
    """Reads the weights on every rank; for rank 0, whose part of the model `checkpoint` is."""
    ranks, block_size = get_tensor_parallel(), checkpoint.raw_config.get(BLOCK_SIZE_KEY)
    ranks.broadcast([("load", (str(checkpoint.folder), block_size, dtype, attention, quantize))])
    return load_rank(ranks, checkpoint, device, dtype, attention, quantize)


def load_rank(
    ranks: TensorParallel, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, attention: str,
    quantize: str = "none",
) -> Denoiser:  # fmt: skip
    """A rank's part of a model; checkpoint: as `split_checkpoint` gives it."""
    denoiser = Denoiser.from_pretrained(checkpoint, device, dtype, attention, quantize)
    ranks.join(denoiser)
    return denoiser


def _open_runner(
    denoiser: Denoiser, mask_id: int, engine: EngineConfig, budget: DecodeBudget | None
) -> MaskedModelRunner:
    """With a pool that every rank has room for; all must call."""
    ranks, device = denoiser.tensor_parallel, denoiser.device
    assert ranks is not None
    limit_cuda_allocator(engine, device)
    pool = ranks.least(default_pool_bytes(device) / (ranks.size if has_unified_memory(device) else 1))
    if budget is None and engine.prefix_cache_gib is None:
        engine = replace(engine, prefix_cache_gib=pool / GIB)
    return MaskedModelRunner(denoiser, mask_id, engine, budget)


class LeadingModelRunner(ModelRunner):
    """The model runner of rank 0. What needs no sums is sent with the next step."""

    def __init__(
        self, denoiser: Denoiser, mask_id: int, engine: EngineConfig, budget: DecodeBudget | None = None
    ) -> None:
        assert denoiser.tensor_parallel is not None
        self.denoiser, self._ranks = denoiser, denoiser.tensor_parallel
        self.ranks = f", tensor parallel on {self._ranks.size} ranks"
        self._requests = list[tuple[str, tuple[Any, ...]]]()
        self._ranks.in_step = True
        self._ranks.broadcast([("open", (mask_id, engine, budget))])
        self._own = _open_runner(denoiser, mask_id, engine, budget)
        self._ranks.in_step, self.pool = False, self._own.pool

    @property
    def cache_stats(self) -> CacheStats:
        return self._own.cache_stats

    def reset_cache(self) -> None:
        self._requests.append(("reset_cache", ()))
        self._own.reset_cache()
        self.pool = self._own.pool

    def prefetch(self, laid: LaidOutPrompt) -> None:
        self._requests.append(("prefetch", (laid,)))
        self._own.prefetch(laid)

    def release(self, slot: int) -> None:
        self._requests.append(("release", (slot,)))
        self._own.release(slot)

    def propose(self, views: Sequence[ModelInput]) -> list[Proposals]:
        if self._ranks.in_step:  # a step has ended here, and elsewhere perhaps not
            raise RunError("a step has failed, after which the ranks of engine.tensor_parallel are apart")
        self._ranks.in_step = True
        self._ranks.broadcast([*self._requests, ("propose", (views,))], in_step=True)
        self._requests.clear()
        try:
            found = self._own.propose(views)
        except RunError:  # before any sum, as on all ranks
            self._ranks.in_step = False
            raise
        self._ranks.in_step = False
        return found


def lead_ranks(denoiser: Any, work: Callable[[], Result]) -> Result:
    """What `work` gives on rank 0 of those that share a denoiser, on each of them; all must call.

    `work` may decode: the others do meanwhile what its decoder asks of them.
    """
    ranks: TensorParallel | None = getattr(denoiser, "tensor_parallel", None)
    if ranks is None:
        return work()
    found = None
    if ranks.rank:
        follow_rank_0(ranks, denoiser.device, denoiser)
    else:
        found = work()
        ranks.broadcast([])
    result: Result = ranks.broadcast(found)
    return result


def follow_rank_0(ranks: TensorParallel, device: torch.device, denoiser: Any = None) -> None:
    """Does on another rank what rank 0 asks for, until that is done; denoiser: one that is loaded."""
    runner: Any = None
    while requests := ranks.broadcast():
        for name, args in requests:
            if name == "load":
                denoiser = runner = None
                folder, block_size, *how = args
                own = split_checkpoint(open_checkpoint(folder, block_size), ranks.rank, ranks.size)
                denoiser = load_rank(ranks, own, device, *how)
            elif name == "open":
                runner = None
                runner = _open_runner(denoiser, *args)
            else:
                with suppress(RunError):  # which rank 0 has met too
                    getattr(runner, name)(*args)
