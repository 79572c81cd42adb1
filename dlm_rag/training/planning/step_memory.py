"""Bytes that a training step holds at its peak, found by running it on tensors without contents.

Neither all layers nor all items are run: bytes grow evenly with both, so two numbers of each tell what they
are for others. The peak may be near the loss, or at either end of a backward: the three are told apart, for
more layers can make another one the largest.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dlm_rag.config import TrainConfig
from dlm_rag.model.context_parallel import ContextParallel
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.flops import FlopCount, count_head_flops
from dlm_rag.training.initial_weights import build_meta_denoiser
from dlm_rag.training.losses import make_autocast
from dlm_rag.training.optimizers import make_optimizers
from dlm_rag.training.planning.memory_tracker import MemoryTracker, replace_with_empty_weights
from dlm_rag.training.task import Task

FLOAT32_BYTES = 4  # bytes of a weight under training, of its gradient, of a number of the optimizer
EDGE_LAYERS = 2  # layers at either end of the denoiser whose moments stand for all between them
MIN_LOGIT_CHUNKS = 2  # chunks of logits from which on the loss grows evenly with items
COUNTED = ("flops", "attention_flops", "tokens")  # of the forward, beside the peaks
Peaks = dict[tuple[str | int, ...], float]  # bytes at the peak of each part of a step; `COUNTED`


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device that holds everything, for one part of a step; and what its forward computes."""

    weights: int
    reference: int  # weights of another denoiser, which is not trained
    gradients: int  # of what is trained
    optimizer: int
    activations: int  # what comes on top at the peak of forward and backward, in any part of a step
    parameters: int
    outside_parameters: int  # of the layers
    trained: int
    forward: FlopCount


def estimate_step_memory(task: Task, shape: DenoiserConfig, dtype: torch.dtype, items: int) -> StepMemory:
    """Returns what a part of `items` items needs, with the arithmetic in `dtype`; nothing is allocated.

    Where processes share a sequence, it is what one of them needs.
    """
    train, root = task.train, _build_objective(task, shape, dtype)
    named = list(root.denoiser.named_parameters())
    trained = [p for _, p in named if p.requires_grad]
    gradients = FLOAT32_BYTES * sum(p.numel() for p in trained)
    reference = getattr(root, "reference", None)
    both = zip(root.denoiser.parameters(), reference.parameters(), strict=True) if reference else ()
    peaks = _estimate_peaks(task, shape, dtype, items, root.logit_chunk * train.context_parallel)
    flops, attention, tokens = (peaks.pop((name,)) for name in COUNTED)
    # Gradients are counted by themselves; those of earlier parts are not in the peak, others are.
    peak = max(peaks.values())
    activations = peak if _accumulates(train) else max(0.0, peak - gradients)
    return StepMemory(
        weights=gradients + sum(p.nbytes for _, p in named if not p.requires_grad),
        # What is frozen in both is there once, but in shards.
        reference=sum(b.nbytes for a, b in both if a.requires_grad or train.parallel == "fsdp"),
        gradients=gradients,
        optimizer=count_optimizer_bytes(root.denoiser, train),
        activations=round(activations),
        parameters=sum(p.numel() for _, p in named),
        outside_parameters=sum(p.numel() for name, p in named if not name.startswith("layers.")),
        trained=sum(p.numel() for p in trained),
        forward=FlopCount(flops, attention, tokens=round(tokens)),
    )


def _accumulates(train: TrainConfig) -> bool:
    """Whether gradients of earlier parts are there from the start; shards of them never grow either."""
    return train.gradient_accumulation_steps > 1 or train.parallel == "fsdp"


def _estimate_peaks(task: Task, shape: DenoiserConfig, dtype: torch.dtype, items: int, chunk: int) -> Peaks:
    """Returns the peaks with so many items, from runs of as few layers and items as tell of them.

    chunk: positions whose logits are there at a time.
    """
    few = math.ceil(MIN_LOGIT_CHUNKS * chunk / task.sample_batch(shape, 1).counts["supervised"])
    counts = (items,) if items <= 2 * few else (few, 2 * few)
    # The first layers may be dense where the others have experts.
    shallow = (shape.dense_layers if shape.experts else 0) + 2 * EDGE_LAYERS
    layers = shape.num_hidden_layers
    depths = (shallow, shallow + 1) if layers > shallow + 1 else (layers,)
    found = []
    for depth in depths:
        small = replace(shape, num_hidden_layers=depth)
        found.append(_interpolate([_simulate(task, small, dtype, n) for n in counts], items, counts))
    return _interpolate(found, layers, depths)


def _interpolate(found: list[Peaks], at: int, numbers: tuple[int, ...]) -> Peaks:
    """Returns the peaks at a number from those at one or two others."""
    a, b = found[0], found[-1]
    t = (at - numbers[0]) / ((numbers[-1] - numbers[0]) or 1)
    return {part: value + t * (b[part] - value) for part, value in a.items()}


def _simulate(task: Task, shape: DenoiserConfig, dtype: torch.dtype, items: int) -> Peaks:
    """Runs a part of a step with so many items, forward and backward."""
    root = _build_objective(task, shape, dtype)
    batch = task.sample_batch(shape, items)
    if task.train.parallel == "fsdp":  # as weights are gathered
        for parameter in root.parameters():
            parameter.data = parameter.data.to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for denoiser in root.modules():
            if isinstance(denoiser, Denoiser):
                replace_with_empty_weights(denoiser)
        for parameter in root.parameters():
            if parameter.requires_grad and _accumulates(task.train):
                parameter.grad = torch.zeros_like(parameter)
        with StepMemoryTracker(root) as alive:
            with make_autocast("cpu", dtype):
                loss, _ = root(batch, batch.counts)
            loss.backward()
    work = root.denoiser.flop_count
    work += count_head_flops(shape, batch.counts["supervised"] / task.train.context_parallel, 2)
    return alive.peaks | {(name,): getattr(work, name) for name in COUNTED}


def _build_objective(task: Task, shape: DenoiserConfig, dtype: torch.dtype) -> Any:
    """Builds the task's loss around a denoiser on the meta device, in a run's dtypes."""
    denoiser = build_meta_denoiser(shape, task.train.lora_rank, dtype)
    denoiser.activation_checkpointing = task.train.activation_checkpointing
    number = task.train.context_parallel
    return task.objective(denoiser, ContextParallel(0, number, group=None) if number > 1 else None)


def count_optimizer_bytes(denoiser: Denoiser, train: TrainConfig) -> int:
    """Counts what AdamW (two numbers for each trained weight) or Muon (one) keeps, in float32."""
    return sum(
        FLOAT32_BYTES * (1 if isinstance(optimizer, torch.optim.Muon) else 2) * p.numel()
        for optimizer in make_optimizers(denoiser, train)
        for group in optimizer.param_groups
        for p in group["params"]
    )


class StepMemoryTracker(MemoryTracker):
    """The peak of each part of a step: up to the loss, and in each backward the layers at either end.

    Bytes in the layers between lie between those of the ends, whose moments are the same in any depth.
    """

    def __init__(self, root: Any) -> None:
        """root: a task's objective, whose denoisers are watched."""
        super().__init__()
        self.peaks: Peaks = {}
        self._at: tuple[str | int, ...] = ("forward",)
        self._calls = 0
        for denoiser in root.modules():
            if isinstance(denoiser, Denoiser):
                for number, layer in enumerate(denoiser.layers):
                    edge = "first" if number < EDGE_LAYERS else "middle"
                    edge = "last" if number >= len(denoiser.layers) - EDGE_LAYERS else edge
                    layer.register_forward_hook(partial(self._watch_gradient, number == 0, edge))

    def track_tensor(self, tensor: Tensor) -> None:
        super().track_tensor(tensor)
        self.peaks[self._at] = max(self.peaks.get(self._at, 0), self.live_bytes)

    def _watch_gradient(
        self, is_first: bool, edge: str, layer: Any, given: Any, found: tuple[Tensor, ...]
    ) -> None:
        self._calls += is_first and self._at == ("forward",)
        if found[0].requires_grad:
            found[0].register_hook(partial(self._enter, self._calls, edge))

    def _enter(self, call: int, edge: str, _: Tensor) -> None:
        self._at = ("backward", call, edge)
