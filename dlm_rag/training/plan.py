"""What a run takes, before anything is allocated: bytes, FLOPs, seconds, dollars; and what cannot be.

python train.py --config gb300.yaml --plan [plan.machine=gb10 plan.devices=20 ...]
python sample.py --model GSAI-ML/LLaDA-8B-Instruct --plan plan.machine=v100
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from dlm_rag.config import Config, DecodeConfig, PlanConfig, TrainConfig
from dlm_rag.energy import format_three_digits
from dlm_rag.engine.cache import MAX_JOINT_TOKENS
from dlm_rag.engine.engine import resolve_settings
from dlm_rag.engine.runner import LOGITS_CHUNK_POSITIONS
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.prompt_segments import ContextBudget
from dlm_rag.machine import measure_free_bytes
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.denoiser import count_encode_flops, count_head_flops
from dlm_rag.model.denoiser_config import EVIDENCE_LAYOUTS, DenoiserConfig
from dlm_rag.model.quantize import METHODS, count_scratch_bytes, count_weight_bytes
from dlm_rag.progress import format_bytes, show_status
from dlm_rag.training import initial_model, specs
from dlm_rag.training.batches import LONG_QUESTION_TOKENS
from dlm_rag.training.distributed import check_parallelism
from dlm_rag.training.initial_model import InitialModel, make_training_shape, open_initial_model
from dlm_rag.training.step_memory import StepMemory, count_optimizer_bytes, estimate_step_memory
from dlm_rag.training.task import Run, Task, find_task

GIB = 2**30
LOGIT_COPIES = 8  # numbers of float32 for each logit that is read


class LongestRow(NamedTuple):
    """Tokens of the longest row: its prompt, its canvas, what runs at every step, and whether its keys and
    values are kept (all but those of a canvas that runs with its whole prompt)."""

    prompt: int
    canvas: int
    step: int
    is_kept: bool


def find_longest_row(shape: DenoiserConfig, config: Config, decode: DecodeConfig) -> LongestRow:
    """The row of a long question and `retrieval.top_k` passages of full length."""
    asked = {} if "top_k" in config.retrieval.given else shape.retrieval_settings
    count = int(asked.get("top_k", config.retrieval.top_k))
    layout = config.model.evidence_layout
    room = ContextBudget.from_config(shape, layout, decode.max_new_tokens)
    kind, block = EVIDENCE_LAYOUTS[room.layout], shape.block_size or 0
    own, canvas = room.context_length - room.canvas_length, room.canvas_length + block  # whole blocks
    if kind.separate_passages:
        question = min(LONG_QUESTION_TOKENS, own - room.passage_length)
        return LongestRow(count * room.passage_length + question, canvas, canvas + 1, True)
    prompt = min(own, LONG_QUESTION_TOKENS + count * room.passage_length)
    if kind.runs_with_canvas or block:
        return LongestRow(prompt, canvas, prompt + canvas, bool(block))
    return LongestRow(prompt, canvas, canvas + 1, True)


def count_kv_bytes(shape: DenoiserConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of a token in all layers."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * dtype.itemsize


def estimate_decode_bytes(shape: DenoiserConfig, dtype: torch.dtype, row: LongestRow, rows: int) -> float:
    """Bytes in addition to the weights while so many rows are decoded; the pool of evidence is left out."""
    size, experts, wide = dtype.itemsize, shape.experts, shape.intermediate_size
    total = row.prompt + row.canvas
    if experts is not None:
        chosen = experts.num_experts_per_tok * (experts.moe_intermediate_size + shape.hidden_size)
        wide = max(wide, chosen + experts.shared_intermediate_size)
    heads = (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    token = size * (3 * shape.hidden_size + max(heads, 3 * wide))
    new = rows * row.prompt if row.is_kept else 0
    call = token * (rows * row.step + min(MAX_JOINT_TOKENS, new))
    if shape.block_size:  # a mask of each query and key: added, and as a rule
        call += (size + 1) * rows * row.step * total
    read = min(LOGITS_CHUNK_POSITIONS, rows * row.canvas)
    logits = 4 * LOGIT_COPIES * shape.vocab_size * read
    kept = count_kv_bytes(shape, dtype) * rows * total * row.is_kept
    gathered = kept / shape.num_hidden_layers  # of one layer, for kernels that want rows in order
    return kept + max(call + gathered, logits)


class DecodeStepPlan(NamedTuple):
    """A denoising step of `decode.batch_size` rows on one device: bytes, and seconds of either bound."""

    memory: float
    compute: float
    traffic: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.traffic)


def plan_decode_step(
    config: Config, shape: DenoiserConfig, dtype: torch.dtype, machine: specs.GpuSpec
) -> DecodeStepPlan:
    """Plans a step with passages of full length. Raises `ConfigError` for settings not for this model."""
    quantize, size = config.model.quantize, dtype.itemsize
    decode = resolve_settings(config.decode, shape, config.model.evidence_layout)
    rows, row = decode.batch_size, find_longest_row(shape, config, decode)
    memory = estimate_decode_bytes(shape, dtype, row, rows) + count_scratch_bytes(shape, quantize)
    memory += count_weight_bytes(shape, size, quantize)
    lengths, seen = [row.step] * rows, [max(row.prompt + row.canvas, row.step)] * rows
    work = count_encode_flops(shape, lengths, seen, [row.canvas] * rows, size)
    head = count_head_flops(shape, rows * row.canvas, size)
    keys = count_kv_bytes(shape, dtype) * sum(seen)
    packed = 1.0 if quantize == "none" else METHODS[quantize].bytes_per_weight / size
    return DecodeStepPlan(
        memory + GIB * (config.engine.prefix_cache_gib or 0.0),
        (work.flops + head.flops) / (machine.flops[dtype] * specs.MFU),
        (keys + packed * (work.bytes_moved - keys) + head.bytes_moved) / machine.bandwidth,
    )


GB = 1e9
ROLLOUT_EXTRA_KEY = "rollouts, beyond these"
MEMORY_REMEDY = (
    "see what fits with --plan (gradient_accumulation_steps, activation_checkpointing, parallel=fsdp, "
    "lora_rank)"
)


class TrainingPlan(NamedTuple):
    """A step of a run on `devices` devices of a kind that need not be known."""

    train: TrainConfig
    devices: int
    microbatch_items: int  # items that a device computes at once
    tokens: float  # prompts and canvases
    flops: float  # forward and backward, nothing computed twice
    memory: StepMemory  # of a part
    gathered_bytes: float  # of what shards are gathered into
    decode_bytes: float  # of keys, values and a decoding step of those that are decoded together

    @property
    def device_bytes(self) -> dict[str, float]:
        """Bytes on each device, by what they are for."""
        memory, shards = self.memory, self.devices if self.train.parallel == "fsdp" else 1
        return {
            "weights": memory.weights / shards,
            "gradients": memory.gradients / shards,
            "optimizer": memory.optimizer / shards,
            "gathered shards": self.gathered_bytes if shards > 1 else 0.0,
            "activations": memory.activations,
            # Rollouts come before a step, when there are neither gradients nor activations.
            ROLLOUT_EXTRA_KEY: max(0.0, self.decode_bytes - memory.gradients / shards - memory.activations),
        }

    def step_seconds(self, machine: specs.GpuSpec, dtype: torch.dtype) -> float:
        """The seconds of a step whose arithmetic runs at `MFU` of the peak."""
        return self.flops / (self.devices * machine.flops[dtype] * specs.MFU)


def plan_training(config: Config, shape: DenoiserConfig, dtype: torch.dtype) -> TrainingPlan:
    """Plans a run without pointer supervision; `ConfigError` where so many devices cannot share a step."""
    devices, train = config.plan.devices, config.train
    check_parallelism(train, find_task(train).count_items(train)[0], devices)
    task = make_planned_task(config, shape)
    items = math.ceil(task.items / (devices * train.gradient_accumulation_steps))
    memory = estimate_step_memory(task, dtype, items)
    forward, parts = memory.forward, task.items / items
    flops = forward.flops_with_backward(bool(train.lora_rank))
    flops += forward.flops * task.forwards_before
    # Shards are gathered into the layer at work, the next one, and the rest.
    layer = (memory.parameters - memory.outside_parameters) / shape.num_hidden_layers
    gathered, rollouts = dtype.itemsize * (2 * layer + memory.outside_parameters), 0.0
    if (decode := task.rollout_settings(config)) is not None:  # pools take what is left
        row = find_longest_row(shape, config, decode)
        rows = min(decode.batch_size, items * task.rows // task.items)
        rollouts = estimate_decode_bytes(shape, dtype, row, rows)
    tokens, flops = parts * forward.tokens, parts * flops
    return TrainingPlan(train, devices, items, tokens, flops, memory, gathered, rollouts)


def make_planned_task(config: Config, shape: DenoiserConfig) -> Task:
    """The task of a run as it is trained, but for what its rows would come from."""
    tokenizer: Any = SimpleNamespace(end_ids=frozenset({0}), mask_id=shape.mask_token_id)
    origin = InitialModel(shape, tokenizer, None, config.train.seed, config.train.lora_rank)
    return find_task(config.train)(Run(config, origin, Path()))


def check_run_fits(config: Config, count: int, device: torch.device) -> None:
    """Raises `ConfigError` for steps that `count` processes cannot share, or where weights, gradients and
    optimizer are more than the device of each has free, or than `engine.memory_gib`.

    The rest of a step shows in the first one: torch then says what did not fit.
    """
    engine, have = config.engine, measure_free_bytes(device) / (count if device.type == "cpu" else 1)
    limit = f"this {device.type} has"
    if engine.memory_gib is not None:
        given = engine.memory_gib * GIB
        if given > have:
            raise ConfigError(
                f"engine.memory_gib={engine.memory_gib:g} is {given / GB:.3g} GB for each process, and "
                f"{limit} {have / GB:.3g} GB free for it: lower it, or wait until others have ended"
            )
        have, limit = given, f"engine.memory_gib={engine.memory_gib:g} is"
    shape, train = resolve_shape(config), config.train
    check_parallelism(train, find_task(train).count_items(train)[0], count)
    denoiser = initial_model.build_meta_denoiser(shape, 0, torch.float32)
    weights = sum(p.nbytes for p in denoiser.parameters())
    shards = count if train.parallel == "fsdp" else 1
    need = weights / 2 if train.lora_rank else 2 * weights + count_optimizer_bytes(denoiser, train)
    if need / shards > have:
        raise ConfigError(
            f"weights, gradients and optimizer alone take {need / shards / GB:.3g} GB on each device, "
            f"and {limit} {have / GB:.3g} GB: {MEMORY_REMEDY}"
        )


def resolve_shape(config: Config) -> DenoiserConfig:
    """The architecture that a run would train; of well-known checkpoints without network or folder."""
    known = specs.read_known_config(config.model.path)
    return open_initial_model(config).config if known is None else make_training_shape(config, known)


PRICE_PER_KWH = 0.3  # dollars
DURATIONS = {"d": 86_400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}
COUNTS = {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}


def print_plan(config: Config) -> None:
    """Prints what a training takes."""
    shape, plan, machines = resolve_shape(config), config.plan, list_planned_machines(config.plan)
    dtype = specs.choose_planned_dtype(config.train.dtype, machines[0] if plan.machine else None)
    show_status("planning a step: its rows are counted, and its memory")
    training = plan_training(config, shape, dtype)
    show_status()
    console, memory, steps = _make_console(), training.memory, config.train.max_steps
    console.print(
        f"{config.model.path or 'fresh weights'}: {_scale(memory.parameters, COUNTS)} parameters, "
        f"{_scale(memory.trained, COUNTS)} of them trained, "
        f"{str(dtype).removeprefix('torch.')}, {plan.devices} device(s)\n"
    )
    needs = {f"on a device: {name}": need for name, need in training.device_bytes.items() if need}
    rows = {
        "tokens": _scale(training.tokens, COUNTS),
        "FLOPs": f"{training.flops:.2e}",
        "items a part": f"{training.microbatch_items:,}",
        **{name: format_bytes(need) for name, need in needs.items()},
        "together": format_bytes(sum(needs.values())),
        f"tokens of {steps:,} steps": _scale(steps * training.tokens, COUNTS),
        "their FLOPs": f"{steps * training.flops:.2e}",
    }
    table = Table("a step", Column(config.train.objective, justify="right"))
    for row in rows.items():
        table.add_row(*row)
    console.print(table)
    console.print(_make_machine_table(machines, training, dtype))
    console.print(
        f"Times are at {specs.MFU:.0%} of the peak (a small model reaches less), without what devices send "
        "each other. kWh are computed from the power of a device at full load, and cost "
        f"${PRICE_PER_KWH:g} each; machine and cooling are not in it. Rented, a device costs what it does "
        f"{specs.RENT_SOURCE}.\n"
    )
    for machine in machines:
        console.print(f"[dim]{machine.name}: {machine.source}[/dim]", highlight=False)


def print_decode_plan(config: Config) -> None:
    """Prints what a step of decoding takes on one device of each machine."""
    assert config.model.path is not None, "see fill_in_shipped_files"
    shape = specs.read_known_config(config.model.path)
    shape = shape or open_checkpoint(config.model.path, config.model.block_size).config
    columns = [Column(name, justify="right") for name in ("GB", "on a device", "a step")]
    table = Table("machine", *columns, "bound by", "fits")
    for machine in list_planned_machines(config.plan):
        dtype = specs.choose_planned_dtype(config.model.dtype, machine)
        runs = config.model.quantize == "none" or dtype != torch.float16
        if dtype in machine.flops:
            step = plan_decode_step(config, shape, dtype, machine)
            table.add_row(
                machine.name, f"{machine.memory / GB:.0f}", format_bytes(step.memory),
                _scale(step.seconds, DURATIONS), "compute" if step.compute > step.traffic else "memory",
                "yes" if runs and step.memory <= machine.usable_memory else "no",
            )  # fmt: skip
    console = _make_console()
    console.print(f"{config.model.path}: a step of decode.batch_size={config.decode.batch_size} rows")
    console.print(table)
    console.print("A smaller decode.batch_size takes less, and so does model.quantize, but not in float16.")


def _make_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 100, highlight=False)


def list_planned_machines(plan: PlanConfig) -> list[specs.GpuSpec]:
    """Lists the machines that are planned for."""
    return [specs.GPU_SPECS[plan.machine]] if plan.machine else list(specs.GPU_SPECS.values())


def _make_machine_table(machines: list[specs.GpuSpec], plan: TrainingPlan, dtype: torch.dtype) -> Table:
    headings = ("TFLOP/s", "GB", "fits", "time", "kWh", "electricity", "rent")
    columns = [Column(heading, justify="right") for heading in headings]
    table = Table("machine", *columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    need = sum(plan.device_bytes.values())
    for machine in machines:
        size, fits = f"{machine.memory / GB:.0f}", "yes" if need <= machine.usable_memory else "no"
        if dtype not in machine.flops:
            table.add_row(machine.name, "none", size, fits, *[""] * 4)
            continue
        seconds = plan.train.max_steps * plan.step_seconds(machine, dtype)
        hours, rent = plan.devices * seconds / 3600, machine.rent
        energy, peak = hours * machine.watts / 1e3, f"{machine.flops[dtype] / 1e12:,.0f}"
        paid = _format_dollars(energy * PRICE_PER_KWH), _format_dollars(rent and hours * rent)
        time, kwh = _scale(seconds, DURATIONS), format_three_digits(energy)
        table.add_row(machine.name, peak, size, fits, time, kwh, *paid)
    return table


def _scale(number: float, units: dict[str, float]) -> str:
    """A number in the largest of some units that it reaches."""
    for unit, size in units.items():
        if number >= size:
            return f"{number / size:,.3g} {unit}"
    return f"{number:.3g}"


def _format_dollars(amount: float | None) -> str:
    if amount is None:
        return "?"
    return f"${amount:,.2f}" if amount >= 0.1 or not amount else f"${format_three_digits(amount)}"
