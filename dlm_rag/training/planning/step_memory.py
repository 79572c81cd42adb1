"""Bytes that a training step holds at its peak, found by running it on tensors without contents.

Neither all layers nor all items are run. The bytes alive at any moment of a step grow evenly with both, so
two depths and two numbers of items tell what they are for others, and the peak is the largest of them,
whichever moment it is at then.

torch's own MemTracker stops at frozen weights and takes ten times as long for 32 layers (docs/log.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
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
TAIL_LAYERS = 2  # layers: the last is spared what nobody reads, and the one before is as all others
MIN_LOGIT_CHUNKS = 2  # of logits from which on the loss grows evenly with items
MOVED_BYTES_KEY = ("moved",)
StepMoment = tuple[str | int, ...]
MemoryTimeline = dict[StepMoment, tuple[float, float]]  # bytes alive, and those of logits among them


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
    trained: int
    activations_per_item: float  # activations that another item adds


@dataclass(frozen=True)
class StepMemoryEstimator:
    """A step of training that is not taken, with the arithmetic in `dtype`; nothing is allocated."""

    task: Task
    shape: DenoiserConfig
    train: TrainConfig
    dtype: torch.dtype

    def estimate(self, items: int) -> StepMemory:
        """What a part of `items` items needs.

        Of shared sequences: what one of the processes needs that share them. Of heads: the weights alone,
        for no layer is run.
        """
        train, root = self.train, self._objective(self.shape.num_hidden_layers)
        parameters = list(root.denoiser.parameters())
        trained = [p for p in parameters if p.requires_grad]
        gradients = FLOAT32_BYTES * sum(p.numel() for p in trained)
        reference = getattr(root, "reference", None)
        pairs = [] if reference is None else zip(parameters, reference.parameters(), strict=True)
        peak = logits = moved = per_item = 0.0
        if self.task.runs_denoiser:
            other = items // 2 or 2
            course, less = self._timelines((items, other), root.logit_chunk)
            (moved, _), _ = course.pop(MOVED_BYTES_KEY), less.pop(MOVED_BYTES_KEY)
            (peak, logits), (lower, _) = max(course.values()), max(less.values())
            per_item = max(0.0, (peak - lower) / (items - other))
        # Gradients are counted by themselves; those of earlier parts are not in the peak, others are.
        activations = peak if self._accumulates else max(0.0, peak - gradients)
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
            trained=sum(p.numel() for p in trained),
            activations_per_item=per_item,
        )

    @property
    def _accumulates(self) -> bool:
        """Whether gradients of earlier parts are there from the start; shards of them never grow either."""
        return self.train.gradient_accumulation_steps > 1 or self.train.parallel == "fsdp"

    def _timelines(self, items: Sequence[int], chunk: int) -> list[MemoryTimeline]:
        """The courses of parts of so many items, from runs of as few layers and items as tell of them.

        chunk: positions whose logits are there at a time.
        """
        terms = self.task.loss_weights(int(self.train.attention_anneal_fraction * self.train.max_steps / 2))
        each = self.task.count_microbatch(self.task.sample_microbatch(self.shape, 1), terms)["supervised"]
        few = math.ceil(MIN_LOGIT_CHUNKS * chunk * self.train.context_parallel / each)
        counts = items if max(items) <= 2 * few else (few, 2 * few)
        layers, least = self.shape.num_hidden_layers, _count_uneven_layers(self.shape) + 1 + TAIL_LAYERS
        depths = [layers] if layers <= least + 1 else [least, least + 1]
        found = []
        with report_progress("planning a step", len(counts) * len(depths)) as advance:
            for count in counts:
                part, runs = self.task.sample_microbatch(self.shape, count), []
                for depth in depths:
                    runs.append(self._simulate(part, terms, depth))
                    advance(1)
                found.append(_interpolate_timelines(runs[0], runs[-1], (layers - least) * (len(runs) - 1)))
        (a, b), (low, high) = found, counts
        return [_interpolate_timelines(a, b, (count - low) / (high - low)) for count in items]

    def _simulate(self, part: Any, terms: Any, layers: int) -> MemoryTimeline:
        """A part of a step, forward and backward."""
        root, counts = self._objective(layers), self.task.count_microbatch(part, terms)
        if self.train.parallel == "fsdp":  # as weights are gathered
            for parameter in root.parameters():
                parameter.data = parameter.data.to(self.dtype)
        with FakeTensorMode(allow_non_fake_inputs=True):
            for denoiser in root.modules():
                if isinstance(denoiser, Denoiser):
                    replace_with_empty_weights(denoiser)
            for parameter in root.parameters():
                if parameter.requires_grad and self._accumulates:
                    parameter.grad = torch.zeros_like(parameter)
            with StepMemoryTracker(root, self.shape) as alive:
                with make_autocast("cpu", self.dtype):
                    loss, _ = root(part, counts, terms)
                alive.begin_backward()
                loss.backward()
        return alive.course | {MOVED_BYTES_KEY: (alive.bytes_moved, 0)}

    def _objective(self, layers: int) -> Any:
        """The task's loss around a denoiser of so many layers on the meta device, in a run's dtypes."""
        train, shape = self.train, replace(self.shape, num_hidden_layers=layers)
        denoiser = build_meta_denoiser(
            shape, train.lora_rank, self.dtype, train.trainable == "policy_heads"
        )
        denoiser.activation_checkpointing = train.activation_checkpointing
        count = train.context_parallel
        return self.task.objective(denoiser, ContextParallel(0, count, group=None) if count > 1 else None)


def count_optimizer_bytes(denoiser: Denoiser, train: TrainConfig) -> int:
    """AdamW keeps two numbers for each trained weight, Muon one, in float32."""
    total = 0
    for optimizer in make_optimizers(denoiser, train):
        kept = 1 if isinstance(optimizer, torch.optim.Muon) else 2
        for group in optimizer.param_groups:
            total += sum(kept * FLOAT32_BYTES * p.numel() for p in group["params"])
    return total


class StepMemoryTracker(MemoryTracker):
    """Bytes alive at each moment of a step, under names that hold for any number of layers and items.

    A moment is where the step is (a layer, forward or backward, of a call) and how many storages were made
    there before. The loss takes more operators the more items there are: it is one moment, at its highest.
    """

    def __init__(self, root: nn.Module, shape: DenoiserConfig) -> None:
        """root: a task's objective, whose denoisers are watched."""
        super().__init__(shape.vocab_size)
        self.course: MemoryTimeline = {}
        self._at: StepMoment = ("before",)
        self._made = self._calls = 0
        self._turned = False
        for denoiser in root.modules():
            if isinstance(denoiser, Denoiser):
                denoiser.norm.register_forward_pre_hook(lambda *_: self._enter("loss"))
                for number, block in enumerate(denoiser.layers):
                    name = (
                        number if number <= _count_uneven_layers(shape) else number - len(denoiser.layers)
                    )
                    block.register_forward_pre_hook(partial(self._before, name))
                    block.register_forward_hook(partial(self._after, name))

    def begin_backward(self) -> None:
        """Forward has ended, and backward begins."""
        self._turned = True
        self._enter("backward of the loss")

    def track_tensor(self, tensor: Tensor) -> None:
        super().track_tensor(tensor)
        self._made += 1
        moment = self._at if "loss" in str(self._at[0]) else (*self._at, self._made)
        self.course[moment] = max(self.course.get(moment, (0, 0)), (self.live_bytes, self._wide_now))

    def _before(self, name: int, *_: Any) -> None:
        self._calls += name == 0 and not self._turned
        self._enter("forward", self._calls, name)

    def _after(self, name: int, *passed: Any) -> None:
        call, out = self._calls, passed[-1][0]
        if out.requires_grad:
            out.register_hook(lambda _: self._enter("backward", call, name))

    def _enter(self, *at: str | int) -> None:
        if not self._turned or "backward" in str(at[0]):  # else checkpointing computes it again
            self._at, self._made = at, 0


def _count_uneven_layers(shape: DenoiserConfig) -> int:
    """How many layers at the beginning are not as those after them: the very first, and dense ones."""
    return 1 if shape.experts is None else max(1, shape.dense_layers)


def _interpolate_timelines(a: MemoryTimeline, b: MemoryTimeline, t: float) -> MemoryTimeline:
    """What a course is at `t` that is `a` at 0 and `b` at 1; moments of b alone lie between others."""
    return {
        moment: (alive + t * (b[moment][0] - alive), wide + t * (b[moment][1] - wide))
        for moment, (alive, wide) in a.items()
    }
