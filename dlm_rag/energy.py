"""Joules of a run, by NVML's counters of GPUs and RAPL's of CPU packages; without one, the reason.

meter = open_meter("auto", [device])
...
meter.stop().joules  # None if not measured; `reason` says why
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.errors import summarize_error

if TYPE_CHECKING:
    import torch

POWERCAP = Path("/sys/class/powercap")
MIN_SECONDS = 2.0  # a counter that steps every 0.1 s is 5 % off by then
READ_SECONDS = 20.0  # between readings of counters, of which RAPL's wraps after some minutes
COUNTED = ("joules", "seconds", "answers")


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

    def describe(self, **counts: int) -> str:
        """Formats it as a line, with the joules of one of each of `counts`; "" if nobody asked."""
        if self.joules is None:
            return f"energy: not measured ({self.reason})" if self.reason else ""
        each = {f"J/{name}": self.joules / count for name, count in counts.items() if count}
        values = {"J": self.joules} | each | {"W": self.joules / self.seconds}
        figures = [f"{format_three_digits(value)} {unit}" for unit, value in values.items()]
        return " · ".join([f"energy: {figures[0]}", *figures[1:], self.sensor])


def merge_readings(readings: Sequence[EnergyReading]) -> EnergyReading:
    """Adds up the readings of processes that ran at the same time; nothing where one of them failed."""
    seconds = max(reading.seconds for reading in readings)
    sensor, reason = (_join(each.sensor for each in readings), _join(each.reason for each in readings))
    joules = math.fsum(reading.joules or 0.0 for reading in readings) if sensor and not reason else None
    return EnergyReading(seconds, joules, sensor, reason)


@dataclass
class EnergyCounter:
    """A counter of joules from any start. wraps_at: joules at which it starts again from 0."""

    sensor: str  # what counts, and what it counts, in words
    read: Callable[[], float]
    wraps_at: float = math.inf  # `total` becomes infinite where such a counter goes backwards
    total: float = 0.0  # joules until the last `advance`

    def __post_init__(self) -> None:
        self._last = self.read()

    def advance(self) -> None:
        """Adds what was used since the last call."""
        before, self._last = self._last, self.read()
        self.total += (self._last - before) % self.wraps_at


class EnergyMeter:
    """Sums counters from now on. The device is not waited for: who stops it has the results."""

    def __init__(self, counters: Sequence[EnergyCounter] = (), reason: str = "") -> None:
        self.counters, self._reason, self._begun = counters, reason, time.perf_counter()
        self._lock, self._stopped = threading.Lock(), threading.Event()
        if counters:
            threading.Thread(target=self._read_often, daemon=True).start()

    def stop(self) -> EnergyReading:
        """Returns the reading since the meter was opened."""
        seconds, joules = time.perf_counter() - self._begun, self.count_joules()
        self._stopped.set()
        if not self.counters or self._reason:
            reason = self._reason
        elif seconds < MIN_SECONDS:
            reason = f"{seconds:.1f} s are too short: {MIN_SECONDS:.0f} s at least"
        else:
            odd = [each.sensor for each in self.counters if not 0 < each.total < math.inf]
            reason = f"{odd[0]}: its counter stands still, or went backwards" if odd else ""
        sensor = _join(each.sensor for each in self.counters)
        return EnergyReading(seconds, joules if sensor and not reason else None, sensor, reason)

    def count_joules(self) -> float:
        """Reads the counters; returns the joules until now."""
        with self._lock:
            for counter in self.counters:
                try:
                    counter.advance()
                except Exception as error:  # of any driver; the run goes on
                    self._reason = f"{counter.sensor}: {summarize_error(error)}"
            return math.fsum(counter.total for counter in self.counters)

    def _read_often(self) -> None:
        while not self._stopped.wait(READ_SECONDS):
            self.count_joules()


def open_meter(choice: str, devices: Sequence[torch.device], host: bool = True) -> EnergyMeter:
    """Opens a meter of a program's GPUs, and of the CPUs if `host`, which is true in one process a machine.

    choice: as in `Config.energy`. GPUs of which one has no counter are not measured by their CPU.
    """
    counters, on_gpu = list[EnergyCounter](), any(device.type != "cpu" for device in devices)
    if choice == "none" or not (on_gpu or host):
        return EnergyMeter()
    try:
        if on_gpu:
            counters += [_find_gpu_counter(device) for device in devices]
        # The counter of a GH200 or GB200 has the CPU in it.
        if host and not (on_gpu and re.search(r"\bG[HB]\d", counters[0].sensor)):
            counters += _find_rapl_counters()
    except Exception as error:  # of any driver; the run goes on
        if not counters:
            denied = isinstance(error, PermissionError)
            remedy = "; as root: chmod a+r /sys/class/powercap/*/energy_uj" * denied
            return EnergyMeter(reason=f"{'NVML' if on_gpu else 'RAPL'}: {summarize_error(error)}{remedy}")
    return EnergyMeter(counters)


def _find_gpu_counter(device: torch.device) -> EnergyCounter:
    """Finds it by UUID: CUDA_VISIBLE_DEVICES may number GPUs otherwise than NVML does."""
    import torch

    gpu = torch.cuda.get_device_properties(device)
    if re.search(r"\bMIG\b", gpu.name):
        raise LookupError("it counts no energy of a MIG instance")
    try:
        import pynvml as nvml
    except ImportError:
        raise ImportError("nvidia-ml-py is not installed: pip install 'dlm_rag[energy]'") from None
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu.uuid}")
    read = lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3  # noqa: E731
    return EnergyCounter(f"NVML: {gpu.name}", read)


def _find_rapl_counters() -> list[EnergyCounter]:
    """Finds one for each CPU package: cores lie within them, `psys` around them, mmio lists some again."""
    found = []
    for folder in sorted(POWERCAP.glob("intel-rapl:*")):  # AMD's too
        name = (folder / "name").read_text().strip()
        if re.fullmatch(r"package-\d+(-die-\d+)?", name):
            read = lambda file=folder / "energy_uj": 1e-6 * int(file.read_text())  # noqa: E731
            wraps_at = 1e-6 * int((folder / "max_energy_range_uj").read_text())
            found.append(EnergyCounter(f"RAPL: CPU {name}", read, wraps_at))
    if not found:
        raise LookupError(f"no CPU package in {POWERCAP}")
    return found


def summarise_energy(parts: Any) -> dict[str, Any] | None:
    """Sums the measured parts of a run, a stamp's records with "answers"; None if there is none."""
    known = [
        part for part in (parts if isinstance(parts, list) else []) if isinstance(part, dict)
        and all(type(part.get(name)) in (int, float) and 0 <= part[name] < 1e30 for name in COUNTED)
        and part["joules"] > 0 < part["seconds"]
    ]  # fmt: skip
    if not known:
        return None
    found: dict[str, Any] = {name: math.fsum(part[name] for part in known) for name in COUNTED}
    return found | {
        "sensor": _join(str(part.get("sensor", "")) for part in known),
        "watts": found["joules"] / found["seconds"],
        "joules_per_answer": found["joules"] / found["answers"] if found["answers"] else None,
    }


def _join(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, texts)))


def format_three_digits(value: float) -> str:
    """Formats three digits or all before the point: 0.0123, 1.23, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
