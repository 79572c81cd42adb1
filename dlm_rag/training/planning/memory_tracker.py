"""Bytes that are alive while the real code runs, on tensors with or without contents.

torch's fake tensors run the real code and know every shape; a dispatch mode adds up what is alive. What
kernels allocate internally is not seen.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.layers import ExpertStack

RESERVED_MEMORY_FRACTION = 0.08  # of a device's memory, for its context, workspaces and fragments


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
