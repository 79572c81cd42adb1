"""How far the plan is off: predicted peaks and FLOPs against what torch measures, on a CPU.

    python profiling/bench_plan_accuracy.py [KEY=VALUE ...]
    torchrun --nproc-per-node 2 profiling/bench_plan_accuracy.py    # in shards

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

from dlm_rag.cli import run_program
from dlm_rag.commands.cli_args import parse_command_line
from dlm_rag.config import load_config
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.phase_setup import open_trainer
from dlm_rag.training.planning.plan import (
    ROLLOUT_EXTRA_KEY,
    count_forward_flops,
    plan_phases,
)

SINGLE_PROCESS = DistributedContext(0, 1, 0)
BASE_SETTINGS = [
    "train.hidden_size=128", "train.num_hidden_layers=4", "train.vocab_size=2000",
    "train.passage_sets_per_step=1", "train.prompts_per_step=1",
    "train.rows_per_set=8", "train.num_generations=8", "train.world_passages=100", "train.worlds=1",
    "train.eval_questions=1",
    "train.optimizer=adamw", "train.pointer_loss_weight=0", "train.final_pointer_loss_weight=0",
    "decode.max_new_tokens=120", "retrieval.top_k=3",
]  # fmt: skip
PRETRAIN_SETTINGS = ["train.objective=pretrain", "train.sequence_length=1024", "train.batch_tokens=1024"]
# Of which the plan runs five layers at most, and as few items as it can.
MORE_LAYERS_SETTINGS = ["train.num_hidden_layers=7", "train.logit_chunk=64"]
RL_SETTINGS = [
    "model.path=dlm_rag/shipped/whole", "train.objective=rl", "train.trainable=all",
    "train.num_generations=2",
    "train.train_steps_per_rollout=2", "train.pointer_loss_weight=null",
    "train.final_pointer_loss_weight=null",
]  # fmt: skip
PLAN_CASES = {
    "sft, independent": [],
    "sft, joint": ["model.evidence_layout=joint"],
    "sft, checkpointing full": ["train.activation_checkpointing=full"],
    "sft, checkpointing selective": ["train.activation_checkpointing=selective"],
    "sft, second of two parts": [
        "train.passage_sets_per_step=2",
        "train.prompts_per_step=2",
        "train.gradient_accumulation_steps=2",
    ],
    "pretrain": PRETRAIN_SETTINGS,
    "pretrain, 64 logits at a time": [*PRETRAIN_SETTINGS, "train.logit_chunk=64"],
    "sft, more layers and sets": [
        "train.passage_sets_per_step=3",
        "train.prompts_per_step=3",
        *MORE_LAYERS_SETTINGS,
    ],
    "pretrain, more layers and rows": [
        *PRETRAIN_SETTINGS,
        "train.batch_tokens=3072",
        *MORE_LAYERS_SETTINGS,
    ],
    "rl": [*RL_SETTINGS, "train.prompts_per_step=3", "train.logit_chunk=64"],
    "rl, with a reference": [
        *RL_SETTINGS,
        "train.passage_sets_per_step=3",
        "train.prompts_per_step=3",
        "train.logit_chunk=64",
        "train.kl_coef=0.1",
    ],
}


@dataclass(frozen=True)
class PlanComparison:
    """Of the last part of a step on a device: bytes beyond the weights at the peak; FLOPs."""

    predicted_bytes: float
    measured_bytes: float
    predicted_flops: float
    measured_flops: float  # what backward computes again is in here


def measure_planned_step(
    words: list[str], processes: DistributedContext = SINGLE_PROCESS
) -> PlanComparison:
    """Plans and takes a step with these settings; several processes have a part each, in shards."""
    count = processes.world_size
    config = load_config(None, words)
    if count > 1:
        items = count * config.train.gradient_accumulation_steps
        tokens = items * config.train.sequence_length
        shared = [
            f"train.passage_sets_per_step={items}",
            f"train.prompts_per_step={items}",
            f"train.batch_tokens={tokens}",
            f"plan.devices={count}",
        ]
        config = load_config(None, [*words, *shared, "train.parallel=fsdp"])
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = open_trainer(config, Path(folder), processes)
    shape = trainer.origin.config
    (plan,) = plan_phases(config, shape, trainer.dtype)
    part = trainer.task.sample_microbatch(shape, plan.microbatch_items)
    terms = trainer.task.loss_weights(0)
    counts = trainer.task.count_microbatch(part, terms)

    def step() -> None:
        with trainer.autocast():
            loss, _ = trainer.root(part, counts, terms)
        loss.backward()

    flops = measure_flops(step) if count == 1 else math.nan
    held = 0.0
    if count > 1:
        step()
        held = plan.bytes_per_device()["gradients"]
    elif config.train.gradient_accumulation_steps > 1:
        held = plan.memory.gradients
    else:
        trainer.denoiser.zero_grad(set_to_none=True)
    examples = trainer.task.sample_examples(shape, plan.microbatch_items)
    work = count_forward_flops(shape, examples, trainer.task.layout(shape))
    held_all_along = ("weights", "reference", "optimizer", ROLLOUT_EXTRA_KEY)
    return PlanComparison(
        predicted_bytes=sum(n for name, n in plan.bytes_per_device().items() if name not in held_all_along),
        measured_bytes=held + measure_peak_bytes(step),
        predicted_flops=work.flops_with_backward(frozen=False)
        + (work.flops if plan.memory.reference else 0),
        measured_flops=flops,
    )


def measure_peak_bytes(call: Callable[[], Any]) -> int:
    """Bytes that the CPU allocator held at most during a call, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    now = peak = 0
    events: Any = recorded.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def measure_flops(call: Callable[[], Any]) -> float:
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
    words = parse_command_line(__doc__ or "", argv, typed=False)
    processes = DistributedContext.init()
    headings = ["predicted MB", "measured MB", ""]
    if processes.world_size == 1:
        headings += ["GFLOP", "torch", ""]
    table = Table("a step", *(Column(h, justify="right") for h in headings))
    for name, settings in PLAN_CASES.items():
        found = measure_planned_step([*BASE_SETTINGS, *settings, *words.settings], processes)
        cells = format_comparison(found.predicted_bytes / 1e6, found.measured_bytes / 1e6)
        if processes.world_size == 1:
            cells += format_comparison(found.predicted_flops / 1e9, found.measured_flops / 1e9)
        table.add_row(name, *cells)
    if processes.is_main:
        Console(width=None if sys.stdout.isatty() else 100).print(table)
    processes.destroy()


def format_comparison(predicted: float, measured: float) -> list[str]:
    return [f"{predicted:.1f}", f"{measured:.1f}", f"{predicted / measured - 1:+.1%}"]


if __name__ == "__main__":
    run_program(main)
