"""The machine a program runs on: device, precision, names for stamps."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import resource
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING

from dlm_rag.errors import ConfigError

if TYPE_CHECKING:
    import torch

PACKAGE_FOLDER = Path(__file__).resolve().parent
CGROUP_MEMORY_FILES = (  # limit and usage of a container, in version 2 and in version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
POOL_SHARE_OF_FREE_MEMORY = {"cuda": 0.5, "cpu": 0.25}  # of the memory that is free when a decoder begins


def choose_device(name: str) -> torch.device:
    """The torch device called `name`; "auto" is CUDA where there is one. Raises `ConfigError`."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):  # torch has more: meta computes nothing
            raise RuntimeError
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(f"device={name} is not available here; set device=auto") from None
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype called `name`, also as torch prints it; "auto" is float32 on a CPU, on CUDA bfloat16
    or, where a GPU does not compute it, float16. Raises `ConfigError`."""
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if (short := name.removeprefix("torch.")) == "auto":
        on_gpu = "bfloat16" if has_bfloat16(device) else "float16"
        short = on_gpu if device.type == "cuda" else "float32"
    if short not in known:
        raise ConfigError(f"dtype={name} is not one of auto, {', '.join(known)}")
    return known[short]


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16; GPUs below compute capability 8.0 only emulate it."""
    import torch

    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def limit_cuda_allocator(memory_gib: float | None, device: torch.device) -> None:
    """Makes torch's own allocator refuse more than so much, where it can: on CUDA."""
    import torch

    if memory_gib is not None and device.type == "cuda":
        place = torch.cuda.current_device() if device.index is None else device.index
        whole = torch.cuda.get_device_properties(place).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gib * 2**30 / whole), place)


def get_machine_name(device: torch.device) -> str:
    """What a computation on this device runs on, in words."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    found = re.search(r"model name\s*: (.+)", _read_text_or_empty("/proc/cpuinfo"))
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


def describe_machine(device: torch.device, attention: str) -> dict[str, str | int]:
    """All of a machine that can change how a result is rounded: device, kernel, threads, versions."""
    import torch

    found: dict[str, str | int] = {
        "device": device.type,
        "name": get_machine_name(device),
        "attention": attention,
        "torch": torch.__version__,
    }
    if device.type == "cpu":
        found["threads"] = torch.get_num_threads()
    if device.type == "cuda" and torch.version.cuda:
        found["cuda"] = torch.version.cuda
        listed = _read_text_or_empty("/proc/driver/nvidia/version")
        if driver := re.search(r"Module\s.*?(\d+\.[\d.]+)", listed):
            found["driver"] = driver[1]
    if attention == "flash":
        found |= {package: version(package) for package in packages_distributions()["flash_attn"]}
    return found


def get_device_memory_bytes(device: torch.device) -> float:
    """Bytes of a device's memory."""
    if device.type == "cuda":
        import torch

        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _read_text_or_empty(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def read_host_memory() -> dict[str, int]:
    """Bytes of memory, "total" and "available"; empty if the system does not tell."""
    found = re.findall(r"^Mem(\w+):\s+(\d+) kB", _read_text_or_empty("/proc/meminfo"), re.M)
    return {name.lower(): 1024 * int(size) for name, size in found}


def get_peak_memory_bytes() -> int:
    """Bytes of memory that this process has held at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, Linux KiB


def use_one_thread_after_fork() -> None:
    """In a process that was forked: torch would wait for ever for the threads that its parent has."""
    import torch

    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        said = "forked after a decoder was loaded: one thread decodes; load it in each worker"
        logging.getLogger(__name__).warning(said)


def get_code_commit() -> str | None:
    """The commit of the code, with `-dirty` for local changes; None outside a checkout of this project."""
    root = PACKAGE_FOLDER.parent
    if not (root / ".git").exists():  # installed, perhaps in a folder of somebody's own repository
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def compute_code_digest(package: Path = PACKAGE_FOLDER) -> str:
    """12 hex digits over all sources of the package: any change changes it."""
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package).as_posix()}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:12]


def measure_free_bytes(device: torch.device) -> float:
    """Bytes that could be allocated on a device now: on CUDA with what the allocator holds unused.

    A device without own memory, as a GB10, has the host's; there the driver counts file caches as taken.
    """
    unused = 0
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if not getattr(torch.cuda.get_device_properties(device), "is_integrated", False):
            return torch.cuda.mem_get_info(device)[0] + unused
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free: float = read_host_memory().get("available", physical // 2)
    for limit, used in CGROUP_MEMORY_FILES:
        with suppress(OSError, ValueError):  # no such file; "max"
            free = min(free, max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
    return free + unused


def default_pool_bytes(device: torch.device, limit: float | None = None, weight_bytes: int = 0) -> int:
    """Bytes of a pool whose size nobody has named: a share of the memory that is free; limit: bytes that
    weights, pool and all else may take together."""
    free = measure_free_bytes(device)
    if limit is not None:
        free = max(0.0, min(free, limit - weight_bytes))
    return int(POOL_SHARE_OF_FREE_MEMORY.get(device.type, 0.25) * free)
