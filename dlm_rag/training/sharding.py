"""The objective on several processes: in whole copies (DDP) or in shards (FSDP2)."""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dlm_rag.evidence.encode_segments import encode_canvases
from dlm_rag.evidence.prompt_segments import LaidOutRow
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.packed_batch import Segment
from dlm_rag.training.distributed import DistributedContext


def wrap_in_ddp(objective: nn.Module) -> nn.Module:
    """The objective whose gradients DDP sums over whole copies, all with the first process's weights."""
    copies: Any = nn.parallel.DistributedDataParallel
    names = ("forward_sync_buffers", "broadcast_buffers")  # torch's new name and its old one
    quiet = next(name for name in names if name in inspect.signature(copies).parameters)
    wrapped: nn.Module = copies(objective, gradient_as_bucket_view=True, **{quiet: False})
    return wrapped


def apply_fsdp(
    objective: nn.Module, denoiser: Denoiser, count: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Shards the objective in place, over `count` processes, before its weights have contents.

    dtype: of the arithmetic; shards are gathered in it, gradients are summed in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    # Values are views of what projects them; nothing here writes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    mesh = init_device_mesh(device.type, (count,))
    # Heads stay in float64; the frozen weights are in the dtype already.
    low = dtype != torch.float32 and denoiser.heads is None
    # Inputs stay as they are: the rotary angles need float32.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if low else None,
        reduce_dtype=torch.float32 if low else None,
        cast_forward_inputs=False,
    )
    for module in list(objective.modules()):  # also of a reference
        if isinstance(module, Denoiser):
            for block in module.layers:
                fully_shard(block, mesh=mesh, mp_policy=policy)
    root: Any = fully_shard(objective, mesh=mesh, mp_policy=policy)
    root.small_call = partial(_dummy_forward, denoiser)
    register_fsdp_forward_method(root, "small_call")  # as the root's own: it may be the first call of all


def skip_gradient_sync(root: nn.Module) -> AbstractContextManager[Any]:
    """While it is open, backward sums no gradients of whole copies: for all parts but the last.

    Shards sum theirs in every part: kept until the last, they would be as large as all weights.
    """
    return root.no_sync() if isinstance(root, nn.parallel.DistributedDataParallel) else nullcontext()


@contextmanager
def allow_independent_forwards(
    root: nn.Module, denoiser: Denoiser, processes: DistributedContext
) -> Iterator[None]:
    """While it is open every process may call the denoiser by itself, each as often as it needs.

    Layers in shards are gathered by all processes together. So before each call the processes agree
    whether anybody still has one to make; who has none left makes a small one with the others. What a
    process raises is not waited for: it ends the run.
    """
    module: Any = root
    if not hasattr(module, "unshard"):
        yield
        return
    # Layers find their root, and get the memory that they are gathered into, at their first call. Were it a
    # decoder's, each would be a root, in memory of torch.inference_mode that no backward can use.
    module.small_call()
    module.unshard()
    agree = denoiser.layers[0].register_forward_pre_hook(
        lambda *_: processes.any_rank(True) and None, prepend=True
    )
    try:
        yield
    finally:
        agree.remove()
    while processes.any_rank(False):
        _dummy_forward(denoiser)
    module.reshard()


def _dummy_forward(denoiser: Denoiser) -> None:
    """One token through all layers."""
    encode_canvases(denoiser, [LaidOutRow((), Segment((0, 0), 0), 0)], None, [[0]])


def gather_full_tensor(value: Tensor) -> Tensor:
    """A tensor gathered from its shards, where it has any."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value
