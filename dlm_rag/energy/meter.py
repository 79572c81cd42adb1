"""Joules from start to stop, by the machine's own sensors; where there is none, the reason and no figure.

with open_meter("auto", device) as meter:
    ...
meter.reading.joules  # None if not measured; `meter.reading.reason` says why
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import fsum
from typing import TYPE_CHECKING, Any

from dlm_rag.energy.sensors import EnergyCounter, find_counters
from dlm_rag.errors import summarize_error
from dlm_rag.progress import show_status

if TYPE_CHECKING:
    import torch

IDLE_SECONDS = 10.0
MIN_WINDOW_SECONDS = 2.0  # a counter that steps every 0.1 s is 5 % off by then
READ_SECONDS = 20.0  # between readings of a counter that wraps: one of 65 kJ lasts 131 s at 500 W
MAX_PLAUSIBLE_VALUE = 1e30  # joules, seconds or tokens
SUMMED = ("joules", "error", "idle_joules")
COUNTED = ("joules", "error", "seconds", "answers", "tokens")
Mark = tuple[float, list[float]]  # a moment, and the joules of each counter until then


@dataclass(frozen=True)
class EnergyReading:
    """A window of one device, or of several, its `parts`; with neither sensor nor reason nobody asked.

    Joules of several are None if one of them failed: a part of the machine would look like a saving.
    """

    seconds: float
    joules: float | None = None
    error: float | None = None  # joules by which both ends are uncertain
    idle_joules: float | None = None  # with no work
    sensor: str = ""
    scope: str = ""  # what the sensor counts, in words
    reason: str = ""  # why nothing was measured
    device: str = ""
    parts: tuple[EnergyReading, ...] = ()

    @property
    def was_requested(self) -> bool:
        return bool(self.sensor or self.reason)

    def to_record(self) -> dict[str, Any] | None:
        """For JSON, without names of machines; joules null if not measured, None if nobody asked."""
        names = (*SUMMED, "seconds", "sensor", "scope", "reason")
        return {name: getattr(self, name) for name in names} if self.was_requested else None


def merge_readings(readings: Sequence[EnergyReading]) -> EnergyReading:
    """Readings of the same time, as of workers; a device counts once, by its longest window."""
    asked = sorted((reading for reading in readings if reading.was_requested), key=lambda one: one.seconds)
    parts = {part.device: part for one in asked for part in one.parts or [one] if part.sensor}.values()
    reason = "; ".join(dict.fromkeys(one.reason for one in asked if one.reason))
    joules, error, idle = (
        None if reason else _sum_or_none([getattr(part, name) for part in parts]) for name in SUMMED
    )
    sensor = "; ".join(dict.fromkeys(part.sensor for part in parts))
    longest = max((reading.seconds for reading in readings), default=0.0)
    scope = "; ".join(part.scope for part in parts)
    return EnergyReading(longest, joules, error, idle, sensor, scope, reason, parts=tuple(parts))


class EnergyMeter:
    """Joules of all counters from `start` to `stop`; a counter that fails makes the reading None.

    reason: of every reading, where there are no counters. idle_seconds: how long the idle power is measured
    before the first start. synchronize: waits until the device has finished.
    """

    def __init__(
        self,
        counters: Sequence[EnergyCounter] = (),
        reason: str = "",
        idle_seconds: float = 0.0,
        synchronize: Callable[[], object] = lambda: None,
    ) -> None:
        self.counters, self.reading = tuple(counters), EnergyReading(0.0)
        self._reason, self._failure, self._lock = reason, "", threading.Lock()
        self._idle_seconds, self._synchronize = idle_seconds, synchronize
        self._begun: Mark
        self._lap: Mark

    def __enter__(self) -> EnergyMeter:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        if self.counters and (seconds := self._idle_seconds):
            show_status(f"measuring the idle power for {seconds:.0f} s")
            self._idle_seconds = 0.0
            with self:
                time.sleep(seconds)
            idle = self.reading
            for counter, part in zip(self.counters, idle.parts, strict=False):  # no parts if one failed
                counter.idle_watts = (part.joules or 0.0) / idle.seconds
        self._failure, self._stopped = "", threading.Event()
        for counter in self.counters:
            counter.total, counter.last = 0.0, None
        self._begun = self._lap = self._read_all()
        if any(counter.wraps_at for counter in self.counters):
            threading.Thread(target=self._read_often, args=(self._stopped,), daemon=True).start()

    def lap(self) -> EnergyReading:
        """The window since the last lap, or the start."""
        before, self._lap = self._lap, self._read_all()
        return self._make_reading(before, self._lap)

    def stop(self) -> EnergyReading:
        """The window since the start, which becomes `reading`."""
        self.reading = self._make_reading(self._begun, self._read_all())
        self._stopped.set()
        return self.reading

    @property
    def elapsed(self) -> float:
        """Seconds since the last lap, or the start."""
        return time.perf_counter() - self._lap[0]

    def count_joules(self) -> list[float]:
        """Reads the counters; returns the joules of each since the start."""
        with self._lock:
            for counter in self.counters:
                if not self._failure:
                    try:
                        counter.advance()
                    except Exception as error:  # of any driver; the run goes on
                        self._failure = f"{counter.scope}: {summarize_error(error)}"
            return [counter.total for counter in self.counters]

    def _read_often(self, stopped: threading.Event) -> None:
        while not stopped.wait(READ_SECONDS):
            self.count_joules()

    def _read_all(self) -> Mark:
        try:
            self._synchronize()
        except Exception as error:  # the device is gone; the run reports that itself
            self._failure = summarize_error(error)
        return time.perf_counter(), self.count_joules()

    def _make_reading(self, before: Mark, after: Mark) -> EnergyReading:
        seconds, reason = after[0] - before[0], self._failure if self.counters else self._reason
        joules = [end - start for start, end in zip(before[1], after[1], strict=True)]
        if joules and not reason:
            if seconds < MIN_WINDOW_SECONDS:
                reason = f"{seconds:.1f} s are too short: {MIN_WINDOW_SECONDS:.0f} s at least"
            elif min(joules) <= 0:
                reason = f"{self.counters[joules.index(min(joules))].scope}: its counter stands still"
        if reason or not joules:
            return EnergyReading(seconds, reason=reason)
        return merge_readings([
            EnergyReading(
                seconds, value, counter.step_seconds * value / seconds,
                None if counter.idle_watts is None else counter.idle_watts * seconds,
                counter.sensor, counter.scope, device=counter.device,
            )
            for counter, value in zip(self.counters, joules, strict=True)
        ])  # fmt: skip


def open_meter(choice: str, device: torch.device, host: bool = True) -> EnergyMeter:
    """A meter of what a program computes on: its GPU, and the CPUs if `host`.

    choice: as in `Config.energy`. host: true in one process of each machine.
    """
    if choice == "none" or (device.type == "cpu" and not host):
        return EnergyMeter()
    import torch

    counters, missing = find_counters(device, host)
    if not counters:
        return EnergyMeter(reason=str(missing))
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    return EnergyMeter(counters, "", IDLE_SECONDS if choice == "idle" else 0.0, wait)


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
    for name in ("sensor", "scope"):
        found[name] = "; ".join(dict.fromkeys(str(entry.get(name, "")) for entry in known))
    idle = [entry.get("idle_joules") for entry in known]
    return found | {
        "idle_joules": _sum_or_none([value if _is_number(value) else None for value in idle]),
        "watts": found["joules"] / found["seconds"],
        "joules_per_answer": found["joules"] / found["answers"] if found["answers"] else None,
        "tokens_per_joule": found["tokens"] / found["joules"],
    }


def format_energy(found: Mapping[str, Any] | None, reason: str = "") -> str:
    """A `summarise_energy` as one line; `reason`: why there is none."""
    if found is None:
        return f"energy: not measured ({reason})"
    joules, idle, each = found["joules"], found["idle_joules"], found["joules_per_answer"]
    above = "" if idle is None else f", {format_three_digits(joules - idle)} above idle"
    parts = [f"energy: {format_three_digits(joules)} J ± {format_three_digits(found['error'])}{above}"]
    parts += [] if each is None else [f"{format_three_digits(each)} J/answer"]
    parts.append(f"{format_three_digits(found['tokens_per_joule'])} tokens/J")
    parts += [f"{format_three_digits(found['watts'])} W", f"{found['sensor']}: {found['scope']}"]
    return " · ".join(parts)


def format_three_digits(value: float) -> str:
    """Three digits or all before the point: 0.0123, 1.23, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _sum_or_none(values: Sequence[float | None]) -> float | None:
    """None for no values, or if one is None."""
    known = [value for value in values if value is not None]
    return fsum(known) if known and len(known) == len(values) else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MAX_PLAUSIBLE_VALUE
