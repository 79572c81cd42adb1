"""How far the plan is off: predicted peaks and FLOPs against what torch measures, on a CPU.

    python profiling/bench_plan.py [KEY=VALUE ...]
    torchrun --nproc-per-node 2 profiling/bench_plan.py    # in shards

Measured bytes are those that the CPU allocator held at most in forward and backward of one part of a step,
as torch.profiler reports them; measured FLOPs are those of torch's own counter. On a GPU the step is the
same, its workspaces and kernels are not: there compare `memory_gib` of metrics.jsonl with --plan.
"""

import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from dlm_rag.commands.words import parse
from dlm_rag.config import load_config
from dlm_rag.program import run
from dlm_rag.training.phase import open_trainer
from dlm_rag.training.plan import BEYOND, forward_work, plan_phases, sample_items, sample_part
from dlm_rag.training.processes import Processes

ALONE = Processes(0, 1, 0)
SHAPE = [
    "train.hidden_size=128", "train.num_hidden_layers=4", "train.vocabulary=2000", "train.groups=1",
    "train.rows=8", "train.world_passages=100", "train.worlds=1", "train.validation_questions=1",
    "train.optimizer=adamw", "train.pointer_weight=0", "train.late_pointer_weight=0",
    "decode.canvas_length=120", "retrieval.top_k=3",
]  # fmt: skip
LONG = ["train.objective=pretrain", "train.sequence_length=1024", "train.batch_tokens=1024"]
# Of which the plan runs five layers at most, and as few items as it can.
MORE = ["train.num_hidden_layers=7", "train.logit_chunk=64"]
RL = [
    "model.path=dlm_rag/shipped/whole", "train.objective=rl", "train.learn=all", "train.rows=2",
    "train.steps_of_rollout=2", "train.pointer_weight=null", "train.late_pointer_weight=null",
]  # fmt: skip
WAYS = {
    "sft, independent": [],
    "sft, joint": ["model.evidence_layout=joint"],
    "sft, checkpointing full": ["train.checkpointing=full"],
    "sft, checkpointing selective": ["train.checkpointing=selective"],
    "sft, second of two parts": ["train.groups=2", "train.accumulate=2"],
    "pretrain": LONG,
    "pretrain, 64 logits at a time": [*LONG, "train.logit_chunk=64"],
    "sft, more layers and sets": ["train.groups=3", *MORE],
    "pretrain, more layers and rows": [*LONG, "train.batch_tokens=3072", *MORE],
    "rl": [*RL, "train.groups=3", "train.logit_chunk=64"],
    "rl, with a reference": [*RL, "train.groups=3", "train.logit_chunk=64", "train.kl_weight=0.1"],
}


@dataclass(frozen=True)
class Found:
    """Of the last part of a step on a device: bytes beyond the weights at the peak; FLOPs."""

    predicted_bytes: float
    measured_bytes: float
    predicted_flops: float
    measured_flops: float  # what backward computes again is in here


def measure(words: list[str], processes: Processes = ALONE) -> Found:
    """Plans and takes a step with these settings; several processes have a part each, in shards."""
    count = processes.count
    config = load_config(None, words)
    if count > 1:
        items = count * config.train.accumulate
        tokens = items * config.train.sequence_length
        shared = [f"train.groups={items}", f"train.batch_tokens={tokens}", f"plan.devices={count}"]
        config = load_config(None, [*words, *shared, "train.parallel=fsdp"])
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = open_trainer(config, Path(folder), processes)
    shape = trainer.origin.config
    (plan,) = plan_phases(config, shape, trainer.dtype)
    part, terms = sample_part(config, config.train, shape, plan.part), trainer.task.terms(0)
    counts = trainer.task.counts(part, terms)

    def step() -> None:
        with trainer.arithmetic():
            loss, _ = trainer.root(part, counts, terms)
        loss.backward()

    flops = flops_of(step) if count == 1 else math.nan
    held = 0.0
    if count > 1:
        step()
        held = plan.bytes()["gradients"]
    elif config.train.accumulate > 1:
        held = plan.memory.gradients
    else:
        trainer.denoiser.zero_grad(set_to_none=True)
    layout = "joint" if config.train.objective == "pretrain" else shape.evidence_layout
    examples = sample_items(config, config.train, shape, plan.part)
    work = forward_work(shape, examples, layout)
    held_all_along = ("weights", "reference", "optimizer", BEYOND)
    return Found(
        predicted_bytes=sum(n for name, n in plan.bytes().items() if name not in held_all_along),
        measured_bytes=held + peak_of(step),
        predicted_flops=work.with_backward(frozen=False) + (work.flops if plan.memory.reference else 0),
        measured_flops=flops,
    )


def peak_of(call: Callable[[], Any]) -> int:
    """Bytes that the CPU allocator held at most during a call, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    now = peak = 0
    events: Any = recorded.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def flops_of(call: Callable[[], Any]) -> float:
    """FLOPs of a call by torch's counter, which must be told of the CPU's attention."""
    aten: Any = torch.ops.aten
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda slope, q, k, v, *_, **__: sdpa_backward_flop_count(slope, q, k, v)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        call()
    return float(counter.get_total_flops())


def main(argv: list[str]) -> None:
    words = parse(__doc__ or "", argv, typed=False)
    processes = Processes.join()
    headings = ["predicted MB", "measured MB", ""]
    if processes.count == 1:
        headings += ["GFLOP", "torch", ""]
    table = Table("a step", *(Column(h, justify="right") for h in headings))
    for name, settings in WAYS.items():
        found = measure([*SHAPE, *settings, *words.settings], processes)
        cells = compared(found.predicted_bytes / 1e6, found.measured_bytes / 1e6)
        if processes.count == 1:
            cells += compared(found.predicted_flops / 1e9, found.measured_flops / 1e9)
        table.add_row(name, *cells)
    if processes.first:
        Console(width=None if sys.stdout.isatty() else 100).print(table)
    processes.leave()


def compared(predicted: float, measured: float) -> list[str]:
    return [f"{predicted:.1f}", f"{measured:.1f}", f"{predicted / measured - 1:+.1%}"]


if __name__ == "__main__":
    run(main)
