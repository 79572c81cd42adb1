"""Ranges of tokens on the host, and between host and device: one copy in, one copy and one wait out."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT_BYTES = 16  # bytes; what is read as wide numbers must begin at a multiple of them


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, each with its dtype and shape; nothing waits.

    They travel in one copy from pinned memory and are views of one buffer; on a CPU they share the memory
    of the arrays.
    """
    arrays = [np.asarray(array, order="C") for array in arrays]
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu" or not tensors:
        return tensors
    sizes = [-(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for array in arrays]
    starts = list(accumulate(sizes, initial=0))
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    room = packed.numpy()
    for start, array in zip(starts, arrays, strict=False):
        room[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    # Pinned memory is kept until it has been read; on MPS nothing does that (pytorch #189690).
    there = packed.to(device, non_blocking=device.type != "mps")
    typed = {dtype: there.view(dtype) for dtype in {tensor.dtype for tensor in tensors}}
    found = []
    for start, tensor in zip(starts, tensors, strict=False):
        first = start // tensor.itemsize
        part = typed[tensor.dtype][first : first + tensor.numel()]
        found.append(part if tensor.dim() == 1 else part.view(tensor.shape))
    return found


def gather_to_host(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """The contents of tensors (n,) of one device, each with its dtype, in one copy."""
    if not tensors[0].is_cuda:
        return [to_host(tensor) for tensor in tensors]
    packed = to_host(torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors]))
    ends = list(accumulate(tensor.nbytes for tensor in tensors))
    parts = np.split(packed, ends[:-1])
    dtypes = [torch.empty(0, dtype=tensor.dtype).numpy().dtype for tensor in tensors]
    return [part.view(dtype) for part, dtype in zip(parts, dtypes, strict=True)]


def to_host(tensor: Tensor) -> NDArray[Any]:
    """The contents of a tensor: the one place that waits for the device."""
    tensor = tensor.detach()
    if not tensor.is_cuda:
        return tensor.cpu().numpy()
    found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    found.copy_(tensor, non_blocking=True)
    # An event, so that `torch.cuda.set_sync_debug_mode` finds the waits that nobody meant.
    torch.cuda.current_stream(tensor.device).record_event().synchronize()
    return found.numpy()


def concatenate_ranges(starts: NDArray[np.int64], lengths: Sequence[int]) -> NDArray[np.int64]:
    """(sum of lengths,) for each row the numbers from its start on, as many as its length."""
    before = np.cumsum(lengths) - lengths
    return np.arange(sum(lengths)) + np.repeat(starts - before, lengths)


def make_consecutive_ranges(lengths: Sequence[int]) -> list[range]:
    """The places of consecutive pieces of `lengths`, from 0 on."""
    return [range(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
