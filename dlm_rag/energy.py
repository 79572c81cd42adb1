"""Joules of a run, by NVML's counters of GPUs and RAPL's of CPU packages; without one, the reason.

meter = open_meter("auto", device)
...
meter.stop().joules  # None if not measured; `reason` says why
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.errors import summarize_error

if TYPE_CHECKING:
    import torch

POWERCAP = Path("/sys/class/powercap")
MIN_SECONDS = 2.0  # a counter that steps every 0.1 s is 5 % off by then
READ_SECONDS = 20.0  # between readings of counters, of which RAPL's wraps after some minutes
COUNTED = ("joules", "seconds", "answers", "tokens")


class SensorError(Exception):
    """Why there is no sensor."""


@dataclass
class EnergyCounter:
    """A counter of joules from any start. wraps_at: joules at which it starts again from 0."""

    sensor: str  # what counts, and what it counts, in words
    read: Callable[[], float]
    wraps_at: float = 0.0
    total: float = 0.0  # joules since the start
    last: float | None = None

    def advance(self) -> None:
        """Adds what was used since the last call."""
        value = self.read()
        before = value if self.last is None else self.last
        self.last = value
        if value < before and not self.wraps_at:
            raise SensorError("the counter went backwards: was the driver reloaded?")
        self.total += value - before + self.wraps_at * (value < before)


@dataclass(frozen=True)
class EnergyReading:
    """The joules that devices used in some seconds, and their sensors; with no sensor and no reason nobody
    asked. reason: why nothing was measured."""

    seconds: float
    joules: float | None = None
    sensor: str = ""
    reason: str = ""

    def to_record(self) -> dict[str, Any] | None:
        """Returns it for JSON; None if nobody asked."""
        return asdict(self) if self.sensor or self.reason else None


def merge_readings(readings: Sequence[EnergyReading]) -> EnergyReading:
    """Adds up the readings of processes that ran at the same time; nothing where one of them failed."""
    seconds = max(reading.seconds for reading in readings)
    sensor, reason = (
        "; ".join(dict.fromkeys(filter(None, texts)))
        for texts in zip(*((reading.sensor, reading.reason) for reading in readings), strict=True)
    )
    joules = fsum(reading.joules or 0.0 for reading in readings) if sensor and not reason else None
    return EnergyReading(seconds, joules, sensor, reason)


class EnergyMeter:
    """Counts joules from now on. synchronize: waits until the device has finished."""

    def __init__(
        self, counters: Sequence[EnergyCounter] = (), reason: str = "",
        synchronize: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.counters, self._reason, self._synchronize = counters, reason, synchronize
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._begun = self._read_all()
        if any(counter.wraps_at for counter in counters):
            threading.Thread(target=self._read_often, daemon=True).start()

    def stop(self) -> EnergyReading:
        """Returns the reading since the meter was opened."""
        seconds = self._read_all() - self._begun
        self._stopped.set()
        reason = self._reason
        still = [counter.sensor for counter in self.counters if counter.total <= 0]
        if self.counters and not reason and seconds < MIN_SECONDS:
            reason = f"{seconds:.1f} s are too short: {MIN_SECONDS:.0f} s at least"
        elif still and not reason:
            reason = f"{still[0]}: its counter stands still"
        joules = fsum(counter.total for counter in self.counters) if self.counters and not reason else None
        return EnergyReading(seconds, joules, "; ".join(each.sensor for each in self.counters), reason)

    def count_joules(self) -> float:
        """Reads the counters; returns the joules until now."""
        with self._lock:
            for counter in self.counters:
                try:
                    counter.advance()
                except Exception as error:  # of any driver; the run goes on
                    self._reason = f"{counter.sensor}: {summarize_error(error)}"
            return fsum(counter.total for counter in self.counters)

    def _read_often(self) -> None:
        while not self._stopped.wait(READ_SECONDS):
            self.count_joules()

    def _read_all(self) -> float:
        with suppress(RuntimeError):  # the device is gone: the run reports that itself
            self._synchronize()
        now = time.perf_counter()
        self.count_joules()
        return now


def open_meter(choice: str, device: torch.device, host: bool = True) -> EnergyMeter:
    """Opens a meter of a program's GPU, and of the CPUs if `host`, which is true in one process a machine.

    choice: as in `Config.energy`. A GPU without a counter is not measured by its CPU.
    """
    if choice == "none" or (device.type == "cpu" and not host):
        return EnergyMeter()
    import torch

    found, on_gpu = list[EnergyCounter](), device.type == "cuda"
    try:
        if on_gpu:
            found.append(_find_gpu_counter(device))
        elif device.type != "cpu":
            raise SensorError(f"no sensor of {device.type} is known")
        if host and not (on_gpu and re.search(r"\bG[HB]\d", found[0].sensor)):  # whose counter has the CPU
            found += _find_rapl_counters()
    except SensorError as error:
        if not found:
            return EnergyMeter(reason=str(error))
    return EnergyMeter(found, "", partial(torch.cuda.synchronize, device) if on_gpu else lambda: None)


def _find_rapl_counters() -> list[EnergyCounter]:
    """Finds one for each CPU package: cores lie within them, `psys` around them."""
    counters: dict[str, EnergyCounter] = {}
    # Some packages are listed twice: by registers, and by memory ("mmio").
    for folder in sorted(POWERCAP.glob("*"), key=lambda path: ("mmio" in path.name, path.name)):
        try:
            name = (folder / "name").read_text().strip()
            if name in counters or not re.fullmatch(r"package-\d+(-die-\d+)?", name):
                continue
            wraps_at = 1e-6 * int((folder / "max_energy_range_uj").read_text())
            read = lambda file=folder / "energy_uj": 1e-6 * int(file.read_text())  # noqa: E731
            read()
        except (OSError, ValueError) as error:
            remedy = "; as root: chmod a+r /sys/class/powercap/*/energy_uj"
            raise SensorError(f"{folder} cannot be read: {summarize_error(error)}{remedy}") from None
        counters[name] = EnergyCounter(f"RAPL: CPU {name}", read, wraps_at)
    if not counters:
        raise SensorError(f"no RAPL in {POWERCAP}")
    return list(counters.values())


def _find_gpu_counter(device: torch.device) -> EnergyCounter:
    """Finds it by UUID: CUDA_VISIBLE_DEVICES may number GPUs otherwise than NVML does."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    name, uuid = properties.name, f"GPU-{str(properties.uuid).removeprefix('GPU-')}"
    if re.search(r"\bMIG\b", name):
        raise SensorError("MIG: NVML counts no energy of an instance")
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        read = lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3  # noqa: E731
        read()
    except ImportError:
        raise SensorError("nvidia-ml-py is not installed: pip install 'dlm_rag[energy]'") from None
    except nvml.NVMLError as error:
        raise SensorError(f"NVML has no energy counter of {name}: {summarize_error(error)}") from None
    return EnergyCounter(f"NVML: {name}", read)


def summarise_energy(parts: Any) -> dict[str, Any] | None:
    """Sums the measured parts of a run; None if there is none.

    parts: records of readings with "answers" and "tokens" (committed before the end of the text), as in a
    stamp; anything else is skipped.
    """
    known = [
        part for part in (parts if isinstance(parts, list) else []) if isinstance(part, dict)
        and all(type(part.get(name)) in (int, float) and 0 <= part[name] < 1e30 for name in COUNTED)
        and part["joules"] > 0 < part["seconds"]
    ]  # fmt: skip
    if not known:
        return None
    found: dict[str, Any] = {name: fsum(part[name] for part in known) for name in COUNTED}
    return found | {
        "sensor": "; ".join(dict.fromkeys(str(part.get("sensor", "")) for part in known)),
        "watts": found["joules"] / found["seconds"],
        "joules_per_answer": found["joules"] / found["answers"] if found["answers"] else None,
        "tokens_per_joule": found["tokens"] / found["joules"],
    }


def format_energy(found: Mapping[str, Any] | None, reason: str = "") -> str:
    """Formats a `summarise_energy` as one line; `reason`: why there is none."""
    if found is None:
        return f"energy: not measured ({reason})"
    units = {"joules": "J", "joules_per_answer": "J/answer", "tokens_per_joule": "tokens/J", "watts": "W"}
    values = [f"{format_three_digits(found[name])} {unit}" for name, unit in units.items() if found[name]]
    return " · ".join([f"energy: {values[0]}", *values[1:], str(found["sensor"])])


def format_three_digits(value: float) -> str:
    """Formats three digits or all before the point: 0.0123, 1.23, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
