"""Sensors: counters of energy, and power that is integrated over time."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_WRAP_GAP_SECONDS = (
    60.0  # seconds between two readings of a counter that wraps: it might have done so twice
)


class SensorError(Exception):
    """Why there is no figure, in words. remedy: a command that gives one, where there is one."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass
class Sensor(ABC):
    """Something to be read: `start` once, then `joules_since_last` as often as one likes.

    device, scope, name: as in `DeviceEnergy`. read: a value now. time_uncertainty_seconds: by which a
    moment is uncertain. poll_seconds: between the readings that it needs, None where both ends are enough.
    may_include_cpu: whether the CPU is, or may be, in what it counts.
    """

    device: str
    scope: str
    name: str
    read: Callable[[], float]
    time_uncertainty_seconds: float
    poll_seconds: float | None = None
    may_include_cpu: bool = False
    _last: float = field(default=0.0, init=False)
    _at: float = field(default=0.0, init=False)

    def start(self, now: float) -> None:
        """Starts at this moment, in seconds; raises what reading raises."""
        self._last, self._at = self.read(), now

    def joules_since_last(self, now: float) -> float:
        """Joules since the last call; raises what reading raises, and `SensorError`."""
        before, then = self._last, self._at
        self.start(now)
        return self.joules(before, self._last, now - then)

    @abstractmethod
    def joules(self, before: float, now: float, seconds: float) -> float:
        """Between two values so many seconds apart."""


@dataclass
class EnergyCounter(Sensor):
    """A counter in joules; wraps_at_joules: where it begins anew, None where it never does."""

    wraps_at_joules: float | None = None

    def joules(self, before: float, now: float, seconds: float) -> float:
        if self.wraps_at_joules is not None and seconds > MAX_WRAP_GAP_SECONDS:
            raise SensorError(f"the counter, which wraps, was not read for {seconds:.0f} s")
        if now >= before:
            return now - before
        if self.wraps_at_joules is None:
            raise SensorError("the counter went backwards: was the driver loaded anew?")
        return now - before + self.wraps_at_joules


@dataclass
class PolledPower(Sensor):
    """Watts, integrated over time by trapezoids."""

    def joules(self, before: float, now: float, seconds: float) -> float:
        return seconds * (before + now) / 2
