"""Bytes that a training step holds at its peak, found by running it on tensors without contents.

torch's own MemTracker stops at frozen weights and takes ten times as long for 32 layers (docs/log.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dlm_rag.config import TrainConfig
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.live import LiveBytes, without_contents
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.model.sharing import SequenceShare
from dlm_rag.training.objective import Objective, Terms, arithmetic, counts_of
from dlm_rag.training.optimizers import make_optimizers
from dlm_rag.training.rows.example import Example
from dlm_rag.training.weights import add_adapters

FLOAT32 = 4  # bytes: weights under training, their gradients, what an optimizer keeps


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device that holds everything, for one part of a step."""

    weights: int
    gradients: int  # of what is trained
    optimizer: int
    activations: int  # what comes on top at the peak of forward and backward, in any part of a step
    logits: int  # so much of it
    moved: int  # read and written in forward and backward, operator by operator
    parameters: int
    trained: int


def step_memory(
    shape: DenoiserConfig, train: TrainConfig, layout: str, examples: Sequence[Example], dtype: torch.dtype
) -> StepMemory:
    """What one part of a step needs, with the arithmetic in `dtype`; nothing is allocated.

    Of shared sequences: what one of the processes needs that share them. Of heads: the frozen weights; what
    rollouts need beside them is the pool's to say.
    """
    if train.learn == "heads":
        with torch.device("meta"):
            numbers = sum(p.numel() for p in Denoiser(shape).parameters())
        return StepMemory(dtype.itemsize * numbers, 0, 0, 0, 0, 0, numbers, 0)
    count = train.context_parallel
    share = SequenceShare(0, count, group=None) if count > 1 else None
    with FakeTensorMode(allow_non_fake_inputs=True):
        gathered = dtype if train.parallel == "fsdp" else torch.float32
        denoiser = bare_denoiser(shape, train.lora_rank, frozen=dtype, trained=gathered)
        denoiser.checkpointing = train.checkpointing
        objective = Objective(denoiser, layout, frozenset({0}), train.logit_chunk, share)
        counts = counts_of(examples, frozenset(), 1.0)
        # The gradients of earlier parts are there from the start; so are shards of them, which never grow.
        there = train.accumulate > 1 or train.parallel == "fsdp"
        for parameter in denoiser.parameters():
            if there and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        with LiveBytes(shape.vocab_size) as alive:
            with arithmetic("cpu", dtype):
                loss, _ = objective(examples, counts, Terms())
            loss.backward()
    parameters = list(denoiser.parameters())
    trained = [p for p in parameters if p.requires_grad]
    gradients = FLOAT32 * sum(p.numel() for p in trained)
    return StepMemory(
        weights=gradients + dtype.itemsize * sum(p.numel() for p in parameters if not p.requires_grad),
        gradients=gradients,
        optimizer=optimizer_bytes(denoiser, train),
        # Else the peak falls into backward, when some of them are there; they are counted by themselves.
        activations=alive.peak if there else max(0, alive.peak - gradients),
        logits=alive.wide_at_peak,
        moved=alive.moved,
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in trained),
    )


def bare_denoiser(
    shape: DenoiserConfig, lora_rank: int, frozen: torch.dtype, trained: torch.dtype
) -> Denoiser:
    """A denoiser in these dtypes, whose weights have no contents in a fake tensor mode."""
    with torch.device("meta"):
        denoiser = Denoiser(shape)
        if lora_rank:
            add_adapters(denoiser, lora_rank)
    return without_contents(denoiser, frozen, trained)


def optimizer_bytes(denoiser: Denoiser, train: TrainConfig) -> int:
    """AdamW keeps two numbers for each trained weight, Muon one, in float32."""
    total = 0
    for optimizer in make_optimizers(denoiser, train):
        kept = 1 if isinstance(optimizer, torch.optim.Muon) else 2
        for group in optimizer.param_groups:
            total += sum(kept * FLOAT32 * p.numel() for p in group["params"])
    return total
