"""How many workers, and the cores, GPU and memory of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from dlm_rag.errors import ConfigError
from dlm_rag.machine import count_usable_cores, get_device_memory_bytes, read_host_memory
from dlm_rag.progress import format_bytes

if TYPE_CHECKING:
    import torch

CPU_MEMORY_PER_WEIGHT_BYTE = 2  # memory of a worker on a CPU, in sizes of its weights, under workers=auto


class WorkerPlacement(NamedTuple):
    """The workers of a run; gpus_per_worker: 0 or 1."""

    num_workers: int
    threads_per_worker: int
    workers_per_machine: int
    gpus_per_worker: int = 0


def check_ray_installed() -> None:
    """Raises `ConfigError` without Ray."""
    if find_spec("ray") is None:
        raise ConfigError("workers= needs Ray: pip install 'dlm_rag[workers]', or leave it out")


def plan_local_workers(workers: str, device: torch.device, weights: int) -> WorkerPlacement:
    """The workers of this machine, which share one process's threads; `weights`: bytes that each loads.

    Raises `ConfigError` for more workers than GPUs, a single device, or too little memory.
    """
    import torch

    if device.type == "mps" or device.index is not None:
        raise ConfigError(
            f"workers={workers} uses every visible device, model.device={device} is one: set cpu or cuda"
        )
    cores, on_gpus = count_usable_cores(), device.type == "cuda"
    free = read_host_memory().get("available", 0)
    most = torch.cuda.device_count() if on_gpus else _count_fitting_workers(cores, free, weights)
    count = most if workers == "auto" else int(workers)
    if on_gpus and count > most:
        raise ConfigError(f"workers={count}: {most} GPUs are visible here: set at most workers={most}")
    if not on_gpus and count * weights > (memory := get_device_memory_bytes(device)):
        raise ConfigError(
            f"workers={count} load {format_bytes(weights)} of weights each, and this machine has "
            f"{format_bytes(memory)} of memory: set fewer"
        )
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(cores // count, int(wanted) if wanted.isdigit() and int(wanted) else cores)
    return WorkerPlacement(count, max(1, threads), 1 if on_gpus else count, int(on_gpus))


def plan_cluster_workers(nodes: Sequence[Mapping[str, float]], gpus: bool, weights: int) -> WorkerPlacement:
    """One worker for each GPU of a cluster or, for the CPU, for each core that has the memory.

    nodes: the resources of each as Ray names them. Raises `ConfigError` if no worker finds a place.
    """
    count = sum(int(node.get("GPU", 0)) for node in nodes)
    if bool(count) != gpus:
        raise ConfigError(
            f"the cluster has {count} GPUs, and model.device={'cuda' if gpus else 'cpu'} here: give "
            "the command on a machine like the workers', or set model.device"
        )
    if gpus:
        cores = min(int(node.get("CPU", 1) // node["GPU"]) for node in nodes if node.get("GPU", 0) >= 1)
        return WorkerPlacement(count, max(1, cores), 1, gpus_per_worker=1)
    counts = [
        _count_fitting_workers(int(node.get("CPU", 0)), node.get("memory", 0), weights) for node in nodes
    ]
    if not any(counts):
        raise ConfigError("the cluster has no CPU to offer: start its nodes with `ray start --num-cpus`")
    return WorkerPlacement(sum(counts), 1, max(counts))


def _count_fitting_workers(cores: int, free: float, weights: int) -> int:
    """One for each core with memory for it, at least one if there is a core."""
    return min(cores, max(1, int(free // (CPU_MEMORY_PER_WEIGHT_BYTE * max(1, weights)))))
