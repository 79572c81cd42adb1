"""The meter, over NVML's energy counters (GPUs) and RAPL's (CPUs).

    with open_meter("auto", device) as meter:
        ...
    meter.reading.joules  # None if not measured; `meter.reading.reason` says why

Simplifications: a GPU without a counter (before Volta, MIG) and CPUs without RAPL are not measured. Of RAPL
only packages count: cores lie within them, `psys` around them.
"""

from __future__ import annotations

import platform
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.energy.reading import MIN_WINDOW_SECONDS, DeviceEnergy, EnergyReading
from dlm_rag.errors import summarize_error
from dlm_rag.progress import show_status

if TYPE_CHECKING:
    import torch

IDLE_SECONDS = 10.0
READ_SECONDS = 20.0  # between readings of a counter that wraps: one of 65 kJ lasts 131 s at 500 W
MAX_WRAP_SECONDS = 60.0  # after so long without a reading it may have wrapped twice


class SensorError(Exception):
    """Why there is no sensor; remedy: a command that helps, if there is one."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass
class EnergyCounter:
    """Counts joules from any start. wraps_at: joules at which it starts again from 0."""

    device: str
    scope: str
    sensor: str
    read: Callable[[], float]
    step_seconds: float  # between its own updates
    wraps_at: float | None = None
    includes_cpu: bool = False  # or may do so


class EnergyMeter:
    """Joules of all counters from `start` to `stop`; a counter that fails makes the reading None.

    Without counters every reading has this `reason`. idle_seconds: how long the idle power is measured
    before the first start. synchronize: waits until the device has finished. clock: as the module `time`.
    """

    def __init__(
        self,
        counters: Sequence[EnergyCounter] = (),
        reason: str = "",
        idle_seconds: float = 0.0,
        synchronize: Callable[[], object] = lambda: None,
        clock: Any = time,
    ) -> None:
        self.counters, self.reading = tuple(counters), EnergyReading(0.0)
        self._no_counter, self._synchronize, self._clock = reason, synchronize, clock
        self._idle_seconds = idle_seconds
        self._idle_watts: list[float | None] = [None] * len(self.counters)
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._failure, self._totals = "", [0.0] * len(self.counters)
        self._begun = self._lap = (clock.perf_counter(), self._totals)

    def __enter__(self) -> EnergyMeter:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        if self._idle_seconds and self.counters:
            seconds, self._idle_seconds = self._idle_seconds, 0.0
            show_status(f"measuring the idle power for {seconds:.0f} s")
            self._open()
            self._clock.sleep(seconds)
            idle = self.stop()
            if idle.parts:
                self._idle_watts = [part.joules / idle.seconds for part in idle.parts]
        self._open()

    def lap(self) -> EnergyReading:
        """The window since the last lap, or the start."""
        mark, self._lap = self._lap, self._read_all()
        return self._make_reading(mark, self._lap)

    def stop(self) -> EnergyReading:
        """The window since the start, which becomes `reading`."""
        self.reading = self._make_reading(self._begun, self._read_all())
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.reading

    @property
    def elapsed(self) -> float:
        """Seconds since the last lap, or the start."""
        return self._clock.perf_counter() - self._lap[0]

    def count_joules(self, wrapping_only: bool = False) -> list[float]:
        """Reads the counters; returns the joules of each since the start."""
        with self._lock:
            for number, counter in enumerate(self.counters):
                if not self._failure and (counter.wraps_at or not wrapping_only):
                    try:
                        self._totals[number] += self._read_increment(number)
                    except Exception as error:  # of any driver; the run goes on
                        self._failure = f"{counter.scope}: {summarize_error(error)}"
            return list(self._totals)

    def _read_increment(self, number: int) -> float:
        counter, (before, then) = self.counters[number], self._last[number]
        now = self._clock.perf_counter()
        value = counter.read()
        self._last[number] = value, now
        if counter.wraps_at and now - then > MAX_WRAP_SECONDS:
            raise SensorError(f"the counter wraps and was not read for {now - then:.0f} s")
        if value < before and not counter.wraps_at:
            raise SensorError("the counter went backwards: was the driver reloaded?")
        return value - before + (counter.wraps_at or 0.0) * (value < before)

    def _open(self) -> None:
        self._failure, self._totals = "", [0.0] * len(self.counters)
        self._last = [(0.0, 0.0)] * len(self.counters)
        self._wait()
        begun = self._clock.perf_counter()
        try:
            self._last = [(counter.read(), begun) for counter in self.counters]
        except Exception as error:
            self._failure = summarize_error(error)
        self._begun = self._lap = (begun, list(self._totals))
        self._stopped.clear()
        if any(counter.wraps_at for counter in self.counters):
            self._thread = threading.Thread(target=self._read_often, daemon=True)
            self._thread.start()

    def _read_often(self) -> None:
        while not self._stopped.wait(READ_SECONDS):
            self.count_joules(wrapping_only=True)

    def _wait(self) -> None:
        try:
            self._synchronize()
        except Exception as error:  # the device is gone; the run reports that itself
            self._failure = summarize_error(error)

    def _read_all(self) -> tuple[float, list[float]]:
        self._wait()
        return self._clock.perf_counter(), self.count_joules()

    def _make_reading(
        self, before: tuple[float, list[float]], after: tuple[float, list[float]]
    ) -> EnergyReading:
        seconds = after[0] - before[0]
        joules = [end - start for start, end in zip(before[1], after[1], strict=True)]
        reason = self._no_counter or (self._failure if self.counters else "")
        if self.counters and not reason and seconds < MIN_WINDOW_SECONDS:
            reason = f"{seconds:.1f} s are too short: {MIN_WINDOW_SECONDS:.0f} s at least"
        if self.counters and not reason and min(joules) <= 0:
            reason = f"{self.counters[joules.index(min(joules))].scope}: its counter stands still"
        if reason or not self.counters:
            return EnergyReading(seconds, (), reason)
        parts = [
            DeviceEnergy(
                counter.device, counter.scope, counter.sensor, value,
                error=counter.step_seconds * value / seconds,
                idle_joules=None if watts is None else watts * seconds,
            )
            for counter, value, watts in zip(self.counters, joules, self._idle_watts, strict=True)
        ]  # fmt: skip
        return EnergyReading(seconds, tuple(parts))


def open_meter(
    choice: str, device: torch.device, host: bool = True, root: Path = Path("/sys"), nvml: Any = None
) -> EnergyMeter:
    """A meter of what a program computes on: its GPU, and the CPUs if `host`.

    choice: as in `Config.energy`. host: true in one process of each machine. root, nvml: fakes for tests.
    """
    if choice == "none" or (device.type == "cpu" and not host):
        return EnergyMeter()
    try:
        counters, _ = find_counters(device, host, root, nvml)
    except SensorError as error:
        return EnergyMeter(reason=str(error))
    wait: Callable[[], object] = lambda: None  # noqa: E731
    if device.type == "cuda":
        import torch

        wait = lambda: torch.cuda.synchronize(device)  # noqa: E731
    return EnergyMeter(counters, idle_seconds=IDLE_SECONDS if choice == "idle" else 0.0, synchronize=wait)


def find_counters(
    device: torch.device, host: bool = True, root: Path = Path("/sys"), nvml: Any = None
) -> tuple[list[EnergyCounter], SensorError | None]:
    """The counters of a device and of its CPUs, and why the CPUs are not among them.

    They are left out if the GPU's counter may include them. Raises `SensorError` if the device has none.
    """
    if device.type == "cpu":
        return find_rapl_counters(root), None
    if device.type != "cuda":
        raise SensorError(f"no sensor of {device.type} is known")
    gpu = _find_gpu_counter(device, nvml)
    if not host or gpu.includes_cpu:
        return [gpu], None
    try:
        return [gpu, *find_rapl_counters(root)], None
    except SensorError as error:
        return [gpu], error


def find_rapl_counters(root: Path = Path("/sys")) -> list[EnergyCounter]:
    """One for each CPU package. Raises `SensorError` if there is none or it cannot be read."""
    counters: dict[str, EnergyCounter] = {}
    # Some packages are listed twice: by registers, and by memory ("mmio").
    folders = sorted((root / "class/powercap").glob("*"), key=lambda path: ("mmio" in path.name, path.name))
    for folder in folders:
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
        counters[name] = EnergyCounter(f"{platform.node()}:{name}", scope, "RAPL", read, 0.001, wraps_at)
    if not counters:
        raise SensorError(f"no RAPL in {root}")
    return list(counters.values())


def _find_gpu_counter(device: torch.device, nvml: Any) -> EnergyCounter:
    """Found by UUID: CUDA_VISIBLE_DEVICES may number GPUs otherwise than NVML does."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    name, uuid = properties.name, f"GPU-{str(properties.uuid).removeprefix('GPU-')}"
    if re.search(r"\bMIG\b", name):
        raise SensorError("MIG: NVML counts no energy of an instance")
    try:
        import pynvml

        nvml = nvml or pynvml
    except ImportError:
        remedy = "pip install 'dlm_rag[energy]'"
        raise SensorError(f"nvidia-ml-py is not installed: {remedy}", remedy) from None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        scope = f"GPU {nvml.nvmlDeviceGetIndex(handle)} ({name})"
        read = lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3  # noqa: E731
        read()
    except nvml.NVMLError as error:
        raise SensorError(f"NVML has no energy counter of {name}: {summarize_error(error)}") from None
    whole = re.search(r"\bG[HB]\d", name) is not None  # GH200's includes it (zeus #172); GB's may
    scope += " and perhaps its CPU" if whole else ""
    return EnergyCounter(uuid, scope, "NVML energy counter", read, 0.1, includes_cpu=whole)


def describe_sensors(device: torch.device, root: Path = Path("/sys"), nvml: Any = None) -> tuple[str, str]:
    """What would be measured on this device, and a command that would add to it."""
    try:
        counters, missing = find_counters(device, root=root, nvml=nvml)
    except SensorError as error:
        return f"not measured: {error}", error.remedy
    text = "; ".join(f"{counter.sensor}: {counter.scope}" for counter in counters)
    return (f"{text}; not the CPU: {missing}", missing.remedy) if missing else (text, "")
