"""Training on several processes, each with its share of every batch.

    torchrun --nproc-per-node 2 train.py --config world.yaml

Losses are divided by the counts of the whole batch and gradients are summed, so a step is the same
step on any number of processes, in whole copies (DDP) or shards (FSDP): up to the order of additions in
float32, and up to what shards round before they are gathered in the dtypes below it (docs/training.md).
"""

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlm_rag.cli import parse_int
from dlm_rag.config import TrainConfig
from dlm_rag.errors import ConfigError, UserError
from dlm_rag.machine import choose_device
from dlm_rag.model.context_parallel import ContextParallel


@dataclass(frozen=True)
class DistributedContext:
    """This process among those that torchrun started; alone without it.

    `context_parallel_size` neighbours work on the same sequences, each on its part of them. None waits for
    another for longer than `timeout`; where it is None, than torch's own.
    """

    rank: int
    world_size: int
    local_rank: int
    context_parallel_size: int = 1
    timeout: timedelta | None = None

    @classmethod
    def init(cls, timeout_minutes: float | None = None) -> "DistributedContext":
        """Meets the others, over NCCL where there is CUDA and over gloo where there is none.

        Who waits for another for so long raises what `failure_messages.is_peer_lost` knows: a cable that
        was pulled out closes no connection. Raises `ConfigError` where the environment is not as torchrun
        leaves it.
        """
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}  # with what is least
        rank, count, local = (
            parse_int(os.environ.get(name, str(least)), least, f"{name}=") for name, least in names.items()
        )
        lacking = {"RANK", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()
        if rank >= count or (count > 1 and lacking):
            raise ConfigError(
                f"RANK={rank} and WORLD_SIZE={count} in the environment are not torchrun's: unset them, or "
                "start with torchrun"
            )
        timeout = None if timeout_minutes is None else timedelta(minutes=timeout_minutes)
        if count > 1 and not dist.is_initialized():
            backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=timeout)
        return cls(rank, count, local, timeout=timeout)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that reports and saves."""
        return self.rank == 0

    def local_items(self, items: int) -> range:
        """Which of a batch's items this process computes."""
        return range(
            self.rank // self.context_parallel_size, items, self.world_size // self.context_parallel_size
        )

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the processes."""
        if self.world_size == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed)
        return summed.tolist()

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is up on any process."""
        return self.all_reduce_sum([float(flag)])[0] > 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """The value of each process, by rank; all must call."""
        found = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(found, value)
        return found

    def check_on_main(self, check: Callable[[], object]) -> None:
        """Calls `check` on the first process; all raise the `UserError` that it raises. All must call."""
        raised: UserError | None = None
        if self.is_main:
            try:
                check()
            except UserError as error:
                raised = error
        if (raised := self.all_gather_object(raised)[0]) is not None:
            raise raised

    def local_device(self, name: str) -> torch.device:
        """Where this process computes; CUDA devices are dealt out by the place on the machine."""
        device = choose_device(name)
        if device.type == "cuda" and device.index is None:
            if self.local_rank >= torch.cuda.device_count():
                raise ConfigError(
                    f"this machine has {torch.cuda.device_count()} CUDA device(s), too few for process "
                    f"{self.local_rank}: set --nproc-per-node to so many"
                )
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        return device

    def with_context_parallel(self, count: int) -> tuple["DistributedContext", ContextParallel | None]:
        """These processes with `count` neighbours at a time on the same sequences; every one must call."""
        if count == 1:
            return self, None
        group, _ = dist.new_subgroups(group_size=count, timeout=self.timeout)
        return replace(self, context_parallel_size=count), ContextParallel(self.rank % count, count, group)

    def check_shared_folder(self, folder: Path) -> None:
        """Raises `ConfigError` where processes see other folders of this name; all must call."""
        if self.world_size == 1:
            return
        word, *_ = self.all_gather_object(secrets.token_hex(8))
        path = folder / ".shared"
        if self.is_main:
            path.write_text(word)
        self.barrier()
        apart = self.any_rank(not path.exists() or path.read_text() != word)
        if self.is_main:
            path.unlink()
        if apart:
            raise ConfigError(
                f"--out {folder} is not the same folder for all processes: name one that all can write to, "
                "as on NFS, for each of them writes its part of a checkpoint"
            )

    def barrier(self) -> None:
        """Until all processes are here."""
        if self.world_size > 1:
            self.all_reduce_sum([0.0])  # over gloo, whose barrier needs no device

    def destroy(self) -> None:
        """Ends the group, so that torch has nothing to complain about."""
        if dist.is_initialized():
            dist.destroy_process_group()


def check_parallelism(train: TrainConfig, items: int, count: int) -> None:
    """Raises `ConfigError` where `count` processes cannot share a phase whose steps have so many items."""
    if train.parallel == "single" and count > 1:
        raise ConfigError(
            f"parallel=single is one process and there are {count}: set parallel to ddp or fsdp"
        )
    if count % train.context_parallel:
        raise ConfigError(
            f"context_parallel={train.context_parallel} must divide the number of processes, {count}"
        )
    if items < count // train.context_parallel * train.gradient_accumulation_steps:
        raise ConfigError(
            f"a step of {items} has no work for {count} processes in {train.gradient_accumulation_steps} "
            "part(s) each: lower gradient_accumulation_steps, or raise passage_sets_per_step (sft), "
            "prompts_per_step (rl) or batch_tokens"
        )
