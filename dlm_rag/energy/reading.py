"""What was measured in a window, as plain data: to be sent, merged and written down."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

MAX_PLAUSIBLE_VALUE = 1e30  # joules, seconds or tokens
MIN_WINDOW_SECONDS = 2.0  # a counter that steps every 0.1 s is 5 % off by then
COUNTED = ("joules", "error", "seconds", "answers", "tokens")


@dataclass(frozen=True)
class DeviceEnergy:
    """One device. error: joules by which the window's two ends are uncertain.

    idle_joules: what the device takes in that time with nothing to do, if that was measured.
    """

    device: str
    scope: str  # what the sensor counts, in words
    sensor: str
    joules: float
    error: float
    idle_joules: float | None = None


@dataclass(frozen=True)
class EnergyReading:
    """The devices of a window. Without them `reason` says why; without either nobody asked."""

    seconds: float
    parts: tuple[DeviceEnergy, ...] = ()
    reason: str = ""

    @property
    def was_requested(self) -> bool:
        return bool(self.parts or self.reason)

    @property
    def joules(self) -> float | None:
        """Of all devices; None if any failed: a part of the machine would look like a saving."""
        return self._sum("joules")

    @property
    def error(self) -> float | None:
        return self._sum("error")

    @property
    def idle_joules(self) -> float | None:
        return self._sum("idle_joules")

    @property
    def sensor(self) -> str:
        return "; ".join(dict.fromkeys(part.sensor for part in self.parts))

    @property
    def scope(self) -> str:
        return "; ".join(part.scope for part in self.parts)

    def to_record(self) -> dict[str, Any] | None:
        """For JSON, without names of machines; joules null if not measured, None if nobody asked."""
        names = ("seconds", "joules", "error", "idle_joules", "sensor", "scope", "reason")
        return {name: getattr(self, name) for name in names} if self.was_requested else None

    def _sum(self, name: str) -> float | None:
        return None if self.reason else _sum_or_none(getattr(part, name) for part in self.parts)


def merge_readings(readings: Sequence[EnergyReading]) -> EnergyReading:
    """Readings of the same time, as of workers; a device counts once, by its longest window."""
    asked = sorted((reading for reading in readings if reading.was_requested), key=lambda one: one.seconds)
    parts = {part.device: part for reading in asked for part in reading.parts}
    reasons = dict.fromkeys(reading.reason for reading in asked if reading.reason)
    longest = max((reading.seconds for reading in readings), default=0.0)
    return EnergyReading(longest, tuple(parts.values()), "; ".join(reasons))


def summarise_energy(entries: Any) -> dict[str, Any] | None:
    """The measured parts of a run together; None if there is none.

    entries: records of readings with "answers" and "tokens" (committed before the end of the text), as in a
    stamp; anything else is skipped.
    """
    known = [
        entry
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, Mapping)
        and all(_is_number(entry.get(name)) for name in COUNTED)
        and entry["joules"] > 0 < entry["seconds"]
    ]
    if not known:
        return None
    found: dict[str, Any] = {name: fsum(entry[name] for entry in known) for name in COUNTED}
    idle = [entry.get("idle_joules") for entry in known]
    return found | {
        "idle_joules": _sum_or_none(value if _is_number(value) else None for value in idle),
        "watts": found["joules"] / found["seconds"],
        "joules_per_answer": found["joules"] / found["answers"] if found["answers"] else None,
        "tokens_per_joule": found["tokens"] / found["joules"],
        **{
            name: "; ".join(dict.fromkeys(str(entry.get(name, "")) for entry in known))
            for name in ("sensor", "scope")
        },
    }


def format_energy(found: Mapping[str, Any] | None, reason: str = "") -> str:
    """A `summarise_energy` as one line; `reason`: why there is none."""
    if found is None:
        return f"energy: not measured ({reason})"
    joules, idle, each = found["joules"], found["idle_joules"], found["joules_per_answer"]
    above = "" if idle is None else f", {format_three_digits(joules - idle)} above idle"
    return " · ".join([
        f"energy: {format_three_digits(joules)} J ± {format_three_digits(found['error'])}{above}",
        *([f"{format_three_digits(each)} J/answer"] if each is not None else []),
        f"{format_three_digits(found['tokens_per_joule'])} tokens/J",
        f"{format_three_digits(found['watts'])} W",
        f"{found['sensor']}: {found['scope']}",
    ])  # fmt: skip


def format_three_digits(value: float) -> str:
    """Three digits or all before the point: 0.0123, 1.23, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _sum_or_none(values: Iterable[float | None]) -> float | None:
    """None for no values, or if one is None."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return fsum(known) if known and len(known) == len(listed) else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MAX_PLAUSIBLE_VALUE
