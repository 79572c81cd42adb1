"""Joules of training: by windows of steps, summed over all processes."""

from typing import Any

from dlm_rag.energy.meter import EnergyMeter
from dlm_rag.energy.reading import (
    MIN_WINDOW_SECONDS,
    EnergyReading,
    format_energy,
    format_three_digits,
    format_unmeasured_energy,
    summarise_energy,
)
from dlm_rag.training.distributed import DistributedContext

TOKEN_METRICS = ("tokens", "supervised_tokens")  # all of prompts and canvases; those that are learned from


class EnergyWindows:
    """Adds to the metrics of steps what the meters of all processes counted, once that is long enough.

    A window is all that happened since the last, validations and checkpoints too. Where a sensor of any
    process has failed the joules are null.
    """

    def __init__(self, meter: EnergyMeter, processes: DistributedContext) -> None:
        """Starts the meter. Every process makes one, and calls its methods with the others."""
        self._meter, self._processes = meter, processes
        self._measuring = round(processes.all_reduce_sum([float(bool(meter.sensors))])[0])  # processes
        self._counts = self._whole = dict.fromkeys(("steps", *TOKEN_METRICS), 0)
        meter.start()

    def add_step(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """What the metrics of a step get: nothing, or the figures of the window that it ends."""
        step = {"steps": 1} | {name: metrics[name] for name in TOKEN_METRICS}
        self._counts = _add_counts(self._counts, step)
        if not self._measuring or self._processes.any_rank(self._meter.elapsed < MIN_WINDOW_SECONDS):
            return {}
        counts, reading = self._counts, self._meter.lap()
        self._whole, self._counts = _add_counts(self._whole, counts), dict.fromkeys(counts, 0)
        joules, error, _ = self._summed(reading)
        found = {
            "joules": joules,
            "joules_error": error,
            "joules_seconds": reading.seconds,
            "joules_steps": counts["steps"],
            "joules_of": self._scope(reading),
        }
        if joules is None:
            return found
        per_joule = {f"{name}_per_joule": counts[name] / joules for name in TOKEN_METRICS}
        return found | per_joule | {"watts": joules / reading.seconds}

    def stop_and_describe(self) -> str:
        """Ends the measuring: what these steps and all between them have drawn, in words."""
        counts, reading = _add_counts(self._whole, self._counts), self._meter.stop()
        joules, error, idle = self._summed(reading)
        found = summarise_energy(
            [
                {
                    "joules": joules,
                    "error": error,
                    "idle_joules": idle,
                    "seconds": reading.seconds,
                    "sensor": reading.sensor,
                    "scope": self._scope(reading).partition(": ")[2],
                    "answers": 0,
                    "tokens": counts["tokens"],
                }
            ]
        )
        if found is not None and joules is not None:
            return (
                f"{format_energy(found)} · {format_three_digits(joules / max(1, counts['steps']))} J/step"
            )
        return (
            format_unmeasured_energy(reading.unmeasured_reason or "a sensor of another process")
            if reading.was_requested
            else ""
        )

    def _scope(self, reading: EnergyReading) -> str:
        others = self._measuring - bool(self._meter.sensors)
        more = f", with the devices of {others} other process{'es' * (others > 1)}" if others else ""
        return f"{reading.sensor}: {reading.scope}{more}"

    def _summed(self, reading: EnergyReading) -> list[float | None]:
        """Joules, their error and idle joules of all processes; None where one of them has none to tell."""
        own = [reading.joules, reading.error, reading.idle_joules]
        lacking = [float(reading.was_requested and value is None) for value in own]
        sums = self._processes.all_reduce_sum([*(value or 0.0 for value in own), *lacking])
        return [None if lost else value for value, lost in zip(sums[:3], sums[3:], strict=True)]


def _add_counts(some: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    return {name: some[name] + more[name] for name in some}
