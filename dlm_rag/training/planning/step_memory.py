"""Bytes that a training step holds at its peak, found by running it on tensors without contents.

Not all items are run. The bytes alive at any moment of a step grow evenly with them, so two numbers of
items tell what they are for others, and the peak is the largest of them, at whichever moment.

torch's own MemTracker stops at frozen weights (docs/log.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dlm_rag.config import TrainConfig
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.packed_batch import ContextParallel
from dlm_rag.model.simulated_memory import MemoryTracker, replace_with_empty_weights
from dlm_rag.progress import report_progress
from dlm_rag.training.initial_weights import build_meta_denoiser
from dlm_rag.training.losses import make_autocast
from dlm_rag.training.optimizers import make_optimizers
from dlm_rag.training.task import Task

FLOAT32_BYTES = 4  # bytes: weights under training, their gradients, what an optimizer keeps
MIN_LOGIT_CHUNKS = 2  # of logits from which on the loss grows evenly with items
# Bytes alive, and those of logits among them, at each moment of a step.
MemoryTimeline = dict[str | tuple[str, int], tuple[float, float]]


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device that holds everything, for one part of a step."""

    weights: int
    reference: int  # weights of another denoiser, which is not trained
    gradients: int  # of what is trained
    optimizer: int
    activations: int  # what comes on top at the peak of forward and backward, in any part of a step
    logits: int  # so much of it
    bytes_moved: int  # read and written in forward and backward, operator by operator
    parameters: int
    outside_parameters: int  # of the layers
    trained: int
    activations_per_item: float  # activations that another item adds


def estimate_step_memory(task: Task, shape: DenoiserConfig, dtype: torch.dtype, items: int) -> StepMemory:
    """What a part of `items` items needs, with the arithmetic in `dtype`; nothing is allocated.

    Of shared sequences: what one of the processes needs that share them. Of heads: the weights alone,
    for no layer is run.
    """
    train, root = task.train, _build_objective(task, shape, dtype)
    named = list(root.denoiser.named_parameters())
    parameters = [parameter for _, parameter in named]
    trained = [p for p in parameters if p.requires_grad]
    gradients = FLOAT32_BYTES * sum(p.numel() for p in trained)
    reference = getattr(root, "reference", None)
    pairs = [] if reference is None else zip(parameters, reference.parameters(), strict=True)
    peak = logits = moved = per_item = 0.0
    if task.runs_denoiser:
        other = items // 2 or 2
        ((peak, logits), moved), ((lower, _), _) = _estimate_peaks(task, shape, dtype, (items, other))
        per_item = max(0.0, (peak - lower) / (items - other))
    # Gradients are counted by themselves; those of earlier parts are not in the peak, others are.
    activations = peak if _accumulates(train) else max(0.0, peak - gradients)
    return StepMemory(
        weights=gradients + sum(p.nbytes for p in parameters if not p.requires_grad),
        # What is frozen in both is there once, but in shards.
        reference=sum(b.nbytes for a, b in pairs if a.requires_grad or train.parallel == "fsdp"),
        gradients=gradients,
        optimizer=count_optimizer_bytes(root.denoiser, train),
        activations=round(activations),
        logits=round(logits),
        bytes_moved=round(moved),
        parameters=sum(p.numel() for p in parameters),
        outside_parameters=sum(p.numel() for name, p in named if not name.startswith("layers.")),
        trained=sum(p.numel() for p in trained),
        activations_per_item=per_item,
    )


def _accumulates(train: TrainConfig) -> bool:
    """Whether gradients of earlier parts are there from the start; shards of them never grow either."""
    return train.gradient_accumulation_steps > 1 or train.parallel == "fsdp"


def _estimate_peaks(
    task: Task, shape: DenoiserConfig, dtype: torch.dtype, items: Sequence[int]
) -> list[tuple[tuple[float, float], float]]:
    """For each number of items: bytes at the peak, those of logits among them; bytes moved."""
    train, chunk = task.train, _build_objective(task, shape, dtype).logit_chunk
    terms = task.loss_weights(int(train.attention_anneal_fraction * train.max_steps / 2))
    each = task.count_microbatch(task.sample_microbatch(shape, 1), terms)["supervised"]
    few = math.ceil(MIN_LOGIT_CHUNKS * chunk * train.context_parallel / each)
    low, high = counts = items if max(items) <= 2 * few else (few, 2 * few)
    runs = []
    with report_progress("planning a step", len(counts)) as advance:
        for number in counts:
            runs.append(_simulate(task, shape, dtype, task.sample_microbatch(shape, number), terms))
            advance(1)
    (a, moved), (b, more) = runs
    found = []
    for number in items:
        t = (number - low) / (high - low)
        course = [
            (alive + t * (b[moment][0] - alive), wide + t * (b[moment][1] - wide))
            for moment, (alive, wide) in a.items()
        ]
        found.append((max(course), moved + t * (more - moved)))
    return found


def _simulate(
    task: Task, shape: DenoiserConfig, dtype: torch.dtype, part: Any, terms: Any
) -> tuple[MemoryTimeline, int]:
    """A part of a step, forward and backward; with the bytes moved."""
    root, counts = _build_objective(task, shape, dtype), task.count_microbatch(part, terms)
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
                loss, _ = root(part, counts, terms)
            alive.enter("backward of the loss")
            loss.backward()
    return alive.timeline, alive.bytes_moved


def _build_objective(task: Task, shape: DenoiserConfig, dtype: torch.dtype) -> Any:
    """The task's loss around a denoiser on the meta device, in a run's dtypes."""
    train = task.train
    denoiser = build_meta_denoiser(shape, train.lora_rank, dtype, train.trainable == "policy_heads")
    denoiser.activation_checkpointing = train.activation_checkpointing
    number = train.context_parallel
    return task.objective(denoiser, ContextParallel(0, number, group=None) if number > 1 else None)


def count_optimizer_bytes(denoiser: Denoiser, train: TrainConfig) -> int:
    """AdamW keeps two numbers for each trained weight, Muon one, in float32."""
    return sum(
        FLOAT32_BYTES * (1 if isinstance(optimizer, torch.optim.Muon) else 2) * p.numel()
        for optimizer in make_optimizers(denoiser, train)
        for group in optimizer.param_groups
        for p in group["params"]
    )


class StepMemoryTracker(MemoryTracker):
    """Bytes alive at each moment of a step, under names that hold for any number of items.

    A moment is where the step is (forward or backward, of a call of the layers) and how many storages were
    made there before. The loss takes more operators the more items there are: it is one moment, at its
    highest.
    """

    def __init__(self, root: Any) -> None:
        """root: a task's objective, whose denoisers are watched."""
        super().__init__(root.denoiser.config.vocab_size)
        self.timeline: MemoryTimeline = {}
        self._at, self._made, calls = "before", 0, count()
        for denoiser in root.modules():
            if isinstance(denoiser, Denoiser):
                first, last = denoiser.layers[0], denoiser.layers[-1]
                first.register_forward_pre_hook(lambda *_: self.enter(f"forward {next(calls)}"))
                last.register_forward_hook(self._watch_gradient)
                denoiser.norm.register_forward_pre_hook(lambda *_: self.enter("loss"))

    def enter(self, at: str) -> None:
        if "backward" in at or "backward" not in self._at:  # else checkpointing computes forward again
            self._at, self._made = at, 0

    def track_tensor(self, tensor: Tensor) -> None:
        super().track_tensor(tensor)
        self._made += 1
        moment = self._at if "loss" in self._at else (self._at, self._made)
        self.timeline[moment] = max(self.timeline.get(moment, (0, 0)), (self.live_bytes, self._wide_now))

    def _watch_gradient(self, layer: nn.Module, given: Any, found: tuple[Tensor, ...]) -> None:
        if found[0].requires_grad:
            found[0].register_hook(partial(lambda at, _: self.enter(at), f"backward of {self._at}"))
