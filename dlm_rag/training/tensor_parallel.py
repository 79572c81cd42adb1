"""Training a model in parts, beside copies or shards of each part; the parts are those of decoding.

What attention and a feed-forward net give is summed over the ranks of a part each, and so are its gradients
on their way back. The loss of a rank is its share of the loss: of what all ranks have whole (embeddings,
norms, the head, halves of adapters) each computes a part of the gradient, and as their sum it is the same
on all, bit for bit. A tensor's place in the whole model is that of a DTensor on the mesh of all processes,
from which checkpoints and exports follow.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlm_rag.config import Config, TrainConfig
from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.tensor_parallel import split_config
from dlm_rag.training.distributed import DistributedContext


def check_tensor_parallel(config: Config, train: TrainConfig, shape: DenoiserConfig) -> None:
    """Raises `ConfigError` where `train.tensor_parallel` does not go with the model or other settings."""
    if train.tensor_parallel == 1:
        return
    split_config(shape, train.tensor_parallel, "train.tensor_parallel")
    for found, reason in (
        (
            train.context_parallel > 1,
            "shares batches, context_parallel sequences: set one of them to 1",
        ),
        (train.optimizer == "muon", "splits matrices, which muon needs whole: set train.optimizer=adamw"),
        (shape.experts is not None, "does not split experts that are trained: set train.parallel=fsdp"),
        (train.compile, "sums within what train.compile would compile: leave that out"),
    ):
        if found:
            raise ConfigError(f"train.tensor_parallel={train.tensor_parallel} {reason}")


def place_tensor(name: str, value: Any, processes: DistributedContext) -> Any:
    """A parameter of the denoiser, or what has its shape, in its place in the whole model; the memory is
    the same. Without tensor parallel it is there.
    """
    if processes.mesh is None or not value.dim():
        return value
    from torch.distributed.tensor import DTensor, Replicate, Shard

    ranks, shards = processes.tensor_parallel, getattr(value, "placements", (Replicate(),))
    part = Shard(ranks.axes[name]) if name in ranks.axes else Replicate()
    whole = torch.empty(ranks.whole_shape(name, value.shape), device="meta")
    return DTensor.from_local(
        get_local(value).detach(), processes.mesh, (part, *shards), run_check=False, shape=whole.shape,
        stride=whole.stride(),
    )  # fmt: skip


def get_local(value: Tensor) -> Tensor:
    """What of a tensor lies on this process."""
    return value.to_local() if hasattr(value, "to_local") else value


def gather_shards(value: Any) -> Tensor:
    """A whole tensor; all processes that have shards of it must call."""
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def compute_gradient_norm(trained: dict[str, nn.Parameter], processes: DistributedContext) -> Tensor:
    """The norm of all gradients, each number once wherever it lies: the same on all processes, to the bit.

    Gradients that ranks each have a part of are summed before.
    """
    gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
    ranks, total_norm = processes.tensor_parallel, torch.nn.utils.get_total_norm
    if ranks.size == 1:
        return gather_shards(total_norm(gradients.values()))
    split, whole = (
        [get_local(value) for name, value in gradients.items() if (name in ranks.axes) == inside]
        for inside in (True, False)
    )
    for value in whole:
        dist.all_reduce(value, group=ranks.group)
    copies = 1 if hasattr(next(iter(gradients.values())), "placements") else processes.mesh["dp"].size()
    squares = (total_norm(whole).double() ** 2 / ranks.size + total_norm(split).double() ** 2) / copies
    dist.all_reduce(squares)
    return squares.sqrt().to(whole[0].dtype)
