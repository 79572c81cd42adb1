"""What a run takes, before anything is allocated: bytes, FLOPs, seconds; and what cannot be."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dlm_rag.config import Config, TrainConfig
from dlm_rag.decode.memory_budget import DecodeMemory, LongestRow
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.evidence.segment_kv_cache import measure_free_bytes
from dlm_rag.evidence.truncation import ContextBudget
from dlm_rag.machine import choose_dtype
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.families import FAMILIES
from dlm_rag.model.flops import FlopCount, count_encode_flops, count_head_flops
from dlm_rag.model.packed_batch import Segment
from dlm_rag.model.simulated_memory import RESERVED_MEMORY_FRACTION
from dlm_rag.training.data.examples import LONG_QUESTION_TOKENS, Example
from dlm_rag.training.distributed import check_parallelism
from dlm_rag.training.initial_model import make_training_shape, open_initial_model
from dlm_rag.training.initial_weights import InitialModel, build_meta_denoiser
from dlm_rag.training.planning.gpu_specs import GpuSpec
from dlm_rag.training.planning.step_memory import (
    FLOAT32_BYTES,
    StepMemory,
    StepMemoryEstimator,
    count_optimizer_bytes,
)
from dlm_rag.training.task import Task
from dlm_rag.training.tasks import find_task

GB, GIB = 1e9, 2**30
ROLLOUT_EXTRA_KEY = "rollouts, beyond these"
MEMORY_REMEDY = (
    "see what fits with --plan (gradient_accumulation_steps, activation_checkpointing, parallel=fsdp, "
    "lora_rank)"
)
# The shapes of checkpoints that people begin with, so that a plan needs neither network nor weights.
KNOWN_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "GSAI-ML/LLaDA-8B-Instruct": {
        "model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32,
        "mlp_hidden_size": 12_288, "vocab_size": 126_464, "embedding_size": 126_464, "rms_norm_eps": 1e-5,
        "max_sequence_length": 4096, "rope_theta": 500_000.0, "mask_token_id": 126_336,
    },
    "Dream-org/Dream-v0-Instruct-7B": {
        "model_type": "Dream", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18_944, "vocab_size": 152_064, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072, "rope_theta": 1e6, "mask_token_id": 151_666,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18_944, "vocab_size": 152_064, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768, "rope_theta": 1e6, "mask_token_id": 151_665,
    },
}  # fmt: skip


@dataclass(frozen=True)
class PhasePlan:
    """One phase on `devices` devices of a kind that need not be known."""

    name: str
    train: TrainConfig
    tokens: float  # of a step, prompts and canvases
    flops: float  # of a step: forward and backward, nothing computed twice
    items: int  # of a step
    microbatch_items: int  # items that a device, or all that share sequences, compute at once
    memory: StepMemory  # with so many items
    decode_bytes: float  # bytes of keys, values and a step of those that are decoded together
    devices: int
    number_bytes: int  # bytes of a number of the arithmetic
    gathered_bytes: (
        float  # bytes of what shards are gathered into: the layer at work, the next one, and the rest
    )
    non_layer_parameters: int  # parameters outside of the layers
    layer_calls: int  # of the layers in a forward: passages run before what sees them
    kv_bytes_per_item: float  # bytes of keys and values of all layers of an item

    def bytes_per_device(self) -> dict[str, float]:
        """Bytes on each device, by what they are for."""
        memory, shards = self.memory, self.devices if self.train.parallel == "fsdp" else 1
        found = {
            "weights": memory.weights / shards,
            "reference": memory.reference / shards,
            "gradients": memory.gradients / shards,
            "optimizer": memory.optimizer / shards,
            "gathered shards": self.gathered_bytes if shards > 1 else 0.0,
            "activations": memory.activations - memory.logits,
            "logits at the peak": memory.logits,
        }
        # Rollouts come before a step, when there are neither gradients nor activations.
        room = found["gradients"] + memory.activations
        return found | {ROLLOUT_EXTRA_KEY: max(0.0, self.decode_bytes - room)}

    def memory_traffic_bytes(self) -> float:
        """Bytes that a device's operators read and write in a step, each by itself, as without compile."""
        # AdamW reads weight, gradient and its state, and writes all but the gradient.
        update = (
            2 * (self.bytes_per_device()["weights"] + self.bytes_per_device()["optimizer"])
            + self.bytes_per_device()["gradients"]
        )
        return self.train.gradient_accumulation_steps * self.memory.bytes_moved + (
            0 if self.train.is_denoiser_frozen else update
        )

    def network_traffic_bytes(self) -> float:
        """Bytes that a device sends in a step, in rings: sums of gradients, shards, keys and values."""
        train, memory = self.train, self.memory
        others = (self.devices - 1) / self.devices
        if train.parallel == "fsdp":
            # A layer is gathered for each call, forward and backward; what is outside of the layers stays
            # gathered. Gradients are summed in float32, in every part.
            layers = memory.parameters - self.non_layer_parameters
            passes = 3 if memory.reference else 2  # which has no backward
            numbers = self.number_bytes * (
                passes * self.layer_calls * layers + (passes - 1) * self.non_layer_parameters
            )
            each = others * (numbers + FLOAT32_BYTES * memory.trained) * train.gradient_accumulation_steps
        else:
            each = 2 * others * memory.gradients
        apart = train.context_parallel
        passes = 3 if train.activation_checkpointing == "full" else 2
        rows = passes * self.kv_bytes_per_item * self.microbatch_items * train.gradient_accumulation_steps
        return each + rows * (apart - 1) / apart

    def step_seconds(self, machine: GpuSpec, dtype: torch.dtype, mfu: float) -> dict[str, float]:
        """Of a step, were it bound by nothing else: arithmetic at `mfu`, memory, network at their peaks."""
        return {
            "compute": self.flops / (self.devices * machine.flops[dtype] * mfu),
            "memory": self.memory_traffic_bytes() / machine.bandwidth,
            "network": self.network_traffic_bytes() / machine.link if self.devices > 1 else 0.0,
        }

    def max_microbatch_items(self, machine: GpuSpec) -> int:
        """Items that fit into one part of a step on a device; 0 where not one does."""
        need, more = self.bytes_per_device(), self.memory.activations_per_item
        room = (1 - RESERVED_MEMORY_FRACTION) * machine.memory - sum(need.values())
        if need.pop(ROLLOUT_EXTRA_KEY) and room < 0:
            return 0  # however small a part is
        one = sum(need.values()) - more * (self.microbatch_items - 1)
        room = (1 - RESERVED_MEMORY_FRACTION) * machine.memory - one
        if room < 0:
            return 0
        return 1 + int(room / more) if more else self.items


def plan_phases(config: Config, shape: DenoiserConfig, dtype: torch.dtype) -> list[PhasePlan]:
    """The plan of every phase, with the arithmetic in `dtype`; pointer supervision is left out.

    Raises `ConfigError` where so many devices cannot share a phase.
    """
    if shape.noise is not None:
        raise ConfigError("a plan is made for denoisers of masks, and this is a model of uniform noise")
    found = []
    denoiser = build_meta_denoiser(shape, 0, torch.float32)
    in_layers = sum(p.numel() for p in denoiser.layers.parameters())
    outside = sum(p.numel() for p in denoiser.parameters()) - in_layers
    for name, train in config.train.get_phase_configs().items():
        devices = config.plan.devices
        train = replace(train, dtype=str(dtype).removeprefix("torch."))
        task = make_planned_task(config, train, shape)
        check_parallelism(train, task.items, devices)
        layout, microbatches = task.layout(shape), devices * train.gradient_accumulation_steps
        part = math.ceil(task.items * train.context_parallel / microbatches)
        one, decoded = task.sample_examples(shape, 1), task.sample_decoding(shape)
        rollout_flops = count_forward_flops(shape, decoded, layout).flops if decoded else 0.0
        memory = StepMemoryEstimator(task, shape, train, dtype).estimate(part)
        forward, denoisers = count_forward_flops(shape, one, layout), 2 if memory.reference else 1
        flops = forward.flops_with_backward(train.is_denoiser_frozen) + (denoisers - 1) * forward.flops
        found.append(
            PhasePlan(
                name=name,
                train=train,
                tokens=float(task.items * count_layer_tokens(shape, one, layout)),
                flops=task.items * (flops + rollout_flops),
                items=task.items,
                microbatch_items=part,
                memory=memory,
                decode_bytes=estimate_rollout_bytes(config, task, shape, dtype, part),
                devices=devices,
                number_bytes=dtype.itemsize,
                gathered_bytes=dtype.itemsize
                * (2 * in_layers / shape.num_hidden_layers + denoisers * outside),
                non_layer_parameters=outside,
                layer_calls=len(_forward_calls(shape, one, layout)),
                kv_bytes_per_item=2.0
                * shape.num_hidden_layers
                * shape.num_key_value_heads
                * shape.head_dim
                * train.sequence_length
                * dtype.itemsize,
            )
        )
    return found


def make_planned_task(config: Config, train: TrainConfig, shape: DenoiserConfig) -> Task:
    """The task of a phase as it is trained, but for what its rows would come from."""
    tokenizer: Any = SimpleNamespace(end_ids=frozenset({0}), mask_id=shape.mask_token_id)
    here = replace(config, model=replace(config.model, device="cpu"))
    origin = InitialModel(shape, tokenizer, None, train.seed, train.lora_rank)
    return find_task(train)(None, here, train, origin)


def count_layer_tokens(shape: DenoiserConfig, examples: list[Example], layout: str) -> int:
    """Tokens that the layers run for these rows: shared passages once where the layout allows it."""
    return sum(len(run.ids) for runs, *_ in _forward_calls(shape, examples, layout) for run in runs)


def _forward_calls(
    shape: DenoiserConfig, examples: list[Example], layout: str
) -> list[tuple[list[Segment], list[int], list[int]]]:
    """Runs, tokens that each sees before its own, and tokens through the last layer, of a batch's calls."""
    states = [
        lay_out_prompt(e.prompt, shape, layout).build_row(e.target, e.finished, shape.shifted)
        for e in examples
    ]
    segments = list(dict.fromkeys(segment for state in states for segment in state.context_segments))
    seen = [sum(len(segment.ids) for segment in state.context_segments) for state in states]
    canvases = (
        [state.canvas_segment for state in states],
        seen,
        [len(e.supervised_positions) for e in examples],
    )
    return [(segments, [0] * len(segments), [0] * len(segments)), canvases] if segments else [canvases]


def estimate_rollout_bytes(
    config: Config, task: Task, shape: DenoiserConfig, dtype: torch.dtype, part: int
) -> float:
    """Bytes in addition to the weights while `part` items are decoded; pools take what is left."""
    train = task.train
    settings = task.rollout_settings(config, train)
    if settings is None:
        return 0.0
    passages = config.retrieval.top_k, train.passage_length
    row = LongestRow.from_budget(ContextBudget.from_config(shape), shape, LONG_QUESTION_TOKENS, passages)
    memory, rows = (
        DecodeMemory.from_config(shape, dtype, settings, row),
        min(settings.batch_size, part * task.rows // task.items),
    )
    return memory.kv_slot_bytes(rows) + memory.step_bytes(rows)


def count_forward_flops(shape: DenoiserConfig, examples: list[Example], layout: str) -> FlopCount:
    """What the layers and the head compute for these rows, once."""
    work = FlopCount()
    for runs, seen, through in _forward_calls(shape, examples, layout):
        lengths = [len(run.ids) for run in runs]
        keys = [a + b for a, b in zip(seen, lengths, strict=True)]
        pairs = sum(
            before * n + int(run.visible_counts.sum())
            for before, n, run in zip(seen, lengths, runs, strict=True)
        )
        read = sum(n * k for n, k in zip(through, keys, strict=True))
        work += count_encode_flops(shape, lengths, keys, through, 2, (pairs, read))
    return work + count_head_flops(shape, sum(len(e.supervised_positions) for e in examples), 2)


def check_run_fits(config: Config, count: int, device: torch.device) -> None:
    """Raises `ConfigError` for a phase that `count` processes cannot share, or that is more than the device
    of each has free, or than `engine.memory_gib`.

    On a CPU without such a budget, and of a model of uniform noise, only weights, gradients and optimizer
    are looked at; else the whole step is planned, with the pool of the decoders that validate.
    """
    have = measure_free_bytes(device) / (count if device.type == "cpu" else 1)
    limit = f"this {device.type} has"
    engine, kept = config.engine, config.engine.for_training_rollouts.prefix_cache_gib or 0.0
    if engine.memory_gib is not None:
        given = engine.memory_gib * GIB
        if given > have:
            raise ConfigError(
                f"engine.memory_gib={engine.memory_gib:g} is {given / GB:.3g} GB for each process, and "
                f"{limit} {have / GB:.3g} GB free for it: lower it, or wait until others have ended"
            )
        have, limit = given, f"engine.memory_gib={engine.memory_gib:g} is"
    shape = resolve_shape(config)
    denoiser = (
        open_initial_model(config).build_on_meta(torch.float32)
        if shape.noise is not None
        else build_meta_denoiser(shape, 0, torch.float32)
    )
    each = FLOAT32_BYTES * sum(p.numel() for p in denoiser.parameters())
    for train in config.train.get_phase_configs().values():
        check_parallelism(train, find_task(train, shape.noise).count_items(train)[0], count)
        need = each / 2 if train.is_denoiser_frozen else 2 * each + count_optimizer_bytes(denoiser, train)
        if train.parallel == "fsdp":
            need /= count
        if need > have:
            raise ConfigError(
                f"weights, gradients and optimizer alone take {need / GB:.3g} GB on each device, and "
                f"{limit} {have / GB:.3g} GB: {MEMORY_REMEDY}"
            )
    if shape.noise is not None or (device.type == "cpu" and engine.memory_gib is None):
        return
    devices = replace(config, plan=replace(config.plan, devices=count))
    for phase in plan_phases(devices, shape, choose_dtype(config.train.dtype, device)):
        need = sum(phase.bytes_per_device().values()) + kept * GIB
        if need > have:
            name = f"the phase {phase.name}" if phase.name else "a step"
            raise ConfigError(
                f"{name} takes {need / GB:.3g} GB on each device, and {limit} {have / GB:.3g} GB: "
                f"{MEMORY_REMEDY}"
            )


def resolve_shape(config: Config) -> DenoiserConfig:
    """The architecture that a run would train; of well-known checkpoints without network or folder."""
    path = config.model.path
    if path is None or path not in KNOWN_CHECKPOINTS or Path(path).exists():
        return open_initial_model(config).config
    return make_training_shape(
        config, FAMILIES[KNOWN_CHECKPOINTS[path]["model_type"]].read_config(KNOWN_CHECKPOINTS[path])
    )
