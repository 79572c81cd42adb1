"""The page that `train.py --plan` prints: a step of every phase, and the run on known machines.

python train.py --config gb300.yaml --plan [plan.machine=gb10 plan.devices=20 plan.days=18 ...]
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table

from dlm_rag.config import Config, PlanConfig
from dlm_rag.energy.reading import short
from dlm_rag.training.machines import MACHINES, Machine
from dlm_rag.training.plan import GB, PhasePlan, plan_phases, shape_of
from dlm_rag.training.report import read_metrics

DAY = 86_400.0  # seconds
GBIT = 1e9 / 8  # bytes


def print_plan(config: Config) -> None:
    """The page."""
    shape = shape_of(config)
    plan = config.plan
    machines = [MACHINES[plan.machine]] if plan.machine else list(MACHINES.values())
    if plan.link_gbit is not None:
        machines = [replace(machine, link=plan.link_gbit * GBIT) for machine in machines]
    dtype = {"float32": torch.float32, "float16": torch.float16}.get(config.train.dtype, torch.bfloat16)
    phases = plan_phases(config, shape, dtype)
    console = Console(width=100) if not sys.stdout.isatty() else Console()
    memory = phases[0].memory
    source = config.model.path or "fresh weights"
    console.print(
        f"{source}: {_short(memory.parameters)} parameters, {_short(memory.trained)} of them trained, "
        f"{str(dtype).removeprefix('torch.')}, {plan.devices} device(s)\n"
    )
    table = Table("a step", *(Column(p.name or p.train.objective, justify="right") for p in phases))
    lines: dict[str, list[str]] = {
        "steps": [f"{p.train.steps:,}" for p in phases],
        "tokens": [_short(p.tokens) for p in phases],
        "FLOPs": [f"{p.flops:.2e}" for p in phases],
        "a device reads and writes": [_bytes(p.moved()) for p in phases],
        "it sends": [_bytes(p.sent()) for p in phases],
        "items a part": [f"{p.part:,}" for p in phases],
    }
    needed = [phase.bytes() for phase in phases]
    for name in needed[0]:
        if any(need[name] for need in needed):
            lines[f"on a device: {name}"] = [_bytes(need[name]) for need in needed]
    lines["together"] = [_bytes(sum(need.values())) for need in needed]
    for name, values in lines.items():
        table.add_row(name, *values)
    console.print(table)
    own = sum(phase.tokens * phase.train.steps for phase in phases)
    share = 1.0 if plan.tokens is None else plan.tokens / own
    flops = share * sum(phase.flops * phase.train.steps for phase in phases)
    console.print(
        f"\n{_short(share * own)} tokens, {flops:.2e} FLOPs. Compute at {plan.mfu:.0%} of its peak, "
        "memory and network at all of theirs; together, if the longest hides the others:\n"
    )
    console.print(_machine_table(machines, phases, share, dtype, plan))
    console.print(f"kWh are reckoned from the power of a device at full load. {spent(config)}\n")
    for machine in machines:
        if plan.devices > 1 and dtype in machine.flops:
            console.print(link_verdict(machine, phases, dtype, plan), highlight=False)
        if plan.days is not None:
            console.print(verdict(machine, flops, dtype, plan.devices, plan.days))
        console.print(f"[dim]{machine.name}: {machine.source}[/dim]", highlight=False)


def _machine_table(
    machines: list[Machine], phases: list[PhasePlan], share: float, dtype: torch.dtype, plan: PlanConfig
) -> Table:
    table = Table(
        Column("machine"), *(Column(h, justify="right") for h in (
            "TFLOP/s", "GB", "largest part", "compute", "memory", "network", "together", "kWh", "cost",
        )),
    )  # fmt: skip
    for machine in machines:
        largest = " / ".join(str(phase.largest_part(machine) or "-") for phase in phases)
        size = f"{machine.memory / GB:.0f}"
        if dtype not in machine.flops:
            table.add_row(machine.name, "none", size, largest, *[""] * 6)
            continue
        steps = [(share * phase.train.steps, phase.seconds(machine, dtype, plan.mfu)) for phase in phases]
        times = {kind: sum(n * step[kind] for n, step in steps) for kind in steps[0][1]}
        whole = sum(n * max(step.values()) for n, step in steps)
        energy = whole * machine.watts * plan.devices / 3.6e6
        cost = energy * plan.kwh_price + whole / 3600 * plan.devices * plan.hour_price
        table.add_row(
            machine.name, f"{machine.flops[dtype] / 1e12:,.0f}", size, largest,
            *(_duration(x) for x in (*times.values(), whole)),
            f"{energy:,.0f}" if energy > 100 else f"{energy:.3g}", f"${cost:,.2f}",
        )  # fmt: skip
    return table


def spent(config: Config) -> str:
    """What the run in the folder has drawn as far as it was measured, beside what is reckoned."""
    folder = Path(config.out or "runs/train")
    steps, joules = 0, 0.0
    for metrics in read_metrics(folder / "metrics.jsonl"):
        if all(isinstance(metrics.get(name), int | float) for name in ("joules", "joules_steps")):
            steps, joules = steps + metrics["joules_steps"], joules + metrics["joules"]
    if not steps:
        return f"Nothing was measured in {folder}."
    whole = sum(phase.steps for phase in config.train.in_phases().values())
    return (
        f"Measured in {folder}: {short(joules / steps)} J a step over {steps:,} steps, which makes "
        f"{joules / steps * whole / 3.6e6:.3g} kWh of {whole:,}."
    )


def link_verdict(machine: Machine, phases: list[PhasePlan], dtype: torch.dtype, plan: PlanConfig) -> str:
    """How fast the link must be for all devices to be faster than one, and for it to hold up none."""
    steps = [(phase.train.steps, phase, phase.seconds(machine, dtype, plan.mfu)) for phase in phases]
    sent = sum(n * phase.sent() for n, phase, _ in steps)
    apart = sum(n * max(step["compute"], step["memory"]) for n, _, step in steps)
    least, enough = (sent / seconds / GBIT for seconds in (plan.devices * apart, apart))
    return (
        f"{plan.devices} x {machine.name} have a link of {machine.link / GBIT:.3g} Gb/s: they are faster "
        f"than one (were its memory large enough) from {least:.2g} Gb/s on, and wait for no link of "
        f"{enough:.2g}."
    )


def verdict(machine: Machine, flops: float, dtype: torch.dtype, devices: int, days: float) -> str:
    """Whether a claim of so many days can be true."""
    peak = machine.flops.get(dtype)
    if peak is None:
        return f"{machine.name} has no {dtype}."
    share = flops / (days * DAY * devices * peak)
    if share > 1:
        return (
            f"{days:g} days on {devices} x {machine.name} would take {share:.0%} of the peak: it cannot be "
            f"done; at the peak itself it takes {flops / (devices * peak) / DAY:.1f} days."
        )
    small = f"{share:.0%}" if share > 0.01 else "less than 1%"
    return f"{days:g} days on {devices} x {machine.name} ask for {small} of the peak."


def _duration(seconds: float) -> str:
    for size, unit in ((DAY, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.2g} s"


def _short(number: float, letters: str = "kMBT") -> str:
    for size, letter in zip((1e12, 1e9, 1e6, 1e3), reversed(letters), strict=True):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f} "


def _bytes(number: float) -> str:
    return _short(number, "kMGT") + "B"
