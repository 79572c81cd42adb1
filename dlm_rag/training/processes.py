"""Training on several processes, each with its share of every batch.

    torchrun --nproc-per-node 2 train.py --config world.yaml

Losses are divided by the counts of the whole batch and gradients are summed, so a step is the same
step on any number of processes, in whole copies (DDP) or shards (FSDP), up to the order of additions.
"""

import inspect
import os
import re
import secrets
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlm_rag.config import TrainConfig
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.machine import choose_device
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.sharing import SequenceShare


@dataclass(frozen=True)
class Processes:
    """This process among those that torchrun started; alone without it.

    `sharing` neighbours work on the same sequences, each on its part of them.
    """

    rank: int
    count: int
    local_rank: int
    sharing: int = 1

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
        return range(self.rank // self.sharing, items, self.count // self.sharing)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the processes."""
        if self.count == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed)
        return summed.tolist()

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any process."""
        return self.sum([float(flag)])[0] > 0

    def device(self, name: str) -> torch.device:
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

    def check(self, train: TrainConfig) -> None:
        """Raises `ConfigError` where a phase cannot be shared among so many processes."""
        if train.parallel == "single" and self.count > 1:
            raise ConfigError(
                f"parallel=single is one process and there are {self.count}: set parallel to ddp or fsdp"
            )
        if self.count % train.context_parallel:
            raise ConfigError(
                f"context_parallel={train.context_parallel} must divide the number of processes, "
                f"{self.count}"
            )
        parts = self.count // train.context_parallel * train.accumulate
        if train.items < parts:
            raise ConfigError(
                f"a step of {train.items} has no work for {self.count} processes in {train.accumulate} "
                "part(s) each: lower accumulate, or raise groups (sft) or batch_tokens"
            )

    def sharing_sequences(self, count: int) -> tuple["Processes", SequenceShare | None]:
        """These processes with `count` neighbours at a time on the same sequences; every one must call."""
        if count == 1:
            return self, None
        group, _ = dist.new_subgroups(group_size=count)
        return replace(self, sharing=count), SequenceShare(self.rank % count, count, group)

    def check_folder(self, folder: Path) -> None:
        """Raises `ConfigError` where processes see other folders of this name; all must call."""
        if self.count == 1:
            return
        (word,) = self.sum([float(secrets.randbits(50)) if self.first else 0.0])
        path = folder / ".shared"
        if self.first:
            path.write_text(str(word))
        self.wait()
        apart = self.any(not path.exists() or path.read_text() != str(word))
        if self.first:
            path.unlink()
        if apart:
            raise ConfigError(
                f"--out {folder} is not the same folder for all processes: name one that all can write to, "
                "as on NFS, for each of them writes its part of a checkpoint"
            )

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            self.sum([0.0])  # over gloo, whose barrier needs no device

    def leave(self) -> None:
        """Ends the group, so that torch has nothing to complain about."""
        if dist.is_initialized():
            dist.destroy_process_group()


def spread(
    objective: nn.Module, denoiser: Denoiser, kind: str, processes: Processes, device: torch.device,
    dtype: torch.dtype,
) -> nn.Module:  # fmt: skip
    """The objective to call on each process: itself alone, in DDP, or sharded in place by FSDP2.

    device: where shards go. dtype: of the arithmetic; shards are gathered in it, gradients are summed in
    float32.
    """
    if processes.count == 1:
        return objective
    if kind == "ddp":
        copies: Any = nn.parallel.DistributedDataParallel
        names = ("forward_sync_buffers", "broadcast_buffers")  # torch's new name and its old one
        quiet = next(name for name in names if name in inspect.signature(copies).parameters)
        wrapped: nn.Module = copies(objective, gradient_as_bucket_view=True, **{quiet: False})
        return wrapped
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Values are views of what projects them; nothing here writes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    mesh = init_device_mesh(device.type, (processes.count,))
    low = dtype != torch.float32
    # Inputs stay as they are: the rotary angles need float32.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if low else None,
        reduce_dtype=torch.float32 if low else None,
        cast_forward_inputs=False,
    )
    for block in denoiser.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(objective, mesh=mesh, mp_policy=policy)  # in place
    denoiser.inverse_frequencies = denoiser.inverse_frequencies.to(device)
    return objective


def without_sum(root: nn.Module) -> AbstractContextManager[Any]:
    """While it is open, backward sums no gradients of whole copies: for all parts but the last.

    Shards sum theirs in every part: kept until the last, they would be as large as all weights.
    """
    return root.no_sync() if isinstance(root, nn.parallel.DistributedDataParallel) else nullcontext()


@contextmanager
def failures_told() -> Iterator[None]:
    """Turns what torch and the system say of a dead process, full memory or a full disk into `RunError`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise RunError(
            "the memory of the device is full; the last checkpoint is as it was: see --plan for what fits "
            "(accumulate, checkpointing, parallel=fsdp), then --resume"
        ) from None
    except RuntimeError as error:
        if isinstance(error, RunError) or not lost_another(error):
            raise
        raise RunError(LOST) from None
    except OSError as error:
        raise RunError(
            f"{error.filename or 'a file of the run'} could not be written or read "
            f"({error.strerror or error}); the last checkpoint is as it was: --resume goes on from it"
        ) from None


LOST = (
    "another process of this run has died or lost its connection; the last checkpoint is as it was: start "
    "the run again with --resume"
)


def lost_another(error: BaseException) -> bool:
    """Whether that is what torch means."""
    words = r"connection|peer|socket|timed? ?out|NCCL|remote process"
    return re.search(words, str(error), re.IGNORECASE) is not None


def whole(value: Tensor) -> Tensor:
    """A tensor gathered from its shards, where it has any."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value
