"""Joules of training, by windows of steps, summed over all processes."""

from collections import Counter
from typing import Any

from dlm_rag.energy.meter import (
    MIN_WINDOW_SECONDS,
    EnergyMeter,
    EnergyReading,
    format_energy,
    format_three_digits,
    merge_readings,
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
        self._is_measured = processes.any_rank(bool(meter.counters))
        self._window: Counter[str] = Counter()
        self._run: Counter[str] = Counter()
        meter.start()

    def add_step(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The figures of the window that this step ends, or nothing."""
        step = {"steps": 1} | {name: metrics[name] for name in TOKEN_METRICS}
        self._window.update(step)
        self._run.update(step)
        if not self._is_measured or self._processes.any_rank(self._meter.elapsed < MIN_WINDOW_SECONDS):
            return {}
        counts, self._window = self._window, Counter()
        reading, scope = self._merge_processes(self._meter.lap())
        joules, seconds = reading.joules, reading.seconds
        found = {
            "joules": joules, "joules_error": reading.error, "joules_seconds": seconds,
            "joules_steps": counts["steps"], "joules_of": f"{reading.sensor}: {scope}",
        }  # fmt: skip
        if joules is None:
            return found
        per_joule = {f"{name}_per_joule": counts[name] / joules for name in TOKEN_METRICS}
        return found | per_joule | {"watts": joules / seconds}

    def stop_and_describe(self) -> str:
        """Stops the meter; what the run has used, in words, or nothing where nobody asked."""
        reading, scope = self._merge_processes(self._meter.stop())
        record = reading.to_record()
        if record is None:
            return ""
        found = summarise_energy([record | {"answers": 0, **self._run, "scope": scope}])
        text = format_energy(found, reading.reason)
        if found is None:
            return text
        return f"{text} · {format_three_digits(found['joules'] / max(1, self._run['steps']))} J/step"

    def _merge_processes(self, own: EnergyReading) -> tuple[EnergyReading, str]:
        """The reading of all processes, and its scope with the others as a number."""
        readings = self._processes.all_gather_object(own)
        others = sum(bool(reading.sensor) for reading in readings) - bool(own.sensor)
        more = f", with the devices of {others} other process{'es' * (others > 1)}" if others else ""
        return merge_readings(readings), f"{own.scope}{more}"
