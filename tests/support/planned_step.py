"""The peak memory and FLOPs of one training step, planned and measured on a CPU."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from dlm_rag.config import load_config
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.plan import ROLLOUT_EXTRA_KEY, plan_training
from dlm_rag.training.trainer import make_autocast, open_trainer

SINGLE_PROCESS = DistributedContext(0, 1, 0)
BASE_SETTINGS = [
    "train.hidden_size=128", "train.num_hidden_layers=4", "train.vocab_size=2000", "train.rows_per_set=8",
    "train.passage_sets_per_step=1", "train.prompts_per_step=1", "train.num_generations=8",
    "train.world_passages=100", "train.eval_questions=1", "train.optimizer=adamw",
    "train.pointer_loss_weight=0", "decode.max_new_tokens=120", "retrieval.top_k=3",
]  # fmt: skip
PRETRAIN_SETTINGS = ["train.objective=pretrain", "train.sequence_length=1024", "train.batch_tokens=1024"]
RL_SETTINGS = [
    "model.path=dlm_rag/shipped/whole", "train.objective=rl",
    "train.num_generations=2", "train.train_steps_per_rollout=2", "train.pointer_loss_weight=null",
]  # fmt: skip
TWO_PARTS_SETTINGS = ["train.passage_sets_per_step=2", "train.prompts_per_step=2"]
PLAN_CASES = {
    "sft, independent": [],
    "sft, checkpointing selective": ["train.activation_checkpointing=selective"],
    "sft, second of two parts": [*TWO_PARTS_SETTINGS, "train.gradient_accumulation_steps=2"],
    "pretrain": PRETRAIN_SETTINGS,
    "rl": [*RL_SETTINGS, "train.prompts_per_step=3"],
}  # fmt: skip


@dataclass(frozen=True)
class PlanComparison:
    """The last microbatch of a step on a device: bytes beyond the weights at the peak; FLOPs."""

    predicted_bytes: float
    measured_bytes: float
    predicted_flops: float
    measured_flops: float  # with what backward recomputes


def measure_planned_step(words: list[str]) -> PlanComparison:
    """Plans and takes a step with these settings."""
    config = load_config(None, words)
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = open_trainer(config, Path(folder), SINGLE_PROCESS)
    shape = trainer.origin.config
    plan = plan_training(config, shape, trainer.dtype)
    batch = trainer.task.sample_batch(plan.microbatch_items)

    def step() -> None:
        with make_autocast("cpu", trainer.dtype):
            loss, _ = trainer.root(batch, batch.counts)
        loss.backward()

    flops, held = measure_flops(step), 0.0
    if config.train.gradient_accumulation_steps > 1:
        held = plan.memory.gradients
    else:
        trainer.denoiser.zero_grad(set_to_none=True)
    work = plan.memory.forward
    held_all_along = ("weights", "optimizer", ROLLOUT_EXTRA_KEY)
    return PlanComparison(
        predicted_bytes=sum(n for name, n in plan.device_bytes.items() if name not in held_all_along),
        measured_bytes=held + measure_peak_bytes(step),
        predicted_flops=work.flops_with_backward(frozen=False),
        measured_flops=flops,
    )


def measure_peak_bytes(call: Callable[[], Any]) -> int:
    """Peak bytes of the CPU allocator during a call, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    now = peak = 0
    events: Any = recorded.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def measure_flops(call: Callable[[], Any]) -> float:
    """FLOPs of a call by torch's counter, which does not know the CPU's attention by itself."""
    aten: Any = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    attention = {
        forward: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda slope, q, k, v, *_, **__: sdpa_backward_flop_count(slope, q, k, v)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        call()
    return float(counter.get_total_flops())
