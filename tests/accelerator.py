"""An accelerator that is not there: torch's device 'meta' plays it, and every copy and wait is noted.

Not seen are waits inside kernels and for memory; `torch.cuda.set_sync_debug_mode` sees those on a GPU
(test_gpu.py).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dlm_rag

META = torch.device("meta")
PACKAGE = str(Path(dlm_rag.__file__).parent)
aten = torch.ops.aten
WAITS = {  # the size of what they give, or the value, is known on the device only
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
}  # fmt: skip
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


@contextmanager
def traffic() -> Iterator[list[tuple[str, str]]]:
    """What goes to and from the device while it is open: (what, function of the package), in order.

    what: "in" is a copy to the device, "in, waiting" one that the host waits for; "out" is a copy to the
    host, "wait" any other wait. What comes out is zeros.
    """
    asked, autocast, seen = torch.is_autocast_enabled, torch.autocast, list[tuple[str, str]]()

    def enabled(kind="cuda"):
        return kind != "meta" and asked(kind)

    def entered(kind, *words, **more):
        return nullcontext() if kind == "meta" else autocast(kind, *words, **more)

    # Both raise where there is no autocast for a device.
    patched = mock.patch.multiple("torch", is_autocast_enabled=enabled, autocast=entered)
    with patched, _Dispatched(seen), _Built(seen):
        yield seen


def note(seen: list[tuple[str, str]], what: str) -> None:
    """With the innermost function of the package that is at work."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    seen.append((what, frame.f_code.co_name if frame else "the test"))


class _Dispatched(TorchDispatchMode):
    def __init__(self, seen: list[tuple[str, str]]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # inference mode brings operators that consist of others
            found = operator.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if operator in WAITS and any(x.is_meta for x in given):
            note(self._seen, "wait")
            if operator is not aten._local_scalar_dense.default:
                raise RuntimeError(f"{operator} waits for the device")
            return torch.zeros((), dtype=given[0].dtype).item()
        if operator in INDEXING and args[0].is_meta:
            indices = [x for x in args[1] if x is not None]
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                note(self._seen, "wait")
            if any(not x.is_meta for x in indices):
                note(self._seen, "in, waiting")
        if operator is aten._to_copy.default:
            target = torch.device(kwargs.get("device") or given[0].device)
            self._copied(given[0].is_meta, target.type == "meta", bool(kwargs.get("non_blocking")))
            if given[0].is_meta and target.type == "cpu":
                return torch.zeros(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        if operator is aten.copy_.default:
            self._copied(args[1].is_meta, args[0].is_meta, bool(args[2:3] and args[2]))
            if args[1].is_meta and not args[0].is_meta:
                return args[0].zero_()
        return operator(*args, **kwargs)

    def _copied(self, from_device: bool, to_device: bool, without_wait: bool) -> None:
        if from_device != to_device:
            # What comes out must be waited for before it can be read.
            note(self._seen, "out" if from_device else "in" if without_wait else "in, waiting")


class _Built(TorchFunctionMode):
    """Values that torch itself sends, and waits for, where the dispatcher does not see it."""

    def __init__(self, seen: list[tuple[str, str]]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            sent = args[0].is_meta and any(isinstance(part, list | np.ndarray) for part in index)
        else:
            made = function in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
            sent = made and found.is_meta and not (isinstance(args[-1], torch.Tensor) and args[-1].is_meta)
        if sent:
            note(self._seen, "in, waiting")
        return found
