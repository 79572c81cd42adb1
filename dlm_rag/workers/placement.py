"""How many workers there are, and what each gets: cores, a GPU, memory. Nothing is started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dlm_rag.errors import ConfigError
from dlm_rag.machine import count_usable_cores, get_device_memory_bytes, read_host_memory
from dlm_rag.progress import format_bytes

if TYPE_CHECKING:
    import torch

CPU_MEMORY_PER_WEIGHT_BYTE = (
    2  # times its weights is what a worker on a CPU is reckoned to take, where we choose their number
)


@dataclass(frozen=True)
class WorkerPlacement:
    """So many workers, each with its threads, in shares of a machine that so many of them use."""

    num_workers: int
    threads_per_worker: int
    workers_per_machine: int
    gpus_per_worker: int = 0  # of each: 0 or 1


def check_ray_installed() -> None:
    """Raises `ConfigError` where Ray is not there."""
    if find_spec("ray") is None:
        raise ConfigError("workers= needs Ray: pip install 'dlm_rag[workers]', or leave it out")


def is_ray_cluster(workers: str) -> bool:
    """Whether workers are to be found on a Ray cluster that runs already."""
    return workers.startswith("ray://")


def plan_local_workers(workers: str, device: torch.device, weights: int) -> WorkerPlacement:
    """The workers of this machine; `weights`: bytes that each loads.

    Threads are an equal part of those that one process would use. Raises `ConfigError` for more workers
    than GPUs, for a device that is one alone, and for weights that are too many for the memory.
    """
    import torch

    if device.type == "mps" or device.index is not None:
        raise ConfigError(
            f"workers={workers} takes every device that is visible, and model.device={device} is one: set "
            "model.device=cpu or cuda, or leave workers out"
        )
    cores = count_usable_cores()
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        count = gpus if workers == "auto" else int(workers)
        if count > gpus:
            raise ConfigError(
                f"workers={workers}, and {gpus} {'GPUs are' if gpus > 1 else 'GPU is'} visible here: set "
                f"at most workers={gpus}"
            )
        return WorkerPlacement(count, _threads(cores, count), 1, gpus_per_worker=1)
    count = (
        _count_fitting_workers(cores, read_host_memory().get("available", 0), weights)
        if workers == "auto"
        else int(workers)
    )
    if count * weights > (have := get_device_memory_bytes(device)):
        raise ConfigError(
            f"workers={count} load {format_bytes(weights)} of weights each, and this machine has "
            f"{format_bytes(have)} of memory: set fewer"
        )
    return WorkerPlacement(count, _threads(cores, count), count)


def plan_cluster_workers(nodes: Sequence[Mapping[str, float]], gpus: bool, weights: int) -> WorkerPlacement:
    """The workers of a cluster: one for each GPU or, for the CPU, each core, as far as its memory goes.

    nodes: the resources of each as Ray names them. Raises `ConfigError` where no worker finds a place.
    """
    there = sum(int(node.get("GPU", 0)) for node in nodes)
    if gpus:
        having = [node for node in nodes if node.get("GPU", 0) >= 1]
        if not having:
            raise ConfigError("the cluster has no GPU, and this machine has: set model.device=cpu")
        cores = min(int(node.get("CPU", 1) // node["GPU"]) for node in having)
        return WorkerPlacement(there, max(1, cores), 1, gpus_per_worker=1)
    if there:
        raise ConfigError(
            f"the cluster has {there} GPUs and this machine none, which settles device and precision: give "
            "the command on a machine like the workers'"
        )
    counts = [
        _count_fitting_workers(int(node.get("CPU", 0)), node.get("memory", 0), weights) for node in nodes
    ]
    if not sum(counts):
        raise ConfigError("the cluster has no CPU to offer: start its nodes with `ray start --num-cpus`")
    return WorkerPlacement(sum(counts), 1, max(counts))


def _count_fitting_workers(cores: int, free: float, weights: int) -> int:
    """One worker a core, as many as their memory is there for, and one at least where there is a core."""
    return min(cores, max(1, int(free // (CPU_MEMORY_PER_WEIGHT_BYTE * max(1, weights)))))


def _threads(cores: int, count: int) -> int:
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    most = int(wanted) if wanted.isdigit() and int(wanted) else cores
    return max(1, min(cores // count, most))
