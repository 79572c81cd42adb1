"""Bytes that a training step holds at its peak, found by running it on tensors without contents."""

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dlm_rag.config import TrainConfig
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.flops import FlopCount, count_head_flops
from dlm_rag.training.initial_weights import build_meta_denoiser
from dlm_rag.training.losses import make_autocast
from dlm_rag.training.optimizers import make_optimizers
from dlm_rag.training.planning.memory_tracker import MemoryTracker, replace_with_empty_weights
from dlm_rag.training.task import Task

FLOAT32_BYTES = 4  # bytes of a weight under training, of its gradient, of a number of the optimizer


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device that holds everything, for one part of a step; and what its forward computes."""

    weights: int
    gradients: int  # of what is trained
    optimizer: int
    activations: int  # what comes on top at the peak of forward and backward, in any part of a step
    parameters: int
    outside_parameters: int  # of the layers
    trained: int
    forward: FlopCount


def estimate_step_memory(task: Task, shape: DenoiserConfig, dtype: torch.dtype, items: int) -> StepMemory:
    """Returns what a part of `items` items needs, with the arithmetic in `dtype`; nothing is allocated."""
    train, root = task.train, _build_objective(task, shape, dtype)
    named = list(root.denoiser.named_parameters())
    trained = [p for _, p in named if p.requires_grad]
    gradients = FLOAT32_BYTES * sum(p.numel() for p in trained)
    sizes = {
        "weights": gradients + sum(p.nbytes for _, p in named if not p.requires_grad),
        "optimizer": count_optimizer_bytes(root.denoiser, train),
        "parameters": sum(p.numel() for _, p in named),
        "outside_parameters": sum(p.numel() for name, p in named if not name.startswith("layers.")),
        "trained": sum(p.numel() for p in trained),
    }
    # Gradients of earlier parts are there from the start, and shards of them never grow: these are not in
    # the peak, others are.
    accumulates = train.gradient_accumulation_steps > 1 or train.parallel == "fsdp"
    peak, forward = _simulate(task, root, dtype, task.sample_batch(shape, items), accumulates)
    activations = peak if accumulates else max(0, peak - gradients)
    return StepMemory(gradients=gradients, activations=activations, forward=forward, **sizes)


def _simulate(
    task: Task, root: Any, dtype: torch.dtype, batch: Any, accumulates: bool
) -> tuple[int, FlopCount]:
    """Runs a part of a step, forward and backward; its peak in bytes, and the work of its forward."""
    if task.train.parallel == "fsdp":  # as weights are gathered
        for parameter in root.parameters():
            parameter.data = parameter.data.to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for denoiser in root.modules():
            if isinstance(denoiser, Denoiser):
                replace_with_empty_weights(denoiser)
        for parameter in root.parameters():
            if parameter.requires_grad and accumulates:
                parameter.grad = torch.zeros_like(parameter)
        with MemoryTracker() as alive:
            with make_autocast("cpu", dtype):
                loss, _ = root(batch, batch.counts)
            loss.backward()
    head = count_head_flops(root.denoiser.config, batch.counts["supervised"], 2)
    work: FlopCount = root.denoiser.flop_count + head
    return alive.peak_bytes, work


def _build_objective(task: Task, shape: DenoiserConfig, dtype: torch.dtype) -> Any:
    """Builds the task's loss around a denoiser on the meta device, in a run's dtypes."""
    denoiser = build_meta_denoiser(shape, task.train.lora_rank, dtype)
    denoiser.activation_checkpointing = task.train.activation_checkpointing
    return task.objective(denoiser)


def count_optimizer_bytes(denoiser: Denoiser, train: TrainConfig) -> int:
    """Counts what AdamW (two numbers for each trained weight) or Muon (one) keeps, in float32."""
    return sum(
        FLOAT32_BYTES * (1 if isinstance(optimizer, torch.optim.Muon) else 2) * p.numel()
        for optimizer in make_optimizers(denoiser, train)
        for group in optimizer.param_groups
        for p in group["params"]
    )
