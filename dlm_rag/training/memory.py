"""Bytes that a training step holds at its peak, found by running it on tensors without contents.

torch's fake tensors run the real code and know every shape; a dispatch mode adds up what is alive. What
kernels allocate inside themselves is not seen.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlm_rag.config import TrainConfig
from dlm_rag.data.examples import Example
from dlm_rag.model.denoiser import Denoiser, DenoiserConfig
from dlm_rag.training.objective import Counts, Objective, Weights, arithmetic
from dlm_rag.training.start import add_adapters
from dlm_rag.training.trainer import make_optimizers


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operators made while it was open and that are alive; and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return found

    def know(self, tensor: Tensor) -> None:
        """Leaves out what was there before."""
        self._known.add(tensor.untyped_storage())

    def add(self, tensor: Tensor) -> None:
        """Counts a tensor's storage, once, for as long as it lives."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device that holds everything."""

    weights: int
    gradients: int  # of what is trained
    optimizer: int
    activations: int  # what comes on top at the peak of forward and backward
    parameters: int
    trained: int


def step_memory(
    shape: DenoiserConfig, train: TrainConfig, layout: str, examples: Sequence[Example], dtype: torch.dtype
) -> StepMemory:
    """What one part of a step needs, with the arithmetic in `dtype`; nothing is allocated."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        denoiser = bare_denoiser(shape, train.lora_rank, dtype)
        denoiser.checkpointing = train.checkpointing
        objective = Objective(denoiser, layout, frozenset({0}), train.logit_chunk)
        counts, weights = Counts.of(examples, frozenset(), 1.0), Weights()
        alive = LiveBytes()
        for tensor in (*denoiser.parameters(), *denoiser.buffers()):
            alive.know(tensor)
        with alive:
            with arithmetic("cpu", dtype):
                loss, _ = objective(examples, counts, weights)
            loss.backward()
    parameters = list(denoiser.parameters())
    trained = [p for p in parameters if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trained)
    return StepMemory(
        weights=sum(p.numel() * p.element_size() for p in parameters),
        gradients=gradients,
        optimizer=optimizer_bytes(denoiser, train),
        # The peak falls into backward, when part of the gradients is there; those are counted above.
        activations=max(0, alive.peak - gradients),
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in trained),
    )


def bare_denoiser(shape: DenoiserConfig, lora_rank: int, dtype: torch.dtype) -> Denoiser:
    """A denoiser in the dtypes of training, with weights that have no contents in a fake tensor mode."""
    with torch.device("meta"):
        denoiser = Denoiser(shape)
        if lora_rank:
            add_adapters(denoiser, lora_rank, seed=0)
    made: dict[int, nn.Parameter] = {}  # a tied head stays one with the embedding
    for module in denoiser.modules():
        for name, old in module.named_parameters(recurse=False):
            kind = torch.float32 if old.requires_grad else dtype
            fresh = nn.Parameter(torch.empty(old.shape, dtype=kind), old.requires_grad)
            setattr(module, name, made.setdefault(id(old), fresh))
    return denoiser


def optimizer_bytes(denoiser: Denoiser, train: TrainConfig) -> int:
    """AdamW keeps two numbers for each trained weight, Muon one."""
    total = 0
    for optimizer in make_optimizers(denoiser, train):
        kept = 1 if isinstance(optimizer, torch.optim.Muon) else 2
        for group in optimizer.param_groups:
            total += sum(kept * p.numel() * p.element_size() for p in group["params"])
    return total
