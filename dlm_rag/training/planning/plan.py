"""What a run takes, before anything is allocated: bytes, FLOPs, seconds; and what cannot be."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dlm_rag.config import Config, TrainConfig
from dlm_rag.errors import ConfigError
from dlm_rag.machine import measure_free_bytes
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.training.distributed import check_parallelism
from dlm_rag.training.initial_model import make_training_shape, open_initial_model
from dlm_rag.training.initial_weights import InitialModel, build_meta_denoiser
from dlm_rag.training.planning.decode_plan import GIB, estimate_decode_bytes, find_longest_row
from dlm_rag.training.planning.gpu_specs import GpuSpec
from dlm_rag.training.planning.known_checkpoints import read_known_config
from dlm_rag.training.planning.step_memory import (
    FLOAT32_BYTES,
    StepMemory,
    count_optimizer_bytes,
    estimate_step_memory,
)
from dlm_rag.training.task import Run, Task
from dlm_rag.training.tasks import find_task

GB = 1e9
ROLLOUT_EXTRA_KEY = "rollouts, beyond these"
MEMORY_REMEDY = (
    "see what fits with --plan (gradient_accumulation_steps, activation_checkpointing, parallel=fsdp, "
    "lora_rank)"
)


@dataclass(frozen=True)
class TrainingPlan:
    """A step of a run on `devices` devices of a kind that need not be known."""

    train: TrainConfig
    layers: int
    size: int  # bytes of a number of the arithmetic
    devices: int
    microbatch_items: int  # items that a device computes at once
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
        gathered = self.size * (2 * layer + memory.outside_parameters)
        return {
            "weights": memory.weights / shards,
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


def plan_training(config: Config, shape: DenoiserConfig, dtype: torch.dtype) -> TrainingPlan:
    """Plans a run with the arithmetic in `dtype`; pointer supervision is left out.

    Raises `ConfigError` where so many devices cannot share a step.
    """
    devices = config.plan.devices
    train = replace(config.train, dtype=str(dtype).removeprefix("torch."))
    config = replace(config, train=train)
    check_parallelism(train, find_task(train).count_items(train)[0], devices)
    task = make_planned_task(config, shape)
    items = math.ceil(task.items / (devices * train.gradient_accumulation_steps))
    memory = estimate_step_memory(task, shape, dtype, items)
    forward, parts = memory.forward, task.items / items
    flops = forward.flops_with_backward(bool(train.lora_rank))
    flops += forward.flops * task.forwards_before
    return TrainingPlan(
        train, shape.num_hidden_layers, dtype.itemsize, devices, items, parts * forward.tokens,
        parts * flops, memory, estimate_rollout_bytes(config, task, shape, dtype, items),
    )  # fmt: skip


def make_planned_task(config: Config, shape: DenoiserConfig) -> Task:
    """The task of a run as it is trained, but for what its rows would come from."""
    tokenizer: Any = SimpleNamespace(end_ids=frozenset({0}), mask_id=shape.mask_token_id)
    here = replace(config, model=replace(config.model, device="cpu"))
    origin = InitialModel(shape, tokenizer, None, config.train.seed, config.train.lora_rank)
    return find_task(config.train)(Run(here, origin, Path()))


def estimate_rollout_bytes(
    config: Config, task: Task, shape: DenoiserConfig, dtype: torch.dtype, part: int
) -> float:
    """Bytes in addition to the weights while `part` items are decoded; pools take what is left."""
    settings = task.rollout_settings(config)
    if settings is None:
        return 0.0
    passages = config.retrieval.top_k, task.train.passage_length
    row = find_longest_row(shape, config.model.evidence_layout, settings, passages)
    rows = min(settings.batch_size, part * task.rows // task.items)
    return estimate_decode_bytes(shape, dtype, row, rows)


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
    denoiser = build_meta_denoiser(shape, 0, torch.float32)
    weights = FLOAT32_BYTES * sum(p.numel() for p in denoiser.parameters())
    shards = count if train.parallel == "fsdp" else 1
    need = weights / 2 if train.lora_rank else 2 * weights + count_optimizer_bytes(denoiser, train)
    if need / shards > have:
        raise ConfigError(
            f"weights, gradients and optimizer alone take {need / shards / GB:.3g} GB on each device, "
            f"and {limit} {have / GB:.3g} GB: {MEMORY_REMEDY}"
        )


def resolve_shape(config: Config) -> DenoiserConfig:
    """The architecture that a run would train; of well-known checkpoints without network or folder."""
    known = read_known_config(config.model.path)
    return open_initial_model(config).config if known is None else make_training_shape(config, known)
