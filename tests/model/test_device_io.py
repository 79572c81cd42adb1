"""Between host and device: contents, dtypes and shapes stay; one buffer for all."""

import numpy as np
import pytest
import torch

from dlm_rag.model.packed_batch import ALIGNMENT_BYTES, to_device, to_host

ARRAYS = [
    np.arange(7, dtype=np.int64), np.array([True, False, True]), np.zeros((0, 3), np.float32),
    np.arange(10, dtype=np.float32).reshape(5, 2).T, np.array(2.5), np.arange(3, dtype=np.int32),
]  # fmt: skip


def check(device):
    tensors = to_device(ARRAYS, device)
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        assert tensor.device.type == device.type and tensor.shape == array.shape
        assert tensor.dtype == torch.from_numpy(array).dtype
        if device.type != "meta":
            assert np.array_equal(to_host(tensor), array)
        if device.type != "cpu":
            assert tensor.storage_offset() * tensor.element_size() % ALIGNMENT_BYTES == 0
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def test_arrays_come_back_as_they_went_or_lie_in_one_buffer():
    check(torch.device("cpu"))
    assert to_device([], torch.device("cuda")) == []
    assert len(check(torch.device("meta"))) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_nothing_but_the_marked_wait_waits():
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(check(torch.device("cuda"))) == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
