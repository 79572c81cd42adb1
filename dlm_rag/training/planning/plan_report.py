"""What `--plan` prints: a step and the whole training on known machines, or a step of decoding.

python train.py --config gb300.yaml --plan [plan.machine=gb10 plan.devices=20 ...]
python sample.py --model GSAI-ML/LLaDA-8B-Instruct --plan plan.machine=v100
"""

import sys

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from dlm_rag.config import Config, PlanConfig
from dlm_rag.energy.meter import format_three_digits
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.progress import format_bytes, show_status
from dlm_rag.training.planning.decode_plan import plan_decode_step
from dlm_rag.training.planning.gpu_specs import GPU_SPECS, MFU, RENT_SOURCE, GpuSpec, choose_planned_dtype
from dlm_rag.training.planning.known_checkpoints import read_known_config
from dlm_rag.training.planning.plan import GB, TrainingPlan, plan_training, resolve_shape

PRICE_PER_KWH = 0.3  # dollars


def print_plan(config: Config) -> None:
    """Prints what a training takes."""
    shape, plan = resolve_shape(config), config.plan
    machines = list_planned_machines(plan)
    dtype = choose_planned_dtype(config.train.dtype, machines[0] if plan.machine else None)
    show_status("planning a step: its rows are counted, and its memory")
    training = plan_training(config, shape, dtype)
    show_status()
    console, memory, steps = _make_console(), training.memory, config.train.max_steps
    console.print(
        f"{config.model.path or 'fresh weights'}: {_format_count(memory.parameters)} parameters, "
        f"{_format_count(memory.trained)} of them trained, "
        f"{str(dtype).removeprefix('torch.')}, {plan.devices} device(s)\n"
    )
    console.print(_make_step_table(training))
    console.print(
        f"\n{_format_count(steps * training.tokens)} tokens, {steps * training.flops:.2e} FLOPs, at "
        f"{MFU:.0%} of the peak of a machine "
        "(a small model reaches less); what devices send each other is not counted.\n"
    )
    console.print(_make_machine_table(machines, training, dtype))
    console.print(
        "kWh are computed from the power of a device at full load, and cost "
        f"${PRICE_PER_KWH:g} each; machine and cooling are not in it. Rented, a device costs what it does "
        f"{RENT_SOURCE}.\n"
    )
    for machine in machines:
        console.print(f"[dim]{machine.name}: {machine.source}[/dim]", highlight=False)


def print_decode_plan(config: Config) -> None:
    """Prints what a step of decoding takes on one device of each machine."""
    assert config.model.path is not None, "see fill_in_shipped_files"
    shape = read_known_config(config.model.path)
    shape = shape or open_checkpoint(config.model.path, config.model.block_size).config
    columns = [Column(name, justify="right") for name in ("GB", "on a device", "a step")]
    table = Table("machine", *columns, "bound by", "fits")
    for machine in list_planned_machines(config.plan):
        dtype = choose_planned_dtype(config.model.dtype, machine)
        if dtype in machine.flops:
            step = plan_decode_step(config, shape, dtype, machine)
            table.add_row(
                machine.name, f"{machine.memory / GB:.0f}", format_bytes(step.memory),
                _format_duration(step.seconds), "compute" if step.compute > step.traffic else "memory",
                "yes" if step.memory <= machine.usable_memory else "no",
            )  # fmt: skip
    console = _make_console()
    console.print(f"{config.model.path}: a step of decode.batch_size={config.decode.batch_size} rows")
    console.print(table)
    console.print("model.quantize and a smaller decode.batch_size take less.")


def _make_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 100, highlight=False)


def list_planned_machines(plan: PlanConfig) -> list[GpuSpec]:
    """Lists the machines that are planned for."""
    return [GPU_SPECS[plan.machine]] if plan.machine else list(GPU_SPECS.values())


def _make_step_table(plan: TrainingPlan) -> Table:
    table = Table("a step", Column(plan.train.objective, justify="right"))
    table.add_row("steps", f"{plan.train.max_steps:,}")
    table.add_row("tokens", _format_count(plan.tokens))
    table.add_row("FLOPs", f"{plan.flops:.2e}")
    table.add_row("items a part", f"{plan.microbatch_items:,}")
    for name, need in plan.device_bytes.items():
        if need:
            table.add_row(f"on a device: {name}", format_bytes(need))
    table.add_row("together", format_bytes(sum(plan.device_bytes.values())))
    return table


def _make_machine_table(machines: list[GpuSpec], plan: TrainingPlan, dtype: torch.dtype) -> Table:
    headings = ("TFLOP/s", "GB", "fits", "time", "kWh", "electricity", "rent")
    columns = [Column(heading, justify="right") for heading in headings]
    table = Table("machine", *columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    need = sum(plan.device_bytes.values())
    for machine in machines:
        size, fits = f"{machine.memory / GB:.0f}", "yes" if need <= machine.usable_memory else "no"
        if dtype not in machine.flops:
            table.add_row(machine.name, "none", size, fits, *[""] * 4)
            continue
        seconds = plan.train.max_steps * plan.step_seconds(machine, dtype, MFU)
        hours, rent = plan.devices * seconds / 3600, machine.rent
        energy, peak = hours * machine.watts / 1e3, f"{machine.flops[dtype] / 1e12:,.0f}"
        paid = _format_dollars(energy * PRICE_PER_KWH), _format_dollars(rent and hours * rent)
        time, kwh = _format_duration(seconds), format_three_digits(energy)
        table.add_row(machine.name, peak, size, fits, time, kwh, *paid)
    return table


def _scale(number: float, units: dict[str, float]) -> str:
    """A number in the largest of some units that it reaches."""
    for unit, size in units.items():
        if number >= size:
            return f"{number / size:,.3g} {unit}"
    return f"{number:.3g}"


def _format_duration(seconds: float) -> str:
    return _scale(seconds, {"d": 86_400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3})


def _format_dollars(amount: float | None) -> str:
    if amount is None:
        return "?"
    return f"${amount:,.2f}" if amount >= 0.1 or not amount else f"${format_three_digits(amount)}"


def _format_count(number: float) -> str:
    return _scale(number, {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3})
