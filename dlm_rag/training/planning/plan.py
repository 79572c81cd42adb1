"""What a run takes, before anything is allocated: bytes, FLOPs, seconds; and what cannot be."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dlm_rag.config import Config, TrainConfig
from dlm_rag.decode.memory_budget import GIB, DecodeMemory, LongestRow, count_kv_bytes
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.evidence.segment_kv_cache import measure_free_bytes
from dlm_rag.evidence.truncation import ContextBudget
from dlm_rag.machine import choose_dtype
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.families import FAMILIES
from dlm_rag.model.flops import FlopCount, count_encode_flops, count_head_flops
from dlm_rag.model.memory_tracker import RESERVED_MEMORY_FRACTION
from dlm_rag.model.tensor_parallel import split_config
from dlm_rag.training.data.examples import LONG_QUESTION_TOKENS, Example
from dlm_rag.training.distributed import check_parallelism
from dlm_rag.training.initial_model import make_training_shape, open_initial_model
from dlm_rag.training.initial_weights import InitialModel, build_meta_denoiser
from dlm_rag.training.planning.gpu_specs import GpuSpec
from dlm_rag.training.planning.step_memory import (
    FLOAT32_BYTES,
    StepMemory,
    count_optimizer_bytes,
    estimate_step_memory,
)
from dlm_rag.training.task import Phase, Task
from dlm_rag.training.tasks import find_task
from dlm_rag.training.tensor_parallel import check_tensor_parallel

GB = 1e9
ROLLOUT_EXTRA_KEY = "rollouts, beyond these"
MEMORY_REMEDY = (
    "see what fits with --plan (gradient_accumulation_steps, activation_checkpointing, parallel=fsdp, "
    "lora_rank)"
)
# The shapes of checkpoints that people begin with, so that a plan needs neither network nor weights.
_QWEN_7B = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18_944, "vocab_size": 152_064, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
KNOWN_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "GSAI-ML/LLaDA-8B-Instruct": {
        "model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32,
        "mlp_hidden_size": 12_288, "vocab_size": 126_464, "embedding_size": 126_464, "rms_norm_eps": 1e-5,
        "max_sequence_length": 4096, "rope_theta": 500_000.0, "mask_token_id": 126_336,
    },
    "Dream-org/Dream-v0-Instruct-7B": _QWEN_7B | {
        "model_type": "Dream", "max_position_embeddings": 131_072, "mask_token_id": 151_666,
    },
    "Qwen/Qwen2.5-7B-Instruct": _QWEN_7B | {
        "model_type": "qwen2", "max_position_embeddings": 32_768, "mask_token_id": 151_665,
    },
}  # fmt: skip


@dataclass(frozen=True)
class PhasePlan:
    """A step of a phase on `devices` devices of a kind that need not be known."""

    name: str
    train: TrainConfig
    shape: DenoiserConfig
    size: int  # bytes of a number of the arithmetic
    devices: int
    items: int
    microbatch_items: int  # items that a device, or all that share sequences, compute at once
    tokens: float  # prompts and canvases
    flops: float  # forward and backward, nothing computed twice
    layer_calls: int  # of the layers in a forward: passages run before what sees them
    memory: StepMemory  # of a part
    decode_bytes: float  # of keys, values and a decoding step of those that are decoded together

    @property
    def device_bytes(self) -> dict[str, float]:
        """Bytes on each device, by what they are for."""
        copies = self.devices // self.train.tensor_parallel
        memory, shards = self.memory, copies if self.train.parallel == "fsdp" else 1
        layer = (memory.parameters - memory.outside_parameters) / self.shape.num_hidden_layers
        # What shards are gathered into: the layer at work, the next one, and the rest.
        gathered = self.size * (2 * layer + memory.outside_parameters * (2 if memory.reference else 1))
        return {
            "weights": memory.weights / shards,
            "reference": memory.reference / shards,
            "gradients": memory.gradients / shards,
            "optimizer": memory.optimizer / shards,
            "gathered shards": gathered if shards > 1 else 0.0,
            "activations": memory.activations - memory.logits,
            "logits at the peak": memory.logits,
            # Rollouts come before a step, when there are neither gradients nor activations.
            ROLLOUT_EXTRA_KEY: max(0.0, self.decode_bytes - memory.gradients / shards - memory.activations),
        }

    @property
    def memory_traffic(self) -> float:
        """Bytes that a device's operators read and write in a step, each by itself, as without compile."""
        moved, held = self.train.gradient_accumulation_steps * self.memory.bytes_moved, self.device_bytes
        if self.train.is_denoiser_frozen:
            return moved
        # AdamW reads weight, gradient and its state, and writes all but the gradient.
        return moved + 2 * (held["weights"] + held["optimizer"]) + held["gradients"]

    @property
    def network_traffic(self) -> float:
        """Bytes that a device sends in a step, in rings: sums of gradients, shards, keys and values."""
        train, memory, others = self.train, self.memory, (self.devices - 1) / self.devices
        parts, apart = train.gradient_accumulation_steps, train.context_parallel
        each = 2 * others * memory.gradients
        if train.parallel == "fsdp":
            # A layer is gathered for each call, forward and backward; what is outside of the layers stays
            # gathered. Gradients are summed in float32, in every part.
            outside, passes = memory.outside_parameters, 3 if memory.reference else 2  # has no backward
            numbers = passes * self.layer_calls * (memory.parameters - outside) + (passes - 1) * outside
            each = others * (self.size * numbers + FLOAT32_BYTES * memory.trained) * parts
        passes = 3 if train.activation_checkpointing == "full" else 2
        rows = passes * self.microbatch_items * parts * train.sequence_length
        return each + rows * count_kv_bytes(self.shape, self.size) * (apart - 1) / apart

    def step_seconds(self, machine: GpuSpec, dtype: torch.dtype, mfu: float) -> dict[str, float]:
        """Of a step, were it bound by nothing else: arithmetic at `mfu`, memory, network at their peaks."""
        return {
            "compute": self.flops / (self.devices * machine.flops[dtype] * mfu),
            "memory": self.memory_traffic / machine.bandwidth,
            "network": self.network_traffic / machine.link if self.devices > 1 else 0.0,
        }

    def max_microbatch_items(self, machine: GpuSpec) -> int:
        """Items that fit into one part of a step on a device; 0 where not one does."""
        have, need = (1 - RESERVED_MEMORY_FRACTION) * machine.memory, sum(self.device_bytes.values())
        rollouts, more = self.device_bytes[ROLLOUT_EXTRA_KEY], self.memory.activations_per_item
        room = have - (need - rollouts - more * (self.microbatch_items - 1))
        if room < 0 or (rollouts and need > have):  # which are as large however small a part is
            return 0
        return 1 + int(room / more) if more else self.items


def plan_phases(config: Config, shape: DenoiserConfig, dtype: torch.dtype) -> list[PhasePlan]:
    """The plan of every phase, with the arithmetic in `dtype`; pointer supervision is left out.

    Raises `ConfigError` where so many devices cannot share a phase.
    """
    if shape.noise is not None:
        raise ConfigError("a plan is made for denoisers of masks, and this is a model of uniform noise")
    found, devices = [], config.plan.devices
    for name, train in config.train.get_phase_configs().items():
        train = replace(train, dtype=str(dtype).removeprefix("torch."))
        task = make_planned_task(config, train, shape)
        check_parallelism(train, task.items, devices)
        check_tensor_parallel(config, train, shape)
        own = split_config(shape, train.tensor_parallel)
        parts = devices * train.gradient_accumulation_steps
        part = math.ceil(task.items * train.context_parallel * train.tensor_parallel / parts)
        memory = estimate_step_memory(task, own, dtype, part)
        decoded, layout = task.sample_decoding(shape), task.layout(shape)
        forward = count_forward_flops(shape, task.sample_examples(shape, 1), layout)
        flops = forward.flops_with_backward(train.is_denoiser_frozen)
        flops += forward.flops if memory.reference else 0
        flops += count_forward_flops(shape, decoded, layout).flops if decoded else 0
        decode_bytes = estimate_rollout_bytes(config, task, own, dtype, part)
        found.append(
            PhasePlan(
                name, train, shape, dtype.itemsize, devices, task.items, part,
                float(task.items * forward.tokens), task.items * flops, forward.calls, memory, decode_bytes,
            )
        )  # fmt: skip
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
    passages = config.retrieval.top_k, task.train.passage_length
    row = LongestRow.from_budget(ContextBudget.from_config(shape), shape, LONG_QUESTION_TOKENS, passages)
    memory = DecodeMemory.from_config(shape, dtype, settings, row)
    rows = min(settings.batch_size, part * task.rows // task.items)
    return memory.kv_slot_bytes(rows) + memory.step_bytes(rows)


def count_forward_flops(shape: DenoiserConfig, examples: list[Example], layout: str) -> FlopCount:
    """What the layers and the head compute for these rows, once; shared passages run once, before them."""
    states = [
        lay_out_prompt(e.prompt, shape, layout).build_row(e.target, e.finished, shape.shifted)
        for e in examples
    ]
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

    On a CPU without such a budget, and of a model of uniform noise, only weights, gradients and optimizer
    are looked at; else the whole step is planned, with the pool of the decoders that validate.
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
        check_parallelism(train, find_task(train, shape.noise).count_items(train)[0], count)
        check_tensor_parallel(config, train, shape)
        if shape.noise is None:
            own = split_config(shape, train.tensor_parallel)
            denoiser = build_meta_denoiser(own, 0, torch.float32)
        else:
            denoiser = open_initial_model(config).build_on_meta(torch.float32)
        weights = FLOAT32_BYTES * sum(p.numel() for p in denoiser.parameters())
        copies = count // train.tensor_parallel
        frozen, shards = train.is_denoiser_frozen, copies if train.parallel == "fsdp" else 1
        need = weights / 2 if frozen else 2 * weights + count_optimizer_bytes(denoiser, train)
        check(need / shards, "weights, gradients and optimizer alone take")
    if shape.noise is not None or (device.type == "cpu" and engine.memory_gib is None):
        return
    pool = GIB * (engine.for_training_rollouts.prefix_cache_gib or 0.0)
    devices = replace(config, plan=replace(config.plan, devices=count))
    for phase in plan_phases(devices, shape, choose_dtype(config.train.dtype, device)):
        name = f"the phase {phase.name}" if phase.name else "a step"
        check(sum(phase.device_bytes.values()) + pool, f"{name} takes")


def resolve_shape(config: Config) -> DenoiserConfig:
    """The architecture that a run would train; of well-known checkpoints without network or folder."""
    path = config.model.path
    if path is None or path not in KNOWN_CHECKPOINTS or Path(path).exists():
        return open_initial_model(config).config
    return make_training_shape(
        config, FAMILIES[KNOWN_CHECKPOINTS[path]["model_type"]].read_config(KNOWN_CHECKPOINTS[path])
    )
