"""Bytes that a training step holds at its peak, found by running it on tensors without contents.

torch's fake tensors run the real code and know every shape; a dispatch mode adds up what is alive. What
kernels allocate internally is not seen.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlm_rag.config import TrainConfig
from dlm_rag.model.denoiser import Denoiser, FlopCount, count_head_flops
from dlm_rag.model.layers import ExpertStack
from dlm_rag.training.task import Task
from dlm_rag.training.trainer import make_autocast, make_optimizers


class MemoryTracker(TorchDispatchMode):
    """Bytes of all storages that operators made while it was open and that are alive; and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls ask this: the same, without another dispatch
        found = operator(*args, **(kwargs or {}))
        if operator.is_view or not isinstance(found, Tensor | tuple | list):
            return found
        made = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        before = {x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in made:
            if tensor.untyped_storage() not in before:
                self.track_tensor(tensor)
        return found

    def track_tensor(self, tensor: Tensor) -> None:
        """Counts a tensor's storage, once, for as long as it lives."""
        storage = tensor.untyped_storage()
        if storage in self._known or tensor.device.type == "meta":  # fake tensors name a real device
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.live_bytes -= size


def replace_with_empty_weights(denoiser: Denoiser) -> Denoiser:
    """A denoiser made on the meta device, its weights replaced by tensors of the mode that is open."""
    denoiser.attention = "sdpa"
    made: dict[int, nn.Parameter] = {}  # a tied head stays one with the embedding
    for module in denoiser.modules():
        if isinstance(module, ExpertStack):
            module.matmul_by_expert = even_grouped_matmul
        for name, old in module.named_parameters(recurse=False):
            fresh = nn.Parameter(torch.empty(old.shape, dtype=old.dtype), old.requires_grad)
            setattr(module, name, made.setdefault(id(old), fresh))
    return denoiser


def even_grouped_matmul(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """As `layers.grouped_matmul`, for tensors without contents: all experts get as many of the rows."""
    even = pad(x, (0, 0, 0, -len(x) % len(weights))).unflatten(0, (len(weights), -1)).to(weights.dtype)
    return (even @ weights.transpose(1, 2)).flatten(0, 1)[: len(x)]


FLOAT32_BYTES = 4  # bytes of a weight under training, of its gradient, of a number of the optimizer


class StepMemory(NamedTuple):
    """Bytes on one device that holds everything, for one part of a step; and what its forward computes."""

    weights: int
    gradients: int  # of what is trained
    optimizer: int
    activations: int  # what comes on top at the peak of forward and backward, in any part of a step
    parameters: int
    outside_parameters: int  # of the layers
    trained: int
    forward: FlopCount


def estimate_step_memory(task: Task, dtype: torch.dtype, items: int) -> StepMemory:
    """Returns what a part of `items` items needs, with the arithmetic in `dtype`; nothing is allocated."""
    train, denoiser = task.train, task.run.origin.build_on_meta(dtype)
    denoiser.activation_checkpointing = train.activation_checkpointing
    denoiser.activation_checkpointing_interval = train.activation_checkpointing_interval
    root: Any = task.objective(denoiser)
    named = list(denoiser.named_parameters())
    trained = [p for _, p in named if p.requires_grad]
    gradients = FLOAT32_BYTES * sum(p.numel() for p in trained)
    sizes = {
        "weights": gradients + sum(p.nbytes for _, p in named if not p.requires_grad),
        "optimizer": count_optimizer_bytes(denoiser, train),
        "parameters": sum(p.numel() for _, p in named),
        "outside_parameters": sum(p.numel() for name, p in named if not name.startswith("layers.")),
        "trained": sum(p.numel() for p in trained),
    }
    # Gradients of earlier parts are there from the start, and shards of them never grow: these are not in
    # the peak, others are.
    accumulates = train.gradient_accumulation_steps > 1 or train.parallel == "fsdp"
    batch = task.sample_batch(items)
    if train.parallel == "fsdp":  # as weights are gathered
        for parameter in root.parameters():
            parameter.data = parameter.data.to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        replace_with_empty_weights(denoiser)
        for parameter in root.parameters():
            if parameter.requires_grad and accumulates:
                parameter.grad = torch.zeros_like(parameter)
        with MemoryTracker() as alive:
            with make_autocast("cpu", dtype):
                loss, _ = root(batch, batch.counts)
            loss.backward()
    activations = alive.peak_bytes if accumulates else max(0, alive.peak_bytes - gradients)
    forward = denoiser.flop_count + count_head_flops(denoiser.config, batch.counts["supervised"], 2)
    return StepMemory(gradients=gradients, activations=activations, forward=forward, **sizes)


def count_optimizer_bytes(denoiser: Denoiser, train: TrainConfig) -> int:
    """Counts what AdamW (two numbers for each trained weight) or Muon (one) keeps, in float32."""
    return sum(
        FLOAT32_BYTES * (1 if isinstance(optimizer, torch.optim.Muon) else 2) * p.numel()
        for optimizer in make_optimizers(denoiser, train)
        for group in optimizer.param_groups
        for p in group["params"]
    )
