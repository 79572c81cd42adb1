"""Bytes that a training step holds at its peak, found by running it on tensors without contents.

Neither all layers nor all items are run. The bytes alive at any moment of a step grow evenly with both: two
numbers of items tell what they are for others, and what a layer in the middle has made by then is what each
layer more adds. The peak is the largest of them, at whichever moment.

torch's own MemTracker stops at frozen weights (docs/log.md).
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dlm_rag.config import TrainConfig
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.memory_tracker import MemoryTracker, replace_with_empty_weights
from dlm_rag.model.packed_batch import ContextParallel
from dlm_rag.progress import report_progress
from dlm_rag.training.initial_weights import build_meta_denoiser
from dlm_rag.training.losses import make_autocast
from dlm_rag.training.optimizers import make_optimizers
from dlm_rag.training.task import Task

FLOAT32_BYTES = 4  # bytes: weights under training, their gradients, what an optimizer keeps
TAIL_LAYERS = 2  # layers: the last is spared what nobody reads, and the one before is as all others
# Two that stand for all between the first and the last ones, counted from the end. What the nearer one has
# made may be in the hands of its neighbour, where a layer more would add nothing: the other one is asked.
EARLY, LATE = -TAIL_LAYERS - 2, -TAIL_LAYERS - 1
MIN_LOGIT_CHUNKS = 2  # of logits from which on the loss grows evenly with items
# Bytes alive, and those of logits among them, at each moment of a step.
MemoryTimeline = dict[tuple[str | int, ...], tuple[float, float]]
MOVED_BYTES_KEY = ("moved",)
# Of parts of a step that were run, by all that they depend on; settings hold lists, which have no hash.
_simulated: dict[str, MemoryTimeline] = {}


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

    Of shared sequences: what one of the processes needs that share them.
    """
    train, root = task.train, _build_objective(task, shape, dtype, shape.num_hidden_layers)
    named = list(root.denoiser.named_parameters())
    parameters = [parameter for _, parameter in named]
    trained = [p for p in parameters if p.requires_grad]
    gradients = FLOAT32_BYTES * sum(p.numel() for p in trained)
    reference = getattr(root, "reference", None)
    pairs = [] if reference is None else zip(parameters, reference.parameters(), strict=True)
    other = items // 2 or 2
    chunk = root.logit_chunk * train.context_parallel
    course, less = _estimate_timelines(task, shape, dtype, (items, other), chunk)
    (moved, _), _ = course.pop(MOVED_BYTES_KEY), less.pop(MOVED_BYTES_KEY)
    (peak, logits), (lower, _) = max(course.values()), max(less.values())
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


def _estimate_timelines(
    task: Task, shape: DenoiserConfig, dtype: torch.dtype, items: Sequence[int], chunk: int
) -> list[MemoryTimeline]:
    """The courses of parts of so many items, from runs of as few layers and items as tell of them.

    chunk: positions whose logits are there at a time.
    """
    terms = _choose_terms(task)
    each = task.count_microbatch(task.sample_microbatch(shape, 1), terms)["supervised"]
    parallel, parts = "fsdp" if task.train.parallel == "fsdp" else "ddp", 1 + _accumulates(task.train)
    like = replace(task.train, parallel=parallel, gradient_accumulation_steps=parts)  # no more differs
    few = math.ceil(MIN_LOGIT_CHUNKS * chunk / each)
    low, high = counts = items if max(items) <= 2 * few else (few, 2 * few)
    depth = min(shape.num_hidden_layers, _count_uneven_layers(shape) + 1 + 2 + TAIL_LAYERS)
    found = []
    with report_progress("planning a step", len(counts)) as advance:
        for number in counts:
            key = repr((replace(task.phase.config, train=like), shape, dtype, number, depth))
            if key not in _simulated:
                _simulated[key] = _simulate(task, shape, dtype, number, depth)
            found.append(_simulated[key])
            advance(1)
    less, more = found
    return [_interpolate(less, more, (number - low) / (high - low)) for number in items]


def _interpolate(a: MemoryTimeline, b: MemoryTimeline, t: float) -> MemoryTimeline:
    """What a course is at `t` that is `a` at 0 and `b` at 1."""
    return {
        moment: (alive + t * (b[moment][0] - alive), wide + t * (b[moment][1] - wide))
        for moment, (alive, wide) in a.items()
    }


def _choose_terms(task: Task) -> Any:
    """The loss in the middle of its course."""
    return task.loss_weights(int(task.train.attention_anneal_fraction * task.train.max_steps / 2))


def _simulate(
    task: Task, shape: DenoiserConfig, dtype: torch.dtype, items: int, layers: int
) -> MemoryTimeline:
    """A part of a step of so many items, forward and backward, run with so many layers and told of all."""
    part, terms = task.sample_microbatch(shape, items), _choose_terms(task)
    root = _build_objective(task, shape, dtype, layers)
    counts = task.count_microbatch(part, terms)
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
        with StepMemoryTracker(root, shape.num_hidden_layers - layers) as alive:
            with make_autocast("cpu", dtype):
                loss, _ = root(part, counts, terms)
            alive.enter("backward of the loss")
            loss.backward()
    alive.enter("end")
    return alive.timeline | {MOVED_BYTES_KEY: (alive.bytes_moved + alive.bytes_moved_by_more, 0)}


def _build_objective(task: Task, shape: DenoiserConfig, dtype: torch.dtype, layers: int) -> Any:
    """The task's loss around a denoiser of so many layers on the meta device, in a run's dtypes."""
    train, shape = task.train, replace(shape, num_hidden_layers=layers)
    denoiser = build_meta_denoiser(shape, train.lora_rank, dtype)
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
    """Bytes alive at each moment of a step, under names that hold for any number of layers and items.

    A moment is where the step is (a layer, forward or backward, of a call) and how many storages were made
    there before. The loss takes more operators the more items there are: it is one moment, at its highest.
    With more layers than run, the middle ones have no moments: theirs lie between others.
    """

    def __init__(self, root: Any, more: int) -> None:
        """root: a task's objective, whose denoisers are watched. more: layers that are told of, not run."""
        super().__init__(root.denoiser.config.vocab_size)
        self.timeline: MemoryTimeline = {}
        self.bytes_moved_by_more, self._more, self._moved_before = 0, more, 0
        self._made_by = {EARLY: 0, LATE: 0}  # bytes alive
        self._at: tuple[str | int, ...] = ("before",)
        self._made = self._calls = 0
        for denoiser in root.modules():
            if isinstance(denoiser, Denoiser):
                denoiser.norm.register_forward_pre_hook(lambda *_: self.enter("loss"))
                even = _count_uneven_layers(denoiser.config)
                for number, layer in enumerate(denoiser.layers):
                    name = number if number <= even else number - len(denoiser.layers)
                    layer.register_forward_pre_hook(partial(self._enter_layer, name))
                    layer.register_forward_hook(partial(self._watch_gradient, name))

    def enter(self, *at: str | int) -> None:
        if "backward" in str(at[0]) or "backward" not in str(self._at[0]):  # checkpoints run forward again
            if self._at[-1] == EARLY:
                self.bytes_moved_by_more += self._more * (self.bytes_moved - self._moved_before)
            self._at, self._made, self._moved_before = at, 0, self.bytes_moved

    def track_tensor(self, tensor: Tensor) -> None:
        before, layer = self.live_bytes, self._at[-1]
        super().track_tensor(tensor)
        self._made += 1
        if layer in (EARLY, LATE) and self._more:
            size = self.live_bytes - before
            self._made_by[layer] += size
            weakref.finalize(tensor.untyped_storage(), self._forget, layer, size)
            return
        above = self._at[0] == "backward" and layer not in range(-TAIL_LAYERS, 0)  # and the middle is done
        alive = self.live_bytes + self._more * self._made_by[LATE if above else EARLY]
        moment = self._at if "loss" in str(self._at[0]) else (*self._at, self._made)
        self.timeline[moment] = max(self.timeline.get(moment, (0, 0)), (alive, self._wide_now))

    def _forget(self, layer: int, size: int) -> None:
        self._made_by[layer] -= size

    def _enter_layer(self, name: int, *_: Any) -> None:
        self._calls += name == 0
        self.enter("forward", self._calls, name)

    def _watch_gradient(self, name: int, layer: Any, given: Any, found: tuple[Tensor, ...]) -> None:
        if found[0].requires_grad:
            at = ("backward", *self._at[1:2], name)
            found[0].register_hook(lambda _: self.enter(*at))


def _count_uneven_layers(shape: DenoiserConfig) -> int:
    """How many layers at the beginning are not as those after them: the very first, and dense ones."""
    return 1 if shape.experts is None else max(1, shape.dense_layers)
