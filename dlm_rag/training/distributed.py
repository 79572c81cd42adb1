"""Training on several processes, each with its share of every batch.

    torchrun --nproc-per-node 2 train.py --config world.yaml

Losses are divided by the counts of the whole batch and gradients are summed, so a step is the same step on
any number of processes, in whole copies (DDP) or shards (FSDP), but for rounding.
"""

import inspect
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlm_rag.cli import parse_int
from dlm_rag.config import TrainConfig
from dlm_rag.errors import ConfigError, RunError, UserError, summarize_error
from dlm_rag.evidence.encode_segments import encode_canvases
from dlm_rag.machine import choose_device
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.packed_batch import LaidOutRow, Segment

TIMEOUT = timedelta(minutes=10)  # that a process waits for another
# What gloo, NCCL and torch's store say only of a lost process.
_GONE = re.compile(
    r"(connection|socket) (was |is )?(closed|reset|refused|aborted)|closed by (the )?peer|reset by peer"
    r"|broken pipe|timed? ?out|recv, got 0 bytes|ncclRemoteError|remote process exit",
    re.IGNORECASE,
)


def check_peers(error: BaseException) -> None:
    """Raises `RunError` where an error of torch's is that another process is gone."""
    if not isinstance(error, RunError) and _GONE.search(str(error)):
        raise RunError(
            f"another process of this run has died or lost its connection ({summarize_error(error)}); the "
            "last checkpoint is intact: start the run again with --resume"
        ) from error


@contextmanager
def translate_distributed_errors() -> Iterator[None]:
    """Turns what torch and the system say of a dead process, full memory or a full disk into `RunError`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            "the memory of the device is full; the last checkpoint is intact: see --plan for what fits "
            "(gradient_accumulation_steps, activation_checkpointing, parallel=fsdp), then --resume"
        ) from error
    except RuntimeError as error:
        check_peers(error)
        raise
    except (ConnectionError, TimeoutError):  # of a search, say: no file
        raise
    except OSError as error:
        raise RunError(
            f"{error.filename or 'a file of the run'} could not be written or read "
            f"({error.strerror or error}); the last checkpoint is intact: --resume goes on from it"
        ) from error


@dataclass(frozen=True)
class DistributedContext:
    """This process among those that torchrun started; alone without it."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def init(cls, timeout: timedelta = TIMEOUT) -> "DistributedContext":
        """Meets the others, over NCCL where there is CUDA and over gloo where there is none.

        Raises what `check_peers` knows after long waits, `ConfigError` where RANK and its like are wrong.
        """
        least = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
        rank, count, local = (
            parse_int(os.environ.get(name, str(low)), low, f"{name}=") for name, low in least.items()
        )
        if rank >= count or (count > 1 and {"RANK", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()):
            raise ConfigError(
                f"RANK={rank} and WORLD_SIZE={count} in the environment are not torchrun's: unset them, or "
                "start with torchrun"
            )
        if count > 1 and not dist.is_initialized():
            backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=timeout)
        return cls(rank, count, local)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that reports and saves."""
        return self.rank == 0

    def local_items(self, items: int) -> range:
        """Which of a batch's items this process computes."""
        return range(self.rank, items, self.world_size)

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the processes."""
        if self.world_size == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64)  # over gloo, which needs no device
        dist.all_reduce(summed)
        return summed.tolist()

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is up on any process; none goes on before all are here."""
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

    def check_shared_folder(self, folder: Path) -> None:
        """Raises `ConfigError` where processes see other folders of this name; all must call."""
        path = folder / f".shared-{self.all_gather_object(secrets.token_hex(8))[0]}"
        if self.is_main:
            path.touch()
        self.barrier()
        apart = self.any_rank(not path.exists())
        if self.is_main:
            path.unlink()
        if apart:
            raise ConfigError(
                f"--out {folder} is not the same folder for all processes: name one that all can write to"
            )

    def barrier(self) -> None:
        """Until all processes are here."""
        self.any_rank(False)

    def destroy(self) -> None:
        """Ends the group, so that torch has nothing to complain about."""
        if dist.is_initialized():
            dist.destroy_process_group()


def check_parallelism(train: TrainConfig, items: int, count: int) -> None:
    """Raises `ConfigError` where `count` processes cannot share steps of so many items."""
    parts = train.gradient_accumulation_steps
    if items < count * parts:
        raise ConfigError(
            f"a step of {items} has no work for {count} processes in {parts} part(s) each: lower "
            "gradient_accumulation_steps, or raise passage_sets_per_step (sft), prompts_per_step (rl) or "
            "batch_tokens"
        )


def wrap_in_ddp(objective: nn.Module) -> nn.Module:
    """The objective whose gradients DDP sums over copies, all with the first process's weights."""
    copies: Any = nn.parallel.DistributedDataParallel
    renamed = "forward_sync_buffers" in inspect.signature(copies).parameters  # in newer versions of torch
    quiet = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return copies(objective, gradient_as_bucket_view=True, **quiet)


def apply_fsdp(
    objective: nn.Module, denoiser: Denoiser, processes: DistributedContext, device: torch.device,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Shards the objective in place, over all processes, before its weights have contents.

    dtype: of the arithmetic; shards are gathered in it, gradients are summed in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    # Values are views of what projects them; nothing here writes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    mesh = init_device_mesh(device.type, (processes.world_size,))
    # Inputs stay as they are: the rotary angles need float32.
    dtypes = {"param_dtype": dtype, "reduce_dtype": torch.float32} if dtype != torch.float32 else {}
    policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    for block in denoiser.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    root: Any = fully_shard(objective, mesh=mesh, mp_policy=policy)
    root.small_call = _encode_one_token
    register_fsdp_forward_method(root, "small_call")  # as the root's own: it may be the first call of all


def get_local(value: Tensor) -> Tensor:
    """This process's shard of a tensor, or the tensor where it is not sharded."""
    return value.to_local() if hasattr(value, "to_local") else value


def skip_gradient_sync(root: nn.Module) -> AbstractContextManager[Any]:
    """While it is open, backward sums no gradients of whole copies: for all parts but the last."""
    # Shards sum theirs in every part: kept until the last, they would be as large as all weights.
    return root.no_sync() if isinstance(root, nn.parallel.DistributedDataParallel) else nullcontext()


@contextmanager
def allow_independent_forwards(
    root: nn.Module, denoiser: Denoiser, processes: DistributedContext
) -> Iterator[None]:
    """While it is open every process may call the denoiser by itself, each as often as it needs.

    Layers in shards are gathered by all processes together. So before each call they agree whether anybody
    still has one to make; who has none left makes a small one with the others. An error ends the run.
    """
    module: Any = root
    if not hasattr(module, "unshard"):
        yield
        return
    # Layers find their root, and get the memory that they are gathered into, at their first call. Were it a
    # decoder's, each would be a root, in memory of torch.inference_mode that no backward can use.
    module.small_call(denoiser)  # FSDP fails on a GPU where a call has no argument
    module.unshard()
    agree = denoiser.layers[0].register_forward_pre_hook(
        lambda *_: processes.any_rank(True) and None, prepend=True
    )
    try:
        yield
    finally:
        agree.remove()
    while processes.any_rank(False):
        _encode_one_token(denoiser)
    module.reshard()


def _encode_one_token(denoiser: Denoiser) -> None:
    encode_canvases(denoiser, [LaidOutRow((), Segment((0, 0), 0), 0)], [[0]])
