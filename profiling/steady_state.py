"""Decoding in steady state: places are refilled as they fall free, and neither end of the run is counted.

Its figures are set against a roofline: the best of ten matrix products and ten copies on the device.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from statistics import median
from typing import NamedTuple

import torch
from bench_tools import TableRow, synchronize_device, time_calls
from decode_replay import find_caching_runner, require_masked_denoiser

from dlm_rag.engine.engine import Decoder, Engine
from dlm_rag.errors import RunError
from dlm_rag.model.denoiser import FlopCount
from dlm_rag.questions import Question

WARMUP_STEPS = 24  # rows begin together; after as many they are spread over their answers
PROFILED_STEPS = 6
ALLOCATOR_COUNTS = {"num_device_alloc": "allocated", "num_alloc_retries": "allocated again"}


class Roofline(NamedTuple):
    """FLOP/s of a large matrix product and bytes/s of a large copy, both ways counted."""

    flops: float
    bytes: float

    def describe(self, work: FlopCount, seconds: float) -> TableRow:
        """The least time for the work as a share of `seconds`, and what limits it."""
        compute, memory = work.flops / self.flops, work.bytes_moved / self.bytes
        bound = "compute" if compute > memory else "memory"
        return {"roofline %": 100 * max(compute, memory) / seconds, "bound by": bound}


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """The best of ten matrix products and ten copies on this device."""
    side, length = (8192, 2**30) if device.type == "cuda" else (2048, 2**27)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.ones(length // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    product, copy = (
        min(time_calls(call, device)) for call in (lambda: a @ b, lambda: target.copy_(source))
    )
    return Roofline(2 * side**3 / product, 2 * length / copy)


class FullEngine:
    """An engine in whose every step all rows take one; questions come again, under new ids."""

    def __init__(self, engine: Engine, questions: Sequence[Question]) -> None:
        self.engine, self._questions, self._numbers = engine, questions, count()
        pipelined = engine.settings.overlap == "pipeline" and engine.settings.batch_size > 1
        self._calls = 2 if pipelined else 1  # that are a step of all rows
        # Forwards of rows, of whatever answer, and those of the answers that ended.
        self.row_forwards = self.answers = self.forwards = self.tokens = 0

    def step(self) -> None:
        """Raises `RunError` where a question fails: its steps would be too fast."""
        for _ in range(self._calls):
            while self.engine.capacity:
                turn, place = divmod(next(self._numbers), len(self._questions))
                question = self._questions[place]
                self.engine.submit(replace(question, id=f"{question.id}.{turn}"))
            for event in self.engine.step():
                if event.rollout.error:
                    raise RunError(event.rollout.error)
                self.row_forwards += len(event.rollout.steps) > 1  # the first step only searches
                if event.finished:
                    self.answers += 1
                    self.forwards += event.rollout.forwards
                    self.tokens += sum(len(step.committed) for step in event.rollout.steps)


def measure_steady(
    decoder: Decoder, questions: Sequence[Question], roofline: Roofline, steps: int
) -> TableRow:
    """Returns the figures of `steps` steps of all rows; a question's evidence is in the pool after its
    first turn.

    answers/s and tokens/s: forwards of rows by those of the answers that ended meanwhile; absent where none
    did. busy %: share of the time of further steps in which a kernel of the GPU ran, by torch's profiler.
    """
    device, runner = decoder.denoiser.device, find_caching_runner(decoder)
    denoiser, full = require_masked_denoiser(decoder), FullEngine(decoder.new_engine(), questions)
    try:
        for _ in range(WARMUP_STEPS):
            full.step()
        full.row_forwards = full.answers = full.forwards = full.tokens = 0
        work = replace(denoiser.flop_count)
        encoded = 0 if runner is None else runner.cache_stats.encoded_tokens
        synchronize_device(device)
        before = dict(torch.cuda.memory_stats(device)) if device.type == "cuda" else {}
        seconds = []
        for _ in range(steps):
            begun = time.perf_counter()
            full.step()
            seconds.append(time.perf_counter() - begun)
        now = dict(torch.cuda.memory_stats(device)) if device.type == "cuda" else {}
        new = 0 if runner is None else runner.cache_stats.encoded_tokens - encoded
        row: TableRow = {
            "setting": f"{decoder.config.batch_size} rows",
            "ms/step": 1e3 * median(seconds),
            "slowest": 1e3 * max(seconds),
            "new tokens/step": new / steps,
            **roofline.describe(denoiser.flop_count - work, sum(seconds)),
        }
        if full.answers:
            forwards, rate = full.forwards / full.answers, full.row_forwards / sum(seconds)
            row |= {"answers/s": [rate / forwards], "tokens/s": rate * full.tokens / full.forwards}
            row["forwards"] = forwards
        row |= {title: now[key] - before[key] for key, title in ALLOCATOR_COUNTS.items() if key in now}
        return row | measure_busy_share(full, device)
    finally:
        full.engine.close()


def measure_busy_share(full: FullEngine, device: torch.device) -> TableRow:
    """The share of some further steps in which a GPU ran a kernel; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        begun = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            full.step()
        synchronize_device(device)
        seconds = time.perf_counter() - begun
    busy = sum(event.self_device_time_total for event in profiler.key_averages())
    return {"busy %": 100 * busy / 1e6 / seconds}
