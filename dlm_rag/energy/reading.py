"""What sensors counted between two moments, as plain data: to be sent, put together and written down."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import fsum
from typing import Any

MAX_PLAUSIBLE_VALUE = 1e30  # joules, seconds or tokens: beyond what anything counts
MIN_WINDOW_SECONDS = 2.0  # seconds of a window; a counter that steps every 0.1 s is 5 % off by then


@dataclass(frozen=True)
class DeviceEnergy:
    """One device. Two parts with the same `device` are readings of one thing.

    joules: None where its sensor failed, `reason` says how. error: joules by which the two moments are
    uncertain. idle_joules: what it takes in that time with nothing to do, where that was measured.
    """

    device: str
    scope: str  # what the sensor counts, in words
    sensor: str
    joules: float | None
    error: float | None = None
    idle_joules: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class EnergyReading:
    """The devices of one window. reason: why there is none; without either nobody asked."""

    seconds: float
    parts: tuple[DeviceEnergy, ...] = ()
    reason: str = ""

    @property
    def was_requested(self) -> bool:
        """Whether energy was to be measured."""
        return bool(self.parts or self.reason)

    @property
    def joules(self) -> float | None:
        """Of all devices; None where one of them failed: a part would look like a saving."""
        return None if self.reason else _sum_or_none(part.joules for part in self.parts)

    @property
    def error(self) -> float | None:
        """Joules, plus and minus, of all devices."""
        return None if self.joules is None else _sum_or_none(part.error for part in self.parts)

    @property
    def idle_joules(self) -> float | None:
        """What the devices take in that time with nothing to do; None where it was not measured."""
        return None if self.joules is None else _sum_or_none(part.idle_joules for part in self.parts)

    @property
    def sensor(self) -> str:
        return "; ".join(dict.fromkeys(part.sensor for part in self.parts))

    @property
    def scope(self) -> str:
        return "; ".join(part.scope for part in self.parts)

    @property
    def unmeasured_reason(self) -> str:
        """Why `joules` is None."""
        lost = [f"{part.scope}: {part.reason}" for part in self.parts if part.joules is None]
        return self.reason or "; ".join(lost)

    def to_record(self) -> dict[str, Any] | None:
        """As JSON has it, joules null where they were not measured; None where nobody asked.

        Without names of machines and GPUs: what is written down may be given away.
        """
        if not self.was_requested:
            return None
        names = ("seconds", "joules", "error", "idle_joules", "sensor", "scope")
        found = {name: getattr(self, name) for name in names}
        parts = [{k: v for k, v in asdict(part).items() if k != "device"} for part in self.parts]
        return found | {"reason": self.unmeasured_reason, "parts": parts}


def merge_readings(readings: Sequence[EnergyReading]) -> EnergyReading:
    """Readings that were taken at the same time, by workers say, as one.

    A device that several have read counts once, by the longest of its windows. Where one of those who were
    asked could not measure, the whole is not measured.
    """
    asked = [reading for reading in readings if reading.was_requested]
    parts: dict[str, DeviceEnergy] = {}
    for reading in sorted(asked, key=lambda reading: reading.seconds):
        parts |= {part.device: part for part in reading.parts}
    reasons = dict.fromkeys(reading.reason for reading in asked if reading.reason)
    longest = max((reading.seconds for reading in readings), default=0.0)
    return EnergyReading(longest, tuple(parts.values()), "; ".join(reasons))


def summarise_energy(entries: Any) -> dict[str, Any] | None:
    """The parts of a run, one after another, that were measured, as one; None where none was.

    entries: records of readings with "answers" and "tokens" beside them (tokens committed before the end;
    prompts are not among them), as a stamp holds them; what is no such record is passed over.
    """
    counted = ("joules", "error", "seconds", "answers", "tokens")
    known = [
        entry
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, Mapping)
        and all(_is_number(entry.get(name)) for name in counted)
        and entry["joules"] > 0 < entry["seconds"]
    ]
    if not known:
        return None
    found: dict[str, Any] = {name: fsum(entry[name] for entry in known) for name in counted}
    joules, answers = found["joules"], found["answers"]
    idle = (entry.get("idle_joules") for entry in known)
    return found | {
        "idle_joules": _sum_or_none(value if _is_number(value) else None for value in idle),
        "watts": joules / found["seconds"],
        "joules_per_answer": joules / answers if answers else None,
        "tokens_per_joule": found["tokens"] / joules,
        **{
            name: "; ".join(dict.fromkeys(str(entry.get(name, "")) for entry in known))
            for name in ("sensor", "scope")
        },
    }


def format_energy(found: Mapping[str, Any]) -> str:
    """A `summarise_energy` as one line for a person."""
    idle = found["idle_joules"]
    above = "" if idle is None else f", {format_three_digits(found['joules'] - idle)} above idle"
    each = found["joules_per_answer"]
    return " · ".join(
        [
            f"energy: {format_three_digits(found['joules'])} J ± "
            f"{format_three_digits(found['error'])}{above}",
            *([f"{format_three_digits(each)} J/answer"] if each is not None else []),
            f"{format_three_digits(found['tokens_per_joule'])} tokens/J",
            f"{format_three_digits(found['watts'])} W",
            f"{found['sensor']}: {found['scope']}",
        ]
    )


def format_unmeasured_energy(reason: str) -> str:
    """The line of a run without a figure."""
    return f"energy: not measured ({reason})"


def format_three_digits(value: float) -> str:
    """Three digits or all before the point: 0.0123, 1.23, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _sum_or_none(values: Iterable[float | None]) -> float | None:
    """None for no values, and where one is None."""
    asked = list(values)
    known = [value for value in asked if value is not None]
    return fsum(known) if known and len(known) == len(asked) else None


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_PLAUSIBLE_VALUE
    )
