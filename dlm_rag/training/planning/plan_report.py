"""What `--plan` prints: a step of every phase and the run on known machines, or a step of decoding; and of
the ways to use several devices the best.

python train.py --config gb300.yaml --plan [plan.machine=gb10 plan.devices=20 plan.days=18 ...]
python sample.py --model GSAI-ML/LLaDA-8B-Instruct --plan plan.machine=v100 plan.devices=4
"""

import sys
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from dlm_rag.config import Config, PlanConfig
from dlm_rag.energy.meter import format_three_digits
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.progress import show_status
from dlm_rag.training.metrics_logger import read_metrics
from dlm_rag.training.planning.gpu_specs import GPU_SPECS, RENT_SOURCE, GpuSpec, choose_planned_dtype
from dlm_rag.training.planning.known_checkpoints import read_known_config
from dlm_rag.training.planning.parallel_choice import (
    Choice,
    compare_decoding,
    compare_training,
    explain_choice,
)
from dlm_rag.training.planning.plan import GB, PhasePlan, plan_phases, resolve_shape

SECONDS_PER_DAY = 86_400.0  # seconds
BYTES_PER_GBIT = 1e9 / 8  # bytes


def print_plan(config: Config) -> None:
    """The page."""
    shape, plan = resolve_shape(config), config.plan
    machines = list_planned_machines(plan)
    dtype = choose_planned_dtype(config.train.dtype, machines[0] if plan.machine else None)
    show_status("planning a step: its rows are counted, and its memory")
    phases = plan_phases(config, shape, dtype)
    show_status()
    console, memory = make_console(), phases[0].memory
    console.print(
        f"{config.model.path or 'fresh weights'}: {_format_with_prefix(memory.parameters)} parameters, "
        f"{_format_with_prefix(memory.trained)} of them trained, "
        f"{str(dtype).removeprefix('torch.')}, {plan.devices} device(s)\n"
    )
    console.print(_make_step_table(phases))
    own = sum(phase.tokens * phase.train.max_steps for phase in phases)
    share = 1.0 if plan.tokens is None else plan.tokens / own
    flops = share * sum(phase.flops * phase.train.max_steps for phase in phases)
    console.print(
        f"\n{_format_with_prefix(share * own)} tokens, {flops:.2e} FLOPs. Compute at {plan.mfu:.0%} of "
        "its peak, memory and network at all of theirs; together, if the longest hides the others:\n"
    )
    console.print(_make_machine_table(machines, phases, share, dtype, plan))
    console.print(
        "kWh are computed from the power of a device at full load, and cost "
        f"${plan.price_per_kwh:g} each; machine and cooling are not in it. Rented, {describe_rent(plan)}. "
        f"{describe_measured_energy(config)}\n"
    )
    for machine in machines:
        if plan.devices > 1 and dtype in machine.flops:
            console.print(describe_required_link(machine, phases, dtype, plan), highlight=False)
        if plan.days is not None:
            console.print(describe_days_claim(machine, flops, dtype, plan.devices, plan.days))
        console.print(f"[dim]{machine.name}: {machine.source}[/dim]", highlight=False)
    if plan.machine and dtype in machines[0].flops:
        choices = compare_training(config, shape, dtype, machines[0])
        print_choices(console, "training", choices, machines[0], plan.devices)


def print_decode_plan(config: Config) -> None:
    """The ways to decode on the machines of the plan."""
    assert config.model.path is not None, "see fill_in_shipped_files"
    shape = read_known_config(config.model.path)
    shape = shape or open_checkpoint(config.model.path, config.model.block_size).config
    console = make_console()
    console.print(f"{config.model.path}: a step of decode.batch_size={config.decode.batch_size} rows")
    for machine in list_planned_machines(config.plan):
        dtype = choose_planned_dtype(config.model.dtype, machine)
        if dtype in machine.flops:
            choices = compare_decoding(config, shape, dtype, machine)
            print_choices(console, "decoding", choices, machine, config.plan.devices)


def list_planned_machines(plan: PlanConfig) -> list[GpuSpec]:
    """The machines that are planned for, with the network that is assumed."""
    machines = [GPU_SPECS[plan.machine]] if plan.machine else list(GPU_SPECS.values())
    if plan.network_gbit is None:
        return machines
    return [machine._replace(link=plan.network_gbit * BYTES_PER_GBIT) for machine in machines]


def make_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 100, highlight=False)


def print_choices(
    console: Console, what: str, choices: list[Choice], machine: GpuSpec, devices: int
) -> None:
    """The ways, a line each, and the reason for the best."""
    right = [Column(name, justify="right") for name in ("on a device", "a step")]
    table = Table(what, *right, "bound by", "fits", "settings")
    for choice in choices:
        numbers = ["", "", ""]
        if choice.seconds:
            numbers = [_format_bytes(choice.memory), _format_duration(choice.step_seconds), choice.bound]
        table.add_row(choice.name, *numbers, "no" if choice.problem else "yes", choice.settings)
    console.print(table)
    console.print(explain_choice(what, choices, machine, devices), soft_wrap=False)


def _make_step_table(phases: list[PhasePlan]) -> Table:
    table = Table("a step", *(Column(p.name or p.train.objective, justify="right") for p in phases))
    needed = [phase.device_bytes for phase in phases]
    rows = {
        "steps": [f"{p.train.max_steps:,}" for p in phases],
        "tokens": [_format_with_prefix(p.tokens) for p in phases],
        "FLOPs": [f"{p.flops:.2e}" for p in phases],
        "a device reads and writes": [_format_bytes(p.memory_traffic) for p in phases],
        "it sends": [_format_bytes(p.network_traffic) for p in phases],
        "items a part": [f"{p.microbatch_items:,}" for p in phases],
        **{
            f"on a device: {name}": [_format_bytes(need[name]) for need in needed]
            for name in needed[0]
            if any(need[name] for need in needed)
        },
        "together": [_format_bytes(sum(need.values())) for need in needed],
    }
    for name, values in rows.items():
        table.add_row(name, *values)
    return table


def _make_machine_table(
    machines: list[GpuSpec], phases: list[PhasePlan], share: float, dtype: torch.dtype, plan: PlanConfig
) -> Table:
    headings = ("TFLOP/s", "GB", "largest part", "compute", "memory", "network", "in all", "kWh")
    columns = [
        Column(heading, justify="right", min_width=max(map(len, heading.split())))
        for heading in (*headings, "electricity", "rent")
    ]
    table = Table("machine", *columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for machine in machines:
        largest = " / ".join(str(phase.max_microbatch_items(machine) or "-") for phase in phases)
        size = f"{machine.memory / GB:.0f}"
        if dtype not in machine.flops:
            table.add_row(machine.name, "none", size, largest, *[""] * 7)
            continue
        steps = [
            (share * phase.train.max_steps, phase.step_seconds(machine, dtype, plan.mfu))
            for phase in phases
        ]
        times = {kind: sum(n * step[kind] for n, step in steps) for kind in steps[0][1]}
        whole = times["together"]
        energy = whole * machine.watts * plan.devices / 3.6e6
        rent = machine.rent if plan.price_per_hour is None else plan.price_per_hour
        rented = "?" if rent is None else _format_dollars(whole / 3600 * plan.devices * rent)
        table.add_row(
            machine.name, f"{machine.flops[dtype] / 1e12:,.0f}", size, largest,
            *map(_format_duration, times.values()),
            format_three_digits(energy), _format_dollars(energy * plan.price_per_kwh), rented,
        )  # fmt: skip
    return table


def describe_rent(plan: PlanConfig) -> str:
    """What an hour of a device is taken to cost, in words."""
    if plan.price_per_hour is None:
        return f"a device costs what it does {RENT_SOURCE}; plan.price_per_hour sets another price"
    return f"a device costs ${plan.price_per_hour:g} an hour"


def describe_measured_energy(config: Config) -> str:
    """The measured energy of the run in the folder, in words."""
    folder = Path(config.out or "runs/train")
    steps, joules = 0, 0.0
    for metrics in read_metrics(folder / "metrics.jsonl"):
        if all(isinstance(metrics.get(name), int | float) for name in ("joules", "joules_steps")):
            steps, joules = steps + metrics["joules_steps"], joules + metrics["joules"]
    if not steps:
        return f"Nothing was measured in {folder}."
    whole = sum(phase.max_steps for phase in config.train.get_phase_configs().values())
    return (
        f"Measured in {folder}: {format_three_digits(joules / steps)} J a step over {steps:,} steps; "
        f"all {whole:,} steps would use {joules / steps * whole / 3.6e6:.3g} kWh."
    )


def describe_required_link(
    machine: GpuSpec, phases: list[PhasePlan], dtype: torch.dtype, plan: PlanConfig
) -> str:
    """How fast the link must be for all devices to be faster than one, and for it to hold up none."""
    sent = apart = 0.0
    for phase in phases:
        step = phase.step_seconds(machine, dtype, plan.mfu)
        sent += phase.train.max_steps * phase.network_traffic
        apart += phase.train.max_steps * max(step["compute"], step["memory"])
    least, enough = (sent / seconds / BYTES_PER_GBIT for seconds in (plan.devices * apart, apart))
    return (
        f"{plan.devices} x {machine.name} have a link of {machine.link / BYTES_PER_GBIT:.3g} Gb/s: they "
        f"are faster than one (were its memory large enough) from {least:.2g} Gb/s on, and wait for no "
        f"link of {enough:.2g}."
    )


def describe_days_claim(
    machine: GpuSpec, flops: float, dtype: torch.dtype, devices: int, days: float
) -> str:
    """Whether a claim of so many days can be true."""
    if (peak := machine.flops.get(dtype)) is None:
        return f"{machine.name} has no {dtype}."
    share = flops / (days * SECONDS_PER_DAY * devices * peak)
    if share > 1:
        return (
            f"{days:g} days on {devices} x {machine.name} would take {share:.0%} of the peak: it cannot be "
            f"done; at the peak itself it takes {flops / (devices * peak) / SECONDS_PER_DAY:.1f} days."
        )
    small = f"{share:.0%}" if share > 0.01 else "less than 1%"
    return f"{days:g} days on {devices} x {machine.name} ask for {small} of the peak."


def _format_duration(seconds: float) -> str:
    for size, unit in ((SECONDS_PER_DAY, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms"


def _format_dollars(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 0.1 or not amount else f"${format_three_digits(amount)}"


def _format_with_prefix(number: float, letters: str = "kMBT") -> str:
    for size, letter in zip((1e12, 1e9, 1e6, 1e3), reversed(letters), strict=True):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f} "


def _format_bytes(number: float) -> str:
    return _format_with_prefix(number, "kMGT") + "B"
