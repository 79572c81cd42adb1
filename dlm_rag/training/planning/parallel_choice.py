"""Whole copies or shards: what each takes on several devices, and which is best.

What fits is chosen by the seconds of a step, in which all devices together do the same work: the rows of a
training step, or one denoising step of `decode.batch_size` rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from dlm_rag.config import Config, TrainConfig
from dlm_rag.decode.memory_budget import GIB
from dlm_rag.decode.resolve_settings import resolve_settings
from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.flops import count_encode_flops, count_head_flops
from dlm_rag.model.quantize import METHODS, count_weight_bytes
from dlm_rag.progress import format_bytes, track_progress
from dlm_rag.training.planning.gpu_specs import GpuSpec
from dlm_rag.training.planning.plan import (
    PhasePlan,
    check_phase,
    combine_seconds,
    plan_decode_memory,
    plan_phase,
)

REPLANNINGS = 3  # with more parts of a step, until one fits
REMEDIES = {
    "training": "train.lora_rank, train.optimizer=muon and more devices take less on each",
    "decoding": "model.quantize, a smaller decode.batch_size and more devices take less on each",
}


@dataclass(frozen=True)
class Choice:
    """A way to use the devices.

    settings: that ask for it; empty where no program does it so. memory: bytes on a device. seconds: of a
    step, as `combine_seconds`. problem: why it cannot be, in words.
    """

    name: str
    settings: str = ""
    memory: float = math.inf
    seconds: dict[str, float] | None = None
    problem: str = ""

    @property
    def step_seconds(self) -> float:
        return math.inf if self.seconds is None else self.seconds["together"]

    @property
    def bound(self) -> str:
        """What takes the longest."""
        found = {name: time for name, time in (self.seconds or {}).items() if name != "together"}
        return max(found, key=lambda name: found[name]) if found else ""

    @property
    def is_possible(self) -> bool:
        return bool(self.settings) and not self.problem


def compare_ways(devices: int, consider: Callable[[str], Choice]) -> list[Choice]:
    """What `consider` finds of each way."""
    found = []
    for name in track_progress(["whole", "shards"][:devices], "comparing ways to share it"):
        try:
            found.append(consider(name))
        except ConfigError as error:
            found.append(Choice(name, problem=str(error)))
    return found


def _rank_choice(choice: Choice) -> tuple[bool, float]:
    """The smaller the better; of equals the first is taken, which sends less."""
    possible = choice.is_possible
    return not possible, choice.step_seconds if possible else choice.memory


def check_room(need: float, machine: GpuSpec) -> str:
    """Why so many bytes do not fit on a device, in words; empty where they do."""
    have = machine.usable_memory
    return f"{format_bytes(need)} of {format_bytes(have)}" if need > have else ""


def compare_training(
    config: Config, shape: DenoiserConfig, dtype: torch.dtype, machine: GpuSpec
) -> list[Choice]:
    """The ways to train, each with as many `gradient_accumulation_steps` as it needs to fit."""
    phases, plan = config.train.get_phase_configs(), config.plan

    def consider(name: str) -> Choice:
        parallel = "fsdp" if name == "shards" else "ddp"
        trained = {at: replace(train, parallel=parallel) for at, train in phases.items()}
        for train in trained.values():  # all, before the first is planned
            check_phase(config, train, shape)
        planned = [
            _fit_phase(partial(plan_phase, config, at, shape, dtype), train, machine)
            for at, train in trained.items()
        ]
        steps = sum(phase.train.max_steps for phase in planned)
        times = [(p.train.max_steps / steps, p.step_seconds(machine, dtype, plan.mfu)) for p in planned]
        parts = max(phase.train.gradient_accumulation_steps for phase in planned)
        need = max(sum(phase.device_bytes.values()) for phase in planned)
        return Choice(
            name,
            f"train.parallel={parallel}" + f" train.gradient_accumulation_steps={parts}" * (parts > 1),
            need,
            {kind: sum(share * step[kind] for share, step in times) for kind in times[0][1]},
            check_room(need, machine),
        )  # fmt: skip

    return compare_ways(plan.devices, consider)


def _fit_phase(plan: Callable[[TrainConfig], PhasePlan], train: TrainConfig, machine: GpuSpec) -> PhasePlan:
    """The plan of a phase in so many parts that one fits, if any does; plan: gives that of `train`."""
    phase = plan(train)
    for _ in range(REPLANNINGS):
        most = phase.max_microbatch_items(machine)
        if not 0 < most < phase.microbatch_items:
            break
        parts = math.ceil(phase.items * train.context_parallel / (phase.devices * most))
        phase = plan(replace(train, gradient_accumulation_steps=parts))
    return phase


def compare_decoding(
    config: Config, shape: DenoiserConfig, dtype: torch.dtype, machine: GpuSpec
) -> list[Choice]:
    """The ways to decode `decode.batch_size` rows at a time, which whole models share."""
    plan, quantize = config.plan, config.model.quantize
    decode = resolve_settings(config.decode, shape)
    config = replace(config, decode=decode)
    size, devices = dtype.itemsize, plan.devices

    def consider(name: str) -> Choice:
        rows = math.ceil(decode.batch_size / devices)
        memory = plan_decode_memory(config, shape, dtype, shape.passage_length, quantize)
        need = memory.bytes_without_pool(rows) + GIB * (config.engine.prefix_cache_gib or 0.0)
        row, network = memory.row, 0.0
        if name == "shards":
            layer = count_weight_bytes(replace(shape, num_hidden_layers=1), size, quantize)
            network = (devices - 1) / devices * memory.weight_bytes / machine.link
            need -= (1 - 1 / devices) * memory.weight_bytes - 2 * layer  # gathered: this layer and the next
        lengths, seen = [row.step_tokens] * rows, [row.total_tokens] * rows
        work = count_encode_flops(shape, lengths, seen, [row.canvas_tokens] * rows, size)
        head = count_head_flops(shape, rows * row.canvas_tokens, size)
        keys = memory.kv_bytes_per_token * sum(seen)
        packed = 1.0 if quantize == "none" else METHODS[quantize].bytes_per_weight / size
        moved = keys + packed * (work.bytes_moved - keys) + head.bytes_moved
        seconds = combine_seconds(
            (work.flops + head.flops) / (machine.flops[dtype] * plan.mfu),
            moved / machine.bandwidth,
            network,
        )
        settings = {
            "whole": f"workers={devices}" if devices > 1 else "one process",
            "shards": "",  # no program decodes with them
        }[name]
        batch = f" decode.batch_size={rows}" * bool(settings and rows != decode.batch_size)
        return Choice(name, settings + batch, need, seconds, check_room(need, machine))

    return compare_ways(devices, consider)


def explain_choice(what: str, choices: list[Choice], machine: GpuSpec, devices: int) -> str:
    """One sentence on which is the best and why the others are not; what: training or decoding."""
    best = min(choices, key=_rank_choice)
    where = f"{what.capitalize()} on {devices} x {machine.name}:"
    if not best.is_possible:
        least = min(choices, key=lambda choice: choice.memory)
        return f"{where} nothing fits; {least.name} takes least ({least.problem}); {REMEDIES[what]}."
    others = []
    for choice in choices:
        slower = choice.step_seconds / best.step_seconds
        if choice.problem:
            cannot = "does not fit" if choice.seconds else "cannot be"
            others.append(f"{choice.name} {cannot} ({choice.problem})")
        elif not choice.settings:
            others.append(f"no program decodes with {choice.name}")
        elif choice is not best:
            took = f"takes {slower:.3g} times as long" if slower > 1.005 else "is no faster"
            others.append(f"{choice.name} {took}")
    return "; ".join([f"{where} {best.name} ({best.settings}), bound by {best.bound}", *others]) + "."
