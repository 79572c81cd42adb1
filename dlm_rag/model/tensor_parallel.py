"""One model on several devices: each rank has some of the heads and a part of every feed-forward net.

Rows of the q, k, v, gate and up projections and columns of o and down are split; what o_proj and a
feed-forward net give is summed over the ranks. Experts are split inside, so every rank has all of them.
Embeddings, norms, routers and the head are whole on every rank. A `DenoiserConfig` with the heads and
widths of one rank makes all else local: layers, keys and values, and what is counted of them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlm_rag.errors import ConfigError, RunError
from dlm_rag.model.checkpoint import Checkpoint
from dlm_rag.model.denoiser_config import GROUPED_MATMUL_MULTIPLE, DenoiserConfig
from dlm_rag.model.families.base import TensorSource
from dlm_rag.model.layers import list_tensor_shapes

MEETING_TIMEOUT = timedelta(seconds=15)  # for which ranks wait for one that does not say it is there
STEP_TIMEOUT = timedelta(seconds=20)  # for which a rank waits for another within a step
# What gloo, NCCL and torch's store say only of a lost process: NCCL's name is in all of its errors, and
# `socket` in those of any system call.
_GONE = re.compile(
    r"(connection|socket) (was |is )?(closed|reset|refused|aborted)|closed by (the )?peer|reset by peer"
    r"|broken pipe|timed? ?out|recv, got 0 bytes|ncclRemoteError|remote process exit",
    re.IGNORECASE,
)


def is_peer_lost(error: BaseException) -> bool:
    """Whether an error of torch's is that another process is gone."""
    return not isinstance(error, RunError) and _GONE.search(str(error)) is not None


@dataclass
class TensorParallel:
    """This rank among those that share a model.

    group: of sums, which are waited for as long as its timeout. idle_group: of messages of rank 0, which
    has none while nothing is asked; None: the default group. in_step: whether rank 0 has begun a step and
    not ended it. axes: of a model in training, which axis of a parameter is split, by its name.
    """

    rank: int
    size: int
    group: Any = None
    in_step: bool = False
    idle_group: Any = None
    axes: dict[str, int] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> "TensorParallel":
        return self  # copies of a denoiser are on the same ranks

    def join(self, denoiser: Any) -> None:
        """Makes a denoiser of this rank's shapes a part of the whole one."""
        denoiser.tensor_parallel = self
        for layer in denoiser.layers:
            layer.self_attn.o_proj.register_forward_hook(self.all_reduce)
            layer.mlp.register_forward_hook(self.all_reduce)

    def all_reduce(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """A forward hook: the sum of what this module gives on all ranks; of its gradients in backward."""
        if output.requires_grad:
            summed: Tensor = _AllReduce.apply(output, self.group)
            return summed
        dist.all_reduce(output, group=self.group)
        return output

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter; a view."""
        return whole.chunk(self.size, self.axes[name])[self.rank] if name in self.axes else whole

    def whole_shape(self, name: str, part: Sequence[int]) -> list[int]:
        """The shape of a parameter of whose parts each has the shape `part`."""
        return [n * self.size if axis == self.axes.get(name) else n for axis, n in enumerate(part)]

    def least(self, number: float, group: Any = None) -> float:
        """The least number of all ranks, each of which must call; group: None to wait however late."""
        value = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=group or self.idle_group)
        return value.item()

    def broadcast(self, message: Any = None, in_step: bool = False) -> Any:
        """The message of rank 0, on every rank; in_step: whether rank 0 waits `STEP_TIMEOUT` at most."""
        limited = torch.tensor(int(in_step))
        # Small enough not to wait for whoever does not read it.
        dist.broadcast(limited, group=self.idle_group, group_src=0)
        box = [message]
        dist.broadcast_object_list(
            box, group=self.group if limited.item() else self.idle_group, group_src=0
        )
        return box[0]


class _AllReduce(torch.autograd.Function):
    """A sum over ranks, whose gradient on a rank is the sum of what each has of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group, summed = group, part.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        slope = slope.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(slope, group=ctx.group)
        return slope, None


@cache
def get_tensor_parallel() -> TensorParallel:
    """This process among all of its default group, which must exist; all make their first call together."""
    return TensorParallel(dist.get_rank(), dist.get_world_size(), dist.new_group(timeout=STEP_TIMEOUT))


def split_config(
    config: DenoiserConfig, size: int, setting: str = "engine.tensor_parallel"
) -> DenoiserConfig:
    """With the heads and widths of one of `size` ranks; raises `ConfigError` where they do not divide."""

    def divide(holder: Any, **units: int) -> Any:
        for name, unit in units.items():
            if (value := getattr(holder, name)) % (size * unit):
                parts = f" into multiples of {unit}" if unit > 1 else ""
                raise ConfigError(f"{setting}={size} must divide {name}={value}{parts}")
        return replace(holder, **{name: getattr(holder, name) // size for name in units})

    if config.experts is not None:
        inner = {"moe_intermediate_size": GROUPED_MATMUL_MULTIPLE, "shared_intermediate_size": 1}
        config = replace(config, experts=divide(config.experts, **inner))
    dense = {"intermediate_size": 1} if config.dense_layers else {}
    local: DenoiserConfig = divide(config, num_key_value_heads=1, num_attention_heads=1, **dense)
    return local


def split_checkpoint(checkpoint: Checkpoint, rank: int, size: int) -> Checkpoint:
    """What a rank reads of a checkpoint, as a checkpoint of its own. Raises `ConfigError`."""
    if size == 1:
        return checkpoint
    config, sources = split_config(checkpoint.config, size), {}
    whole, local = list_tensor_shapes(checkpoint.config), list_tensor_shapes(config)
    for ours, parts in checkpoint.tensor_sources.items():
        pieces = ((path, _split_source(part, whole[ours], local[ours], rank)) for path, part in parts)
        sources[ours] = [(path, piece) for path, found in pieces for piece in found]
    return replace(checkpoint, config=config, tensor_sources=sources)


def _split_source(
    part: TensorSource, whole: tuple[int, ...], local: tuple[int, ...], rank: int
) -> list[TensorSource]:
    """What a rank reads of a part of a tensor; whole, local: the shape of ours, of all and of one rank."""
    axis = next((n for n, length in enumerate(whole) if length != local[n]), None)
    if axis is None:
        return [part]
    expert, stacked = part.target_index[:1], len(whole) == 3 and axis == 1  # gate, then up, in one tensor
    width, own = whole[axis] // (1 + stacked), local[axis] // (1 + stacked)
    halves = [part.target_index[1].start // width] if len(part.target_index) > 1 else range(1 + stacked)
    found = []
    for half in halves:
        start = part.first_source_row + rank * own + (0 if expert else half * width)
        source = (*[slice(None)] * (axis - len(expert)), slice(start, start + own))
        target = (*(expert or [slice(None)] * axis), slice(half * own, (half + 1) * own))
        found.append(replace(part, source_index=source, target_index=target if stacked else expert))
    return found
