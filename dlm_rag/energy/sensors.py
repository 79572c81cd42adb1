"""The sensors of energy: NVML's counters of GPUs, RAPL's of CPU packages.

Not measured: GPUs without a counter (before Volta, MIG) and CPUs without RAPL.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlm_rag.errors import summarize_error

if TYPE_CHECKING:
    import torch

POWERCAP = Path("/sys/class/powercap")
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
MAX_WRAP_SECONDS = 60.0  # after so long without a reading a counter may have wrapped twice
SHARED_SCOPE = " and perhaps its CPU"  # GH200's counter includes it (zeus #172); GB's may
INSTALL_COMMAND = "pip install 'dlm_rag[energy]'"


class SensorError(Exception):
    """Why there is no sensor; remedy: a command that helps, if there is one."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass
class EnergyCounter:
    """A counter of joules from any start. wraps_at: joules at which it starts again from 0."""

    device: str
    scope: str  # what it counts, in words
    sensor: str
    read: Callable[[], float]
    step_seconds: float  # between its own updates
    wraps_at: float | None = None
    total: float = 0.0  # joules since the start
    last: tuple[float, float] | None = None  # when it was read, and what it showed
    idle_watts: float | None = None

    def advance(self) -> None:
        """Adds what was used since the last call; raises `SensorError` where it cannot be right."""
        now, value = time.perf_counter(), self.read()
        then, before = self.last or (now, value)
        self.last = now, value
        if self.wraps_at and now - then > MAX_WRAP_SECONDS:
            raise SensorError(f"the counter wraps and was not read for {now - then:.0f} s")
        if value < before and not self.wraps_at:
            raise SensorError("the counter went backwards: was the driver reloaded?")
        self.total += value - before + (self.wraps_at or 0.0) * (value < before)


def find_counters(
    device: torch.device, host: bool = True
) -> tuple[list[EnergyCounter], SensorError | None]:
    """The counters of a device and of its CPUs, and why one of them is not there.

    CPUs are left out if the GPU's counter may include them, or if the GPU itself has none.
    """
    found: list[EnergyCounter] = []
    try:
        if device.type == "cuda":
            found.append(_find_gpu_counter(device))
            host = host and not found[0].scope.endswith(SHARED_SCOPE)
        elif device.type != "cpu":
            raise SensorError(f"no sensor of {device.type} is known")
        return [*found, *(_find_rapl_counters() if host else ())], None
    except SensorError as error:
        return found, error


def _find_rapl_counters() -> list[EnergyCounter]:
    """One for each CPU package: cores lie within them, `psys` around them."""
    counters: dict[str, EnergyCounter] = {}
    # Some packages are listed twice: by registers, and by memory ("mmio").
    for folder in sorted(POWERCAP.glob("*"), key=lambda path: ("mmio" in path.name, path.name)):
        file = folder / "energy_uj"
        try:
            name = (folder / "name").read_text().strip()
            if name in counters or not re.fullmatch(r"package-\d+(-die-\d+)?", name):
                continue
            wraps_at = 1e-6 * int((folder / "max_energy_range_uj").read_text())
            read = lambda file=file: 1e-6 * int(file.read_text())  # noqa: E731
            read()
        except PermissionError:
            remedy = "sudo chmod a+r /sys/class/powercap/*/energy_uj"
            raise SensorError(f"only root may read {file}", remedy) from None
        except (OSError, ValueError) as error:
            raise SensorError(f"{folder} cannot be read: {summarize_error(error)}") from None
        scope = f"CPU {name.replace('-', ' ')} without its memory"
        counters[name] = EnergyCounter(f"{_identify_host()}:{name}", scope, "RAPL", read, 0.001, wraps_at)
    if not counters:
        raise SensorError(f"no RAPL in {POWERCAP}")
    return list(counters.values())


def _identify_host() -> str:
    """The same for all that runs on a machine, its containers included; hosts may share a hostname."""
    try:
        return BOOT_ID_FILE.read_text()[:8]
    except OSError:
        return platform.node()


def _find_gpu_counter(device: torch.device) -> EnergyCounter:
    """Found by UUID: CUDA_VISIBLE_DEVICES may number GPUs otherwise than NVML does."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    name, uuid = properties.name, f"GPU-{str(properties.uuid).removeprefix('GPU-')}"
    if re.search(r"\bMIG\b", name):
        raise SensorError("MIG: NVML counts no energy of an instance")
    try:
        import pynvml as nvml
    except ImportError:
        raise SensorError(f"nvidia-ml-py is not installed: {INSTALL_COMMAND}", INSTALL_COMMAND) from None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        read = lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3  # noqa: E731
        read()
        shared = SHARED_SCOPE if re.search(r"\bG[HB]\d", name) else ""
        scope = f"GPU {nvml.nvmlDeviceGetIndex(handle)} ({name}){shared}"
    except nvml.NVMLError as error:
        raise SensorError(f"NVML has no energy counter of {name}: {summarize_error(error)}") from None
    return EnergyCounter(uuid, scope, "NVML energy counter", read, 0.1)
