"""The meter: reads sensors at the beginning and at the end, and between them those that need it.

with open_meter("auto", device) as meter:
    ...
meter.reading.joules  # None where it was not measured; `meter.reading.unmeasured_reason` says why
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.energy.host import SYSFS_FOLDER, find_host_sensors
from dlm_rag.energy.nvml import find_gpu_sensors
from dlm_rag.energy.reading import MIN_WINDOW_SECONDS, DeviceEnergy, EnergyReading
from dlm_rag.energy.sensors import Sensor, SensorError
from dlm_rag.errors import summarize_error
from dlm_rag.progress import show_status

if TYPE_CHECKING:
    import torch

IDLE_SECONDS = 10.0


class EnergyMeter:
    """Counts the joules of its sensors from `start` to `stop`, from lap to lap in between.

    A sensor that fails is told in the readings and raises nothing. Without sensors every reading says
    `reason`; without that either, nobody asked.
    """

    def __init__(
        self,
        sensors: Sequence[Sensor] = (),
        reason: str = "",
        idle_seconds: float = 0.0,
        synchronize: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """idle_seconds: for so long nothing is done before the first start, to measure what that takes.
        synchronize: waits until the device has done what it was told.
        """
        self.sensors, self._reason = tuple(sensors), reason
        self._idle_seconds = idle_seconds
        self._idle_watts: list[float | None] = [None] * len(self.sensors)
        self._synchronize, self._clock, self._sleep = synchronize, clock, sleep
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._begun = self._lap = self._now = (0.0, (0.0,) * len(self.sensors))  # moment, joules of each
        self.reading = EnergyReading(0.0)  # of the last window, from start to stop

    def __enter__(self) -> EnergyMeter:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begins a window; the first one, where that was asked for, after the idle power was measured."""
        if self._idle_seconds and self.sensors:
            seconds, self._idle_seconds = self._idle_seconds, 0.0
            show_status(f"measuring the idle power for {seconds:.0f} s")
            self._open()
            self._sleep(seconds)
            idle = self.stop()
            self._idle_watts = [p.joules / idle.seconds if p.joules else None for p in idle.parts]
        self._open()

    def lap(self) -> EnergyReading:
        """The window since the last lap, or since the start; the next begins here."""
        reading = self._since(self._lap)
        self._lap = self._now
        return reading

    def stop(self) -> EnergyReading:
        """Ends the window; returns the whole of it, which is then `reading`."""
        self.reading = self._since(self._begun)
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.reading

    @property
    def elapsed(self) -> float:
        """Seconds since the last lap, or since the start."""
        return self._clock() - self._lap[0]

    def read(self, needed_only: bool = True) -> tuple[float, ...]:
        """Adds what the sensors counted since the last time; of those that need it, as the thread does.

        Returns the joules of each since the start.
        """
        with self._lock:
            for number, sensor in enumerate(self.sensors):
                if number in self._lost or (needed_only and sensor.poll_seconds is None):
                    continue
                try:
                    self._totals[number] += sensor.joules_since_last(self._clock())
                except Exception as error:  # of any driver; the run goes on
                    self._lost[number] = summarize_error(error)
            return tuple(self._totals)

    def _open(self) -> None:
        self._lost: dict[int, str] = {}
        self._totals = [0.0] * len(self.sensors)
        self._wait()
        with self._lock:
            begun = self._clock()
            for number, sensor in enumerate(self.sensors):
                try:
                    sensor.start(self._clock())
                except Exception as error:
                    self._lost[number] = summarize_error(error)
        self._begun = self._lap = self._now = (begun, tuple(self._totals))
        periods = [sensor.poll_seconds for sensor in self.sensors if sensor.poll_seconds is not None]
        self._stopped.clear()
        if periods:
            self._thread = threading.Thread(target=self._run, args=(min(periods),), daemon=True)
            self._thread.start()

    def _run(self, period: float) -> None:
        while not self._stopped.wait(period):
            self.read()

    def _wait(self) -> None:
        try:
            self._synchronize()
        except Exception as error:  # the device is gone: the run meets that by itself
            self._lost |= dict.fromkeys(range(len(self.sensors)), summarize_error(error))

    def _since(self, mark: tuple[float, tuple[float, ...]]) -> EnergyReading:
        self._wait()
        now = self._clock()
        totals = self.read(needed_only=False)
        self._now = (now, totals)
        seconds = now - mark[0]
        if not self.sensors:
            return EnergyReading(seconds, (), self._reason)
        if seconds < MIN_WINDOW_SECONDS:
            return EnergyReading(
                seconds, (), f"{seconds:.1f} s are too short: {MIN_WINDOW_SECONDS:.0f} s at least"
            )
        joules = [after - before for before, after in zip(mark[1], totals, strict=True)]
        return EnergyReading(
            seconds, tuple(self._part(n, value, seconds) for n, value in enumerate(joules))
        )

    def _part(self, number: int, joules: float, seconds: float) -> DeviceEnergy:
        sensor, idle = self.sensors[number], self._idle_watts[number]
        lost = self._lost.get(number, "" if joules > 0 else "its sensor stands still")
        said = (sensor.device, sensor.scope, sensor.name)
        if lost:
            return DeviceEnergy(*said, None, reason=lost)
        error = sensor.time_uncertainty_seconds * joules / seconds
        return DeviceEnergy(*said, joules, error, None if idle is None else idle * seconds)


def open_meter(
    choice: str, device: torch.device, host: bool = True, root: Path = SYSFS_FOLDER, nvml: Any = None
) -> EnergyMeter:
    """A meter of what a program computes on: its GPU, the CPUs of the machine.

    choice: as in `Config.energy`. host: whether this process counts the CPUs, as one of a machine does.
    root, nvml: stand for /sys and pynvml.
    """
    if choice == "none" or (device.type == "cpu" and not host):
        return EnergyMeter()
    try:
        sensors, _ = find_sensors(device, host, root, nvml)
    except SensorError as error:
        return EnergyMeter(reason=str(error))
    waits: Callable[[], object] = lambda: None  # noqa: E731
    if device.type == "cuda":
        import torch

        waits = lambda: torch.cuda.synchronize(device)  # noqa: E731
    return EnergyMeter(sensors, idle_seconds=IDLE_SECONDS if choice == "idle" else 0.0, synchronize=waits)


def find_sensors(
    device: torch.device, host: bool = True, root: Path = SYSFS_FOLDER, nvml: Any = None
) -> tuple[list[Sensor], SensorError | None]:
    """The sensors of a device and the CPUs beside it, and why these are not among them, if they are not.

    Where a GPU's sensor counts the CPU too, or may do so, the CPU is not counted again. Raises
    `SensorError` where the device itself has none.
    """
    if device.type == "cpu":
        return find_host_sensors(root), None
    if device.type != "cuda":
        raise SensorError(f"no sensor of {device.type} is known")
    import torch

    found = torch.cuda.get_device_properties(device)
    sensors = find_gpu_sensors([(str(found.uuid), found.name)], nvml)
    if not host or any(sensor.may_include_cpu for sensor in sensors):
        return sensors, None
    try:
        return sensors + find_host_sensors(root, beside_gpu=True), None
    except SensorError as error:
        return sensors, error


def describe_sensors(device: torch.device, root: Path = SYSFS_FOLDER, nvml: Any = None) -> tuple[str, str]:
    """What would be measured on this device, in words, and a command that would make it more."""
    try:
        sensors, lacking = find_sensors(device, root=root, nvml=nvml)
    except SensorError as error:
        return f"not measured: {error}", error.remedy
    said = "; ".join(f"{sensor.name}: {sensor.scope}" for sensor in sensors)
    return (f"{said}; not the CPU: {lacking}", lacking.remedy) if lacking else (said, "")
