"""Joules of training, by windows of steps, summed over all processes."""

from collections import Counter
from typing import Any

from dlm_rag.energy.meter import (
    MIN_WINDOW_SECONDS,
    EnergyMeter,
    EnergyReading,
    format_energy,
    format_three_digits,
    summarise_energy,
)
from dlm_rag.training.distributed import DistributedContext

TOKEN_METRICS = ("tokens", "supervised_tokens")  # all of prompts and canvases; those that are learned from


class EnergyWindows:
    """Adds joules to the metrics of the step that ends a window, validations and checkpoints included.

    Joules are null if a sensor of any process failed. Every process makes one and calls it with the others.
    """

    def __init__(self, meter: EnergyMeter, processes: DistributedContext) -> None:
        self._meter, self._processes = meter, processes
        self._measuring = round(processes.all_reduce_sum([float(bool(meter.counters))])[0])  # processes
        self._window: Counter[str] = Counter()
        self._run: Counter[str] = Counter()
        meter.start()

    def add_step(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The figures of the window that this step ends, or nothing."""
        step = {"steps": 1} | {name: metrics[name] for name in TOKEN_METRICS}
        self._window.update(step)
        self._run.update(step)
        if not self._measuring or self._processes.any_rank(self._meter.elapsed < MIN_WINDOW_SECONDS):
            return {}
        counts, self._window, reading = self._window, Counter(), self._meter.lap()
        joules, error, _ = self._sum_processes(reading)
        found = {
            "joules": joules,
            "joules_error": error,
            "joules_seconds": reading.seconds,
            "joules_steps": counts["steps"],
            "joules_of": f"{reading.sensor}: {self._describe_scope(reading)}",
        }
        if joules is None:
            return found
        per_joule = {f"{name}_per_joule": counts[name] / joules for name in TOKEN_METRICS}
        return found | per_joule | {"watts": joules / reading.seconds}

    def stop_and_describe(self) -> str:
        """Stops the meter; what the run has used, in words."""
        reading = self._meter.stop()
        joules, error, idle = self._sum_processes(reading)
        sums = {
            "joules": joules,
            "error": error,
            "idle_joules": idle,
            "scope": self._describe_scope(reading),
        }
        record = {"seconds": reading.seconds, "sensor": reading.sensor, "answers": 0, **self._run, **sums}
        found = summarise_energy([record])
        if found is None and not reading.was_requested:
            return ""
        text = format_energy(found, reading.reason or "a sensor of another process")
        return (
            f"{text} · {format_three_digits((joules or 0) / max(1, self._run['steps']))} J/step"
            if found
            else text
        )

    def _describe_scope(self, reading: EnergyReading) -> str:
        others = self._measuring - bool(self._meter.counters)
        more = f", with the devices of {others} other process{'es' * (others > 1)}" if others else ""
        return f"{reading.scope}{more}"

    def _sum_processes(self, reading: EnergyReading) -> list[float | None]:
        """Joules, error and idle joules of all processes; None if one of them has none."""
        own = [reading.joules, reading.error, reading.idle_joules]
        missing = [float(reading.was_requested and value is None) for value in own]
        sums = self._processes.all_reduce_sum([*(value or 0.0 for value in own), *missing])
        return [None if lost else value for value, lost in zip(sums[:3], sums[3:], strict=True)]
