"""What a run takes, before anything is allocated: bytes, FLOPs, seconds; and what cannot be."""

import math
import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dlm_rag.config import Config, TrainConfig
from dlm_rag.decode.budget import DecodeMemory, RowSize
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.fitting import Room
from dlm_rag.evidence.layout import arrange
from dlm_rag.evidence.pool import free_bytes
from dlm_rag.machine import choose_dtype
from dlm_rag.model.cost import Work, encode_work, head_work
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.families import FAMILIES
from dlm_rag.model.live import RESERVE
from dlm_rag.model.rows import Segment
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.tokenizer import Prompt
from dlm_rag.training.machines import Machine
from dlm_rag.training.memory import FLOAT32, PlannedStep, StepMemory, optimizer_bytes
from dlm_rag.training.objective import states_of
from dlm_rag.training.origin import QUESTION_LENGTH, Origin, begin, trained_shape
from dlm_rag.training.phase import task_of
from dlm_rag.training.policy_loss import Gates, PolicyRow
from dlm_rag.training.processes import check_sharing
from dlm_rag.training.rl import STEPS, Part
from dlm_rag.training.rollouts import rollout_settings
from dlm_rag.training.rows.example import Example
from dlm_rag.training.task import Task

GB, GIB = 1e9, 2**30
BEYOND = "rollouts, beyond these"
SEARCHED = (
    2  # how many times top_k the passages are that all rollouts of a question see: 1.6 to 2.7 measured
)
REMEDY = (
    "see what fits with --plan (accumulate, checkpointing, parallel=fsdp on several devices, lora_rank, a "
    "smaller checkpoint)"
)
# The shapes of checkpoints that people begin with, so that a plan needs neither network nor weights.
PUBLIC: dict[str, dict[str, Any]] = {
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
    part: int  # items that a device, or all that share sequences, compute at once
    memory: StepMemory  # with so many items
    rollouts: float  # bytes of keys, values and a step of those that are decoded together
    devices: int
    width: int  # bytes of a number of the arithmetic
    gathered: float  # bytes of what shards are gathered into: the layer at work, the next one, and the rest
    outside: int  # parameters outside of the layers
    calls: int  # of the layers in a forward: passages run before what sees them
    shared_row: float  # bytes of keys and values of all layers of an item

    def bytes(self) -> dict[str, float]:
        """Bytes on each device, by what they are for."""
        memory, shards = self.memory, self.devices if self.train.parallel == "fsdp" else 1
        found = {
            "weights": memory.weights / shards,
            "reference": memory.reference / shards,
            "gradients": memory.gradients / shards,
            "optimizer": memory.optimizer / shards,
            "gathered shards": self.gathered if shards > 1 else 0.0,
            "activations": memory.activations - memory.logits,
            "logits at the peak": memory.logits,
        }
        # Rollouts come before a step, when there are neither gradients nor activations.
        room = found["gradients"] + memory.activations
        return found | {BEYOND: max(0.0, self.rollouts - room)}

    def moved(self) -> float:
        """Bytes that a device's operators read and write in a step, each by itself, as without compile."""
        # AdamW reads weight, gradient and its state, and writes all but the gradient.
        update = 2 * (self.bytes()["weights"] + self.bytes()["optimizer"]) + self.bytes()["gradients"]
        return self.train.accumulate * self.memory.moved + (0 if self.train.frozen else update)

    def sent(self) -> float:
        """Bytes that a device sends in a step, in rings: sums of gradients, shards, keys and values."""
        train, memory = self.train, self.memory
        others = (self.devices - 1) / self.devices
        if train.parallel == "fsdp":
            # A layer is gathered for each call, forward and backward; what is outside of the layers stays
            # gathered. Gradients are summed in float32, in every part.
            layers = memory.parameters - self.outside
            passes = 3 if memory.reference else 2  # which has no backward
            numbers = self.width * (passes * self.calls * layers + (passes - 1) * self.outside)
            each = others * (numbers + FLOAT32 * memory.trained) * train.accumulate
        else:
            each = 2 * others * memory.gradients
        apart = train.context_parallel
        passes = 3 if train.checkpointing == "full" else 2
        rows = passes * self.shared_row * self.part * train.accumulate
        return each + rows * (apart - 1) / apart

    def seconds(self, machine: Machine, dtype: torch.dtype, mfu: float) -> dict[str, float]:
        """Of a step, were it bound by nothing else: arithmetic at `mfu`, memory, network at their peaks."""
        return {
            "compute": self.flops / (self.devices * machine.flops[dtype] * mfu),
            "memory": self.moved() / machine.bandwidth,
            "network": self.sent() / machine.link if self.devices > 1 else 0.0,
        }

    def largest_part(self, machine: Machine) -> int:
        """Items that fit into one part of a step on a device; 0 where not one does."""
        need, more = self.bytes(), self.memory.per_item
        room = (1 - RESERVE) * machine.memory - sum(need.values())
        if need.pop(BEYOND) and room < 0:
            return 0  # however small a part is
        one = sum(need.values()) - more * (self.part - 1)
        room = (1 - RESERVE) * machine.memory - one
        if room < 0:
            return 0
        return 1 + int(room / more) if more else self.train.items


def plan_phases(config: Config, shape: DenoiserConfig, dtype: torch.dtype) -> list[PhasePlan]:
    """The plan of every phase, with the arithmetic in `dtype`; pointer supervision is left out.

    Raises `ConfigError` where so many devices cannot share a phase.
    """
    if shape.noise is not None:
        raise ConfigError("a plan is made for denoisers of masks, and this is a model of uniform noise")
    found = []
    denoiser = _bare(shape)
    in_layers = sum(p.numel() for p in denoiser.layers.parameters())
    outside = sum(p.numel() for p in denoiser.parameters()) - in_layers
    for name, train in config.train.in_phases().items():
        devices = config.plan.devices
        check_sharing(train, train.items, devices)
        train = replace(train, dtype=str(dtype).removeprefix("torch."))
        layout = shape.evidence_layout if train.objective in ("sft", "rl") else "joint"
        part = math.ceil(train.items * train.context_parallel / (devices * train.accumulate))
        one, task = sample_items(config, train, shape, 1), planned_task(config, train, shape)
        sample = partial(sample_part, config, train, shape)
        memory = PlannedStep(task, sample, shape, train, dtype).memory(part)
        forward, denoisers = forward_work(shape, one, layout), 2 if memory.reference else 1
        flops = forward.with_backward(train.frozen) + (denoisers - 1) * forward.flops
        found.append(
            PhasePlan(
                name=name,
                train=train,
                tokens=float(train.items * tokens_of(shape, one, layout)),
                flops=train.items * (flops + rollout_flops(config, train, shape)),
                part=part,
                memory=memory,
                rollouts=rollout_bytes(config, train, shape, dtype, part),
                devices=devices,
                width=dtype.itemsize,
                gathered=dtype.itemsize * (2 * in_layers / shape.num_hidden_layers + denoisers * outside),
                outside=outside,
                calls=len(_calls(shape, one, layout)),
                shared_row=2.0
                * shape.num_hidden_layers
                * shape.num_key_value_heads
                * shape.head_dim
                * train.sequence_length
                * dtype.itemsize,
            )
        )
    return found


def planned_task(config: Config, train: TrainConfig, shape: DenoiserConfig) -> Task:
    """The task of a phase as it is trained, but for what its rows would come from."""
    tokenizer: Any = SimpleNamespace(end_ids=frozenset({0}), mask_id=shape.mask_token_id)
    here = replace(config, model=replace(config.model, device="cpu"))
    return task_of(None, here, train, Origin(shape, tokenizer, None, train.seed, train.lora_rank))


def sample_part(config: Config, train: TrainConfig, shape: DenoiserConfig, count: int) -> Any:
    """A part of a step of `count` items, as the task of the phase makes them."""
    examples = sample_items(config, train, shape, count)
    if train.objective != "rl":
        return examples
    rows = [
        PolicyRow(state, example.places, (-1,) * len(example.places), False, 1.0, 0.0)
        for example, state in zip(examples, states_of(examples, shape), strict=True)
    ]
    nothing = Gates.of_commits(())
    return Part({"rollouts": float(count * train.rows), "failed": 0.0}, rows, nothing, nothing)


def sample_items(config: Config, train: TrainConfig, shape: DenoiserConfig, count: int) -> list[Example]:
    """Rows as `count` items of a step have them: full prompts, half of each canvas masked."""
    rng = random.Random(0)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(shape.vocab_size) for _ in range(length))

    if train.objective in ("pretrain", "adapt"):
        length = train.sequence_length
        hidden = tuple(n % 2 == 0 for n in range(length))
        return [
            Example(Prompt((), (), ()), ids(length), hidden, (), 1.0, float(length)) for _ in range(count)
        ]
    hidden = tuple(n % 2 == 0 for n in range(shape.canvas_length))
    found, rows, top_k, searched = [], train.rows, config.retrieval.top_k, 1
    if train.objective == "rl":  # the steps that are learned from; of heads none runs a layer
        rows = 0 if train.learn == "heads" else rows * (train.steps_of_rollout or int(STEPS))
        searched = SEARCHED
    for _ in range(count):
        passages = [ids(train.passage_length) for _ in range(searched * top_k)]
        questions = [ids(QUESTION_LENGTH) for _ in range(rows if searched == 1 else 1)]
        for row in range(rows):
            first = row % ((searched - 1) * top_k + 1)
            facts = tuple(passages[first : first + top_k])
            prompt = Prompt(questions[row % len(questions)], facts, ())
            found.append(Example(prompt, ids(shape.canvas_length), hidden))
    return found


def tokens_of(shape: DenoiserConfig, examples: list[Example], layout: str) -> int:
    """Tokens that the layers run for these rows: shared passages once where the layout allows it."""
    return sum(len(run.ids) for runs, *_ in _calls(shape, examples, layout) for run in runs)


def _calls(
    shape: DenoiserConfig, examples: list[Example], layout: str
) -> list[tuple[list[Segment], list[int], list[int]]]:
    """Runs, tokens that each sees before its own, and tokens through the last layer, of a batch's calls."""
    states = [arrange(e.prompt, shape, layout).state(e.target, e.finished, shape.shifted) for e in examples]
    segments = list(dict.fromkeys(segment for state in states for segment in state.context))
    seen = [sum(len(segment.ids) for segment in state.context) for state in states]
    canvases = ([state.run for state in states], seen, [len(e.places) for e in examples])
    return [(segments, [0] * len(segments), [0] * len(segments)), canvases] if segments else [canvases]


def rollout_flops(config: Config, train: TrainConfig, shape: DenoiserConfig) -> float:
    """FLOPs of the rollouts of an item: `STEPS` passes over each canvas, its evidence encoded once."""
    if train.objective != "rl":
        return 0.0
    each = replace(train, learn=None, steps_of_rollout=int(STEPS))
    return forward_work(shape, sample_items(config, each, shape, 1), shape.evidence_layout).flops


def rollout_bytes(
    config: Config, train: TrainConfig, shape: DenoiserConfig, dtype: torch.dtype, part: int
) -> float:
    """Bytes beside the weights while those of `part` items are decoded; pools take what is left."""
    if train.objective != "rl":
        return 0.0
    settings, passages = rollout_settings(config, train), (config.retrieval.top_k, train.passage_length)
    row = RowSize.of(Room.of(shape), shape, QUESTION_LENGTH, passages)
    memory, rows = DecodeMemory.of(shape, dtype, settings, row), min(settings.batch_size, part * train.rows)
    return memory.slots(rows) + memory.step(rows)


def forward_work(shape: DenoiserConfig, examples: list[Example], layout: str) -> Work:
    """What the layers and the head compute for these rows, once."""
    work = Work()
    for runs, seen, through in _calls(shape, examples, layout):
        lengths = [len(run.ids) for run in runs]
        keys = [a + b for a, b in zip(seen, lengths, strict=True)]
        pairs = sum(before * n + run.pairs for before, n, run in zip(seen, lengths, runs, strict=True))
        read = sum(n * k for n, k in zip(through, keys, strict=True))
        work += encode_work(shape, lengths, keys, through, 2, (pairs, read))
    return work + head_work(shape, sum(len(e.places) for e in examples), 2)


def refuse_unfit(config: Config, count: int, device: torch.device) -> None:
    """Raises `ConfigError` for a phase that `count` processes cannot share, or that is more than the device
    of each has free, or than `engine.memory_gib`.

    On a CPU without such a budget, and of a model of uniform noise, only weights, gradients and optimizer
    are looked at; else the whole step is planned, with the pool of the decoders that validate.
    """
    have, told = free_bytes(device) / (count if device.type == "cpu" else 1), f"this {device.type} has"
    engine, kept = config.engine, config.engine.beside_training.pool_gib or 0.0
    if engine.memory_gib is not None:
        given = engine.memory_gib * GIB
        if given > have:
            raise ConfigError(
                f"engine.memory_gib={engine.memory_gib:g} is {given / GB:.3g} GB for each process, and "
                f"{told} {have / GB:.3g} GB free for it: lower it, or wait until others have ended"
            )
        have, told = given, f"engine.memory_gib={engine.memory_gib:g} is"
    shape = shape_of(config)
    denoiser = begin(config).empty(torch.float32) if shape.noise is not None else _bare(shape)
    each = FLOAT32 * sum(p.numel() for p in denoiser.parameters())
    for train in config.train.in_phases().values():
        check_sharing(train, train.items, count)
        need = each / 2 if train.frozen else 2 * each + optimizer_bytes(denoiser, train)
        if train.parallel == "fsdp":
            need /= count
        if need > have:
            raise ConfigError(
                f"weights, gradients and optimizer alone take {need / GB:.3g} GB on each device, and "
                f"{told} {have / GB:.3g} GB: {REMEDY}"
            )
    if shape.noise is not None or (device.type == "cpu" and engine.memory_gib is None):
        return
    devices = replace(config, plan=replace(config.plan, devices=count))
    for phase in plan_phases(devices, shape, choose_dtype(config.train.dtype, device)):
        need = sum(phase.bytes().values()) + kept * GIB
        if need > have:
            name = f"the phase {phase.name}" if phase.name else "a step"
            raise ConfigError(
                f"{name} takes {need / GB:.3g} GB on each device, and {told} {have / GB:.3g} GB: {REMEDY}"
            )


def _bare(shape: DenoiserConfig) -> Denoiser:
    with torch.device("meta"):
        return Denoiser(shape)


def shape_of(config: Config) -> DenoiserConfig:
    """The architecture that a run would train; of well-known checkpoints without network or folder."""
    path = config.model.path
    if path is None or path not in PUBLIC or Path(path).exists():
        return begin(config).config
    return trained_shape(config, FAMILIES[PUBLIC[path]["model_type"]].read(PUBLIC[path]))
