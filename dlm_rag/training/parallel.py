"""Training on several processes, each with its share of every batch.

    torchrun --nproc-per-node 2 train.py --config world.yaml

Losses are divided by the counts of the whole batch and gradients are summed, so a step is the same
step on any number of processes, up to the order of additions.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Processes:
    """This process among those that torchrun started; alone without it."""

    rank: int
    count: int
    local_rank: int

    @classmethod
    def join(cls) -> "Processes":
        """Meets the others, over NCCL where there is CUDA and over gloo where there is none."""
        rank, count, local = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
        )
        if count > 1 and not dist.is_initialized():
            dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
        return cls(rank, count, local)

    @property
    def first(self) -> bool:
        """Whether this is the process that reports and saves."""
        return self.rank == 0

    def share(self, items: int) -> range:
        """Which of a batch's items this process computes."""
        return range(self.rank, items, self.count)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the processes."""
        if self.count == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed)
        return summed.tolist()

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Every gradient summed over the processes, all in one message."""
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def leave(self) -> None:
        """Ends the group, so that torch has nothing to complain about."""
        if dist.is_initialized():
            dist.destroy_process_group()
