"""What a run takes, before anything is allocated: bytes, FLOPs, seconds; and what cannot be."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from dlm_rag.config import Config, TrainConfig
from dlm_rag.engine.resolve_settings import resolve_settings
from dlm_rag.engine.segment_kv_cache import measure_free_bytes
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.truncation import ContextBudget
from dlm_rag.machine import choose_dtype
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.flops import FlopCount, count_encode_flops, count_head_flops
from dlm_rag.model.quantize import METHODS
from dlm_rag.training.data.examples import LONG_QUESTION_TOKENS, Example
from dlm_rag.training.distributed import check_parallelism
from dlm_rag.training.initial_model import make_training_shape, open_initial_model
from dlm_rag.training.initial_weights import InitialModel, build_meta_denoiser
from dlm_rag.training.losses import lay_out_examples
from dlm_rag.training.planning.decode_memory import DecodeMemory, LongestRow
from dlm_rag.training.planning.gpu_specs import GpuSpec
from dlm_rag.training.planning.known_checkpoints import read_known_config
from dlm_rag.training.planning.step_memory import (
    FLOAT32_BYTES,
    StepMemory,
    count_optimizer_bytes,
    estimate_step_memory,
)
from dlm_rag.training.task import Phase, Task
from dlm_rag.training.tasks import find_task

MFU = 0.4  # share of a device's peak that a step is assumed to reach
GB, GIB = 1e9, 2**30
ROLLOUT_EXTRA_KEY = "rollouts, beyond these"
MEMORY_REMEDY = (
    "see what fits with --plan (gradient_accumulation_steps, activation_checkpointing, parallel=fsdp, "
    "lora_rank)"
)


@dataclass(frozen=True)
class PhasePlan:
    """A step of a phase on `devices` devices of a kind that need not be known."""

    name: str
    train: TrainConfig
    layers: int
    size: int  # bytes of a number of the arithmetic
    devices: int
    microbatch_items: int  # items that a device, or all that share sequences, compute at once
    tokens: float  # prompts and canvases
    flops: float  # forward and backward, nothing computed twice
    memory: StepMemory  # of a part
    decode_bytes: float  # of keys, values and a decoding step of those that are decoded together

    @property
    def device_bytes(self) -> dict[str, float]:
        """Bytes on each device, by what they are for."""
        memory, shards = self.memory, self.devices if self.train.parallel == "fsdp" else 1
        layer = (memory.parameters - memory.outside_parameters) / self.layers
        # What shards are gathered into: the layer at work, the next one, and the rest.
        gathered = self.size * (2 * layer + memory.outside_parameters * (2 if memory.reference else 1))
        return {
            "weights": memory.weights / shards,
            "reference": memory.reference / shards,
            "gradients": memory.gradients / shards,
            "optimizer": memory.optimizer / shards,
            "gathered shards": gathered if shards > 1 else 0.0,
            "activations": memory.activations,
            # Rollouts come before a step, when there are neither gradients nor activations.
            ROLLOUT_EXTRA_KEY: max(0.0, self.decode_bytes - memory.gradients / shards - memory.activations),
        }

    def step_seconds(self, machine: GpuSpec, dtype: torch.dtype, mfu: float) -> float:
        """Returns the seconds of a step whose arithmetic runs at `mfu` of the peak."""
        return self.flops / (self.devices * machine.flops[dtype] * mfu)


def plan_phases(config: Config, shape: DenoiserConfig, dtype: torch.dtype) -> list[PhasePlan]:
    """Plans every phase, with the arithmetic in `dtype`; pointer supervision is left out.

    Raises `ConfigError` where so many devices cannot share a phase.
    """
    found, devices = [], config.plan.devices
    for name, phase in config.train.get_phase_configs().items():
        train = replace(phase, dtype=str(dtype).removeprefix("torch."))
        check_parallelism(train, find_task(train).count_items(train)[0], devices)
        task = make_planned_task(config, train, shape)
        parts = devices * train.gradient_accumulation_steps
        items = math.ceil(task.items * train.context_parallel / parts)
        memory = estimate_step_memory(task, shape, dtype, items)
        decoded, layout = task.sample_decoding(shape), task.layout(shape)
        forward = count_forward_flops(shape, task.sample_examples(shape, 1), layout)
        flops = forward.flops_with_backward(bool(train.lora_rank))
        flops += forward.flops if memory.reference else 0
        flops += count_forward_flops(shape, decoded, layout).flops if decoded else 0
        found.append(PhasePlan(
            name, train, shape.num_hidden_layers, dtype.itemsize, devices, items,
            float(task.items * forward.tokens), task.items * flops, memory,
            estimate_rollout_bytes(config, task, shape, dtype, items),
        ))  # fmt: skip
    return found


def make_planned_task(config: Config, train: TrainConfig, shape: DenoiserConfig) -> Task:
    """The task of a phase as it is trained, but for what its rows would come from."""
    tokenizer: Any = SimpleNamespace(end_ids=frozenset({0}), mask_id=shape.mask_token_id)
    here = replace(config, train=train, model=replace(config.model, device="cpu"))
    origin = InitialModel(shape, tokenizer, None, train.seed, train.lora_rank)
    return find_task(train)(Phase(here, "", origin, Path()))


def estimate_rollout_bytes(
    config: Config, task: Task, shape: DenoiserConfig, dtype: torch.dtype, part: int
) -> float:
    """Bytes in addition to the weights while `part` items are decoded; pools take what is left."""
    settings = task.rollout_settings(config, task.train)
    if settings is None:
        return 0.0
    memory = plan_decode_memory(replace(config, decode=settings), shape, dtype, task.train.passage_length)
    rows = min(settings.batch_size, part * task.rows // task.items)
    return memory.kv_slot_bytes(rows) + memory.step_bytes(rows)


def plan_decode_memory(
    config: Config, shape: DenoiserConfig, dtype: torch.dtype, passage: int, quantize: str = "none"
) -> DecodeMemory:
    """What decoding takes with long questions and `top_k` passages of so many tokens, without the pool."""
    layout, decode = config.model.evidence_layout, config.decode
    room = ContextBudget.from_config(shape, layout, decode.max_new_tokens)
    row = LongestRow.from_budget(room, shape, LONG_QUESTION_TOKENS, (config.retrieval.top_k, passage))
    return DecodeMemory.from_config(shape, dtype, decode, row, quantize)


class DecodeStepPlan(NamedTuple):
    """A denoising step of `decode.batch_size` rows on one device: bytes, and seconds of either bound."""

    memory: float
    compute: float
    traffic: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.traffic)


def plan_decode_step(
    config: Config, shape: DenoiserConfig, dtype: torch.dtype, machine: GpuSpec
) -> DecodeStepPlan:
    """Plans a step with passages of full length. Raises `ConfigError` for settings not for this model."""
    quantize, size = config.model.quantize, dtype.itemsize
    decode = resolve_settings(config.decode, shape)
    rows, config = decode.batch_size, replace(config, decode=decode)
    memory = plan_decode_memory(config, shape, dtype, shape.passage_length, quantize)
    lengths, seen = [memory.row.step_tokens] * rows, [memory.row.total_tokens] * rows
    work = count_encode_flops(shape, lengths, seen, [memory.row.canvas_tokens] * rows, size)
    head = count_head_flops(shape, rows * memory.row.canvas_tokens, size)
    keys = memory.kv_bytes_per_token * sum(seen)
    packed = 1.0 if quantize == "none" else METHODS[quantize].bytes_per_weight / size
    return DecodeStepPlan(
        memory.total_bytes(rows) + GIB * (config.engine.prefix_cache_gib or 0.0),
        (work.flops + head.flops) / (machine.flops[dtype] * MFU),
        (keys + packed * (work.bytes_moved - keys) + head.bytes_moved) / machine.bandwidth,
    )


def count_forward_flops(shape: DenoiserConfig, examples: list[Example], layout: str) -> FlopCount:
    """What the layers and the head compute for these rows, once; shared passages run once, before them."""
    states = lay_out_examples(examples, shape, layout)
    passages = list(dict.fromkeys(segment for state in states for segment in state.context_segments))
    seen = [sum(len(segment.ids) for segment in state.context_segments) for state in states]
    canvases, read = [s.canvas_segment for s in states], [len(e.supervised_positions) for e in examples]
    work, none = count_head_flops(shape, sum(read), 2), [0] * len(passages)
    # Of each call: what runs, the tokens that each sees before its own, those that pass the last layer.
    for runs, before, through in ((passages, none, none), (canvases, seen, read)):
        lengths = [len(run.ids) for run in runs]
        keys = [a + b for a, b in zip(before, lengths, strict=True)]
        pairs = sum(n * b for b, n in zip(before, lengths, strict=True))
        pairs += sum(int(run.visible_counts.sum()) for run in runs)
        last = sum(n * k for n, k in zip(through, keys, strict=True))
        if runs:
            work += count_encode_flops(shape, lengths, keys, through, 2, (pairs, last))
    return work


def check_run_fits(config: Config, count: int, device: torch.device) -> None:
    """Raises `ConfigError` for a phase that `count` processes cannot share, or that is more than the device
    of each has free, or than `engine.memory_gib`.

    On a CPU without such a budget only weights, gradients and optimizer are looked at; else the whole step
    is planned, with the pool of the decoders that validate.
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

    def check(need: float, what: str) -> None:
        if need > have:
            raise ConfigError(
                f"{what} {need / GB:.3g} GB on each device, and {limit} {have / GB:.3g} GB: {MEMORY_REMEDY}"
            )

    shape = resolve_shape(config)
    for train in config.train.get_phase_configs().values():
        check_parallelism(train, find_task(train).count_items(train)[0], count)
        denoiser = build_meta_denoiser(shape, 0, torch.float32)
        weights = FLOAT32_BYTES * sum(p.numel() for p in denoiser.parameters())
        frozen, shards = train.lora_rank, count if train.parallel == "fsdp" else 1
        need = weights / 2 if frozen else 2 * weights + count_optimizer_bytes(denoiser, train)
        check(need / shards, "weights, gradients and optimizer alone take")
    if device.type == "cpu" and engine.memory_gib is None:
        return
    pool = GIB * (engine.for_training_rollouts.prefix_cache_gib or 0.0)
    devices = replace(config, plan=replace(config.plan, devices=count))
    for phase in plan_phases(devices, shape, choose_dtype(config.train.dtype, device)):
        name = f"the phase {phase.name}" if phase.name else "a step"
        check(sum(phase.device_bytes.values()) + pool, f"{name} takes")


def resolve_shape(config: Config) -> DenoiserConfig:
    """The architecture that a run would train; of well-known checkpoints without network or folder."""
    known = read_known_config(config.model.path)
    return open_initial_model(config).config if known is None else make_training_shape(config, known)
