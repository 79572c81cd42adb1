"""How many workers, and the cores, GPU and memory of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from joblib import cpu_count

from dlm_rag.errors import ConfigError
from dlm_rag.machine import get_device_memory_bytes, read_host_memory
from dlm_rag.progress import format_bytes

if TYPE_CHECKING:
    import torch

CPU_MEMORY_PER_WEIGHT_BYTE = 2  # memory of a worker on a CPU, in sizes of its weights


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


def describe_local_node(device: torch.device) -> dict[str, float]:
    """The resources of this machine as Ray names them; GPUs only if they are to be used."""
    import torch

    memory = read_host_memory().get("available") or get_device_memory_bytes(torch.device("cpu"))
    node = {"CPU": cpu_count(), "memory": memory}
    return node | ({"GPU": torch.cuda.device_count()} if device.type == "cuda" else {})


def plan_workers(
    workers: str, nodes: Sequence[Mapping[str, float]], device: torch.device, weights: int
) -> WorkerPlacement:
    """So many workers, or as many as the nodes have GPUs or, for the CPU, cores and memory for.

    nodes: the resources of each as Ray names them. weights: bytes that each worker loads. Workers of a
    node share its cores, but take no more threads than one process would. Raises `ConfigError` for a single
    device, for more workers than GPUs, and for too little memory.
    """
    if device.type == "mps" or device.index is not None:
        raise ConfigError(
            f"workers={workers} uses every visible device, model.device={device} is one: set cpu or cuda"
        )
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    kind = "GPU" if device.type == "cuda" else "CPU"
    nodes = [node for node in nodes if node.get(kind, 0) >= 1]
    if not nodes or (kind == "CPU" and gpus):
        raise ConfigError(
            f"workers={workers}: {gpus} GPUs and {len(nodes)} nodes for model.device={device}: give the "
            "command on a machine like the workers', set model.device, or start nodes with --num-cpus"
        )
    counts = [int(node[kind]) for node in nodes]
    if kind == "CPU":
        room = [int(node["memory"] // (CPU_MEMORY_PER_WEIGHT_BYTE * max(1, weights))) for node in nodes]
        counts = [max(1, min(cores, own)) for cores, own in zip(counts, room, strict=True)]
    if workers != "auto":
        count, memory = int(workers), sum(node["memory"] for node in nodes)
        if kind == "GPU" and count > sum(counts):
            raise ConfigError(f"workers={count}: {gpus} GPUs are visible: set at most workers={gpus}")
        if kind == "CPU" and count * weights > memory:
            raise ConfigError(
                f"workers={count} load {format_bytes(weights)} of weights each, and {format_bytes(memory)} "
                "of memory are free here: set fewer"
            )
        counts = [count]
    cores = min(int(node.get("CPU", 1)) // own for node, own in zip(nodes, counts, strict=True))
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(cores, int(wanted)) if wanted.isdigit() and int(wanted) else cores
    largest = 1 if kind == "GPU" else max(counts)
    return WorkerPlacement(sum(counts), max(1, threads), largest, int(kind == "GPU"))
