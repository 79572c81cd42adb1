"""A CUDA device that is not there: tensors on `cuda` are fake, tensors on the CPU are real.

The package runs as it is, with `model.device=cuda`. Tensors on the host have contents; copied to the device
they keep shape, dtype and strides; what comes back is zeros. Every copy and every wait is noted. Where an
operator takes tensors of two devices, or a product takes two dtypes, or the host needs a value that only
the device has, the run ends with a traceback.

Not seen: what kernels compute, the memory they take, waits inside them that `_waits_inside` does not know.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)  # fmt: skip
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dlm_rag
from dlm_rag.model import layers

CUDA = torch.device("cuda", 0)
PACKAGE = str(Path(dlm_rag.__file__).parent)
GIB = 2**30
aten = torch.ops.aten
TrafficLog = list[tuple[str, str]]
PLAIN_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor)
COPY_OPS = (aten._to_copy.default, aten.copy_.default)
INDEXED_WRITE_OPS = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# These refuse floating-point numbers of two dtypes, which fake tensors do not see.
SAME_DTYPE_OPS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default,
    aten.index_put.default, aten.index_put_.default, aten.index_add.default, aten.index_copy.default,
    aten.index_copy_.default, aten.scatter.src, aten.scatter_add.default, aten.scatter_add_.default,
}  # fmt: skip


@contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0), count: int = 1) -> Iterator[TrafficLog]:
    """While it is open there are `count` GPUs of that compute capability; this process uses the first.

    Yields the traffic so far, in order: (what, function of the package). what: "in" is a copy to the device
    and "out" one to the host, followed by ", waiting" where the host waits for it; "wait" is another wait.
    """
    seen = TrafficLog()
    with _patched(capability, count, _Stream(seen)), _Device(seen, capability):
        yield seen


def log_traffic(seen: TrafficLog, what: str) -> None:
    """Adds it, with the innermost function of the package that is at work."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    seen.append((what, frame.f_code.co_name if frame else "the test"))


class _Stream:
    """Every stream of the device, and each of its events."""

    def __init__(self, seen: TrafficLog) -> None:
        self.seen = seen

    def record_event(self, *_: Any) -> "_Stream":
        return self

    def record(self, *_: Any) -> None:
        pass

    wait = wait_event = wait_stream = record

    def synchronize(self) -> None:
        log_traffic(self.seen, "wait")

    def is_capturing(self) -> bool:
        return False


class _Fake(FakeTensorMode):
    avoid_device_init = True  # whatever `torch.cuda.is_available` says


class _Device(TorchDispatchMode):
    def __init__(self, seen: TrafficLog, capability: tuple[int, int]) -> None:
        super().__init__()
        self._seen, self._capability = seen, capability
        self._fake = _Fake(allow_non_fake_inputs=True)
        self._pinned: WeakSet[torch.UntypedStorage] = WeakSet()

    def __enter__(self) -> "_Device":
        # As FakeTensorMode does: `torch.tensor(..., device="cuda")` becomes a copy that is seen here.
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._lifted)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN_TENSOR_TYPES for kind in types):
            return NotImplemented  # shards: their own code takes them apart
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, torch.Tensor)]
        if operator.namespace == "prim":
            with self._fake:
                return operator(*args, **kwargs)
        on_host = not any(isinstance(x, FakeTensor) for x in given)
        if on_host and not any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves):
            return self._on_host(operator, args, kwargs)
        with self:  # inference mode brings operators that consist of others
            found = operator.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        if (
            operator in SAME_DTYPE_OPS
            and len(dtypes := {x.dtype for x in given if x.is_floating_point()}) > 1
        ):
            raise RuntimeError(f"{operator} got numbers of {sorted(map(str, dtypes))}")
        if operator is aten.index.Tensor or operator in INDEXED_WRITE_OPS:
            self._note_indices([x for x in args[1] if x is not None])
        if self._waits_inside(operator, given):
            log_traffic(self._seen, "wait")
            with self._fake:
                found = _create_grouped_mm_output_tensor(*given, None)
        elif operator in COPY_OPS:
            return self._copied(operator, args, kwargs)
        else:
            return self._computed(operator, args, kwargs)
        return found

    def _on_host(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        found = operator(*args, **kwargs)
        if pinned:
            self._pinned.add(found.untyped_storage())
        return found

    def _computed(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if operator is aten.empty_like.default and _is_host(kwargs.get("device")):
            with self:
                return torch.empty(args[0].shape, dtype=args[0].dtype, pin_memory=kwargs.get("pin_memory"))
        try:
            with self._fake:
                return operator(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            log_traffic(self._seen, "wait")
            raise RuntimeError(f"{operator} waits for the device") from None

    def _copied(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Between host and device; on the device too."""
        target, source = args[:2] if operator is aten.copy_.default else (None, args[0])
        from_host = not isinstance(source, FakeTensor)
        to_host = _is_host(kwargs.get("device")) if target is None else not isinstance(target, FakeTensor)
        if from_host == to_host:
            return self._computed(operator, args, kwargs)
        host = source if from_host else target
        free = host is not None and host.untyped_storage() in self._pinned
        free = free and bool(kwargs.get("non_blocking") or args[2:3] == (True,))
        log_traffic(self._seen, ("in" if from_host else "out") + ("" if free else ", waiting"))
        if from_host:
            return self._computed(operator, args, kwargs)
        if target is not None:
            return target.zero_()
        return torch.zeros(source.shape, dtype=kwargs.get("dtype", source.dtype))

    def _note_indices(self, indices: Sequence[torch.Tensor]) -> None:
        if any(not isinstance(x, FakeTensor) for x in indices):
            log_traffic(self._seen, "in, waiting")
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
            log_traffic(self._seen, "wait")

    def _waits_inside(self, operator: Any, given: Sequence[torch.Tensor]) -> bool:
        """Grouped products of other dtypes than bfloat16, and of other generations, are computed one by one
        (torch 2.11 to 2.13, `_grouped_mm_cuda`).
        """
        fast = given and given[0].dtype == torch.bfloat16 and self._capability[0] in (9, 10)
        return operator is aten._grouped_mm.default and not fast


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _swap(old: torch.Tensor, new: torch.Tensor, swap: Any = torch.utils.swap_tensors) -> None:
    """For `Module.to`: parameters stay the same objects, as on a GPU."""
    if isinstance(old, FakeTensor):  # whose mode refers to it
        old.data = new.data
    else:
        swap(old, new)


@contextmanager
def _capture(stream: "_Stream", graph: Any, pool: Any, capture_error_mode: str) -> Iterator[None]:
    """A step that is captured: once all has run before, it neither copies nor waits."""
    assert graph is not None and pool is not None and capture_error_mode == "thread_local"
    before = [*stream.seen]
    yield
    assert stream.seen == before


@contextmanager
def _patched(capability: tuple[int, int], count: int, stream: "_Stream") -> Iterator[None]:
    """What torch and the package are told of the device."""
    name, memory = "a GPU that is not there", 80 * GIB
    properties = SimpleNamespace(
        name=name, total_memory=memory, major=capability[0], minor=capability[1], is_integrated=False
    )
    told: dict[str, Any] = {
        "is_available": True, "device_count": count, "current_device": 0, "_lazy_init": None,
        "get_device_capability": capability, "get_device_name": name, "get_device_properties": properties,
        "mem_get_info": (memory, memory), "memory_reserved": 0, "memory_allocated": 0, "empty_cache": None,
        "max_memory_allocated": 0, "set_device": None, "set_per_process_memory_fraction": None,
        "get_rng_state": None, "set_rng_state": None,
    }  # fmt: skip
    done: dict[str, Any] = {name: lambda *_, value=value, **__: value for name, value in told.items()}
    done |= {
        "Stream": lambda *_, **__: stream, "Event": lambda *_, **__: stream,
        "stream": lambda *_: nullcontext(), "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream, "graph_pool_handle": object,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None), "graph": partial(_capture, stream),
    }  # fmt: skip
    with ExitStack() as stack:
        for name, value in done.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        now = mock.patch.object(torch.accelerator, "current_stream", done["current_stream"])
        stack.enter_context(now)
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda *_: None))
        stack.enter_context(mock.patch.object(torch.utils, "swap_tensors", _swap))
        # The threads with which transformers reads weights do not see this mode.
        stack.enter_context(mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"))
        for function in (layers.get_backend_problem, layers._first_working):
            function.cache_clear()
            stack.callback(function.cache_clear)
        yield
