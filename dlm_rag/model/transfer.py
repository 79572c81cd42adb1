"""What goes to the device and what comes back: one copy in, one wait out, and no other wait anywhere."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes, so that every part can be seen as numbers of its own width


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, with their shapes and dtypes, by one copy from pinned memory.

    The host does not wait for it. On a CPU the tensors are views of the arrays.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.nbytes] = _bytes_of(array)
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def to_host(tensor: Tensor) -> NDArray[Any]:
    """The tensor as an array, once the device has computed it: the one place where the host waits."""
    if tensor.device.type != "cuda":
        return tensor.detach().cpu().numpy()
    allowed = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        return tensor.detach().cpu().numpy()
    finally:
        torch.cuda.set_sync_debug_mode(allowed)


def _bytes_of(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
