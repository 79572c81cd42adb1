"""The machine a program runs on: device, precision, names for stamps."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING

from dlm_rag.errors import ConfigError

if TYPE_CHECKING:
    import torch


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
    """The torch dtype called `name`; "auto" is bfloat16 on CUDA and float32 elsewhere."""
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def machine_name(device: torch.device) -> str:
    """What a computation on this device runs on, in words."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    listed = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", listed.read_text()) if listed.is_file() else None
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


def describe_machine(device: torch.device, attention: str) -> dict[str, str | int]:
    """All of a machine that can change how a result is rounded: device, kernel, threads, versions."""
    import torch

    found: dict[str, str | int | None] = {
        "device": device.type,
        "name": machine_name(device),
        "attention": attention,
        "torch": torch.__version__,
    }
    if device.type == "cpu":
        found["threads"] = torch.get_num_threads()
    if device.type == "cuda":
        found |= {"cuda": torch.version.cuda, "driver": _nvidia_driver()}
    if attention == "flash":
        found |= {package: version(package) for package in packages_distributions()["flash_attn"]}
    return {key: value for key, value in found.items() if value is not None}


def _nvidia_driver() -> str | None:
    listed = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module\s.*?(\d+\.[\d.]+)", listed.read_text()) if listed.is_file() else None
    return found[1] if found else None


def commit_of_code() -> str | None:
    """The commit of the code, with `-dirty` for local changes; None outside a checkout of this project."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # installed, perhaps in a folder of somebody's own repository
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
