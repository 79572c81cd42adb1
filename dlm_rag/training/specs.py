"""Machines and checkpoints of `known.yaml`: what the former could do at best, for plans and for MFU; the
shapes of the latter, so that a plan needs neither network nor weights."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.families import find_family

RESERVED_MEMORY_FRACTION = 0.08  # of a device's memory, for its context, workspaces and fragments
MFU = 0.4  # share of a device's peak that a step is assumed to reach
DTYPES = torch.bfloat16, torch.float16, torch.float32
RENT_SOURCE = "on demand by hyperstack.cloud/gpu-pricing of 2026-08-26 (gb300: a B300)"
_KNOWN = yaml.safe_load(Path(__file__).with_name("known.yaml").read_text(encoding="utf-8"))
KNOWN_CHECKPOINTS: dict[str, dict[str, Any]] = _KNOWN["checkpoints"]


class GpuSpec(NamedTuple):
    """One device. Its name is part of the one that CUDA gives."""

    name: str
    flops: dict[torch.dtype, float]  # dense FLOP/s
    memory: float  # bytes
    bandwidth: float  # bytes/s of that memory
    watts: float  # of one device at full load
    rent: float | None  # dollars an hour of one device, where a public list has it
    source: str

    @property
    def usable_memory(self) -> float:
        """Bytes that torch's allocator can have."""
        return (1 - RESERVED_MEMORY_FRACTION) * self.memory


GPU_SPECS = {
    name: GpuSpec(
        name,
        {dtype: 1e12 * peak for dtype, peak in zip(DTYPES, spec["tflops"], strict=True) if peak},
        1e9 * spec["memory"],
        1e9 * spec["bandwidth"],
        *(spec[key] for key in ("watts", "rent", "source")),
    )
    for name, spec in _KNOWN["machines"].items()
}


def choose_planned_dtype(name: str, machine: GpuSpec | None) -> torch.dtype:
    """The dtype of the arithmetic; "auto" is the first of `DTYPES` that the machine computes in."""
    named = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    return named.get(name) or next(d for d in DTYPES if machine is None or d in machine.flops)


def find_gpu_spec(device: torch.device) -> GpuSpec | None:
    """The entry of a CUDA device, or None where it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(r"\b(?:PCIe|NVL)\b", name, re.IGNORECASE):  # which compute less than those in the table
        return None
    named = (machine for machine in GPU_SPECS.values() if re.search(rf"(?i)\b{machine.name}\b", name))
    return next(named, None)


def read_known_config(path: str | None) -> DenoiserConfig | None:
    """The architecture of a well-known checkpoint, unless a folder has its name; None of others."""
    if path is None or path not in KNOWN_CHECKPOINTS or Path(path).exists():
        return None
    raw = KNOWN_CHECKPOINTS[path]
    family = find_family(raw)
    return family.read_config(raw).add_settings(family.settings)
