"""Run under torchrun by test_parallel.py: the same few steps in several ways; writes what came out.

torchrun --nproc-per-node 2 tests/support/torchrun_training_cases.py FOLDER [SUBFOLDER/]CASE...
"""

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dlm_rag.cli import exit_rank
from dlm_rag.config import load_config
from dlm_rag.training.distributed import DistributedContext, get_local
from dlm_rag.training.rl import RolloutBuffer
from dlm_rag.training.task import Validation
from dlm_rag.training.trainer import Trainer, open_trainer

STEPS = 4
FRESH = ["train.hidden_size=64", "train.num_hidden_layers=2", "train.vocab_size=400"]
WORLDS = ["train.world_passages=100", "train.eval_questions=1"]
SHAPE = [
    "train.max_steps=4", "train.warmup_steps=0",
    "decode.max_new_tokens=48", "retrieval.top_k=3", "train.optimizer=adamw", "train.learning_rate=0.001",
]  # fmt: skip
SFT = [*FRESH, *WORLDS, *SHAPE, "train.passage_sets_per_step=4", "train.rows_per_set=4"]
RL = [
    *WORLDS, *SHAPE, "train.objective=rl", "train.prompts_per_step=4", "train.num_generations=4",
    "decode.commit_rule=threshold", "decode.commit_threshold=0.05", "decode.gate_temperature=2",
    "train.max_hops=1", "train.reward=forwards", "train.train_steps_per_rollout=2",
    "model.path={checkpoint}", "train.passage_length=96",
]  # fmt: skip
# Nothing is learned from questions with an odd number: of two processes one is left without rows.
ROWS_ON_ONE = {
    "sharded, accumulated, checkpointed": [
        "train.gradient_accumulation_steps=2", "train.activation_checkpointing=full",
    ],
    "sharded, blocks": [
        "model.block_size=8", "model.evidence_layout=independent",
        "decode.finished_block_context=no_evidence",
    ],
}  # fmt: skip
SHARDED = [*RL, "train.parallel=fsdp"]
PRETRAIN = [
    *FRESH, *SHAPE, "train.world_passages=100", "train.objective=pretrain",
    "train.sequence_length=96", "train.batch_tokens=384",
]  # fmt: skip
BFLOAT16 = "train.dtype=bfloat16"
ADAPTERS = [*SFT, BFLOAT16, "train.lora_rank=4", "model.path={checkpoint}", "train.passage_length=96"]
# Three questions, one after another: two for the first process, one for the second.
UNEVEN = [*SFT, "train.parallel=fsdp", "train.max_hops=3", "decode.batch_size=1"]
TRAINING_CASES = {
    "sft": SFT,
    "sft sharded": [*SFT, "train.parallel=fsdp"],
    "sft sharded, accumulated, checkpointed": [
        *SFT, "train.parallel=fsdp", "train.gradient_accumulation_steps=2",
        "train.activation_checkpointing=full",
    ],
    "sft bfloat16": [*SFT, BFLOAT16],
    "sft bfloat16 sharded": [*SFT, BFLOAT16, "train.parallel=fsdp"],
    "adapters": ADAPTERS,
    "adapters sharded": [*ADAPTERS, "train.parallel=fsdp"],
    "uneven, searches fail on one": UNEVEN,
    "rl": RL,
    "rl sharded": [*RL, "train.parallel=fsdp"],
    **{f"rl {kind}, rows on one": [*SHARDED, *words] for kind, words in ROWS_ON_ONE.items()},
    "pretrain": PRETRAIN,
    "pretrain sharded, checkpointed": [
        *PRETRAIN, "train.parallel=fsdp", "train.activation_checkpointing=full"
    ],
    "sft float16, overflows on one": [*SFT, "train.dtype=float16"],
}  # fmt: skip


def make_case_trainer(case: str, folder: Path, processes: DistributedContext) -> tuple[Trainer, Validation]:
    checkpoint = (folder.parent / "checkpoint").resolve()
    words = [word.format(checkpoint=checkpoint) for word in TRAINING_CASES[case]]
    trainer, validation = open_trainer(load_config(None, words), folder, processes)
    if "overflows" in case and processes.rank == processes.world_size - 1:
        weight = trainer.denoiser.layers[0].self_attn.q_proj.weight
        weight.register_hook(lambda slope: slope * (math.inf if trainer.state.step == 1 else 1.0))
    if "searches fail" in case and processes.rank == 1:
        validation._retriever = FailingRetriever(validation._retriever)
    if "rows on one" in case:
        task: Any = trainer.task
        task.make_batch = partial(keep_even_questions, task.make_batch)
    return trainer, validation


def keep_even_questions(make, step: int, items, state):
    """The rollouts of a step, of which those of every second question are learned from."""
    even, odd = (make(step, [n for n in items if n % 2 == rest], state) for rest in (0, 1))
    return RolloutBuffer({name: even.sums[name] + odd.sums[name] for name in even.sums}, even.rows)


class FailingRetriever:
    """A retriever whose server is down."""

    def __init__(self, inner) -> None:
        self._inner = inner

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def search(self, queries):
        raise ConnectionError("no route to host")


def run_training_case(case: str, folder: Path, processes: DistributedContext) -> dict:
    """Steps, a checkpoint in the middle, the validation at the end; then the second half once more."""
    trainer, validation = make_case_trainer(case, folder, processes)
    found = {"loss": [], "norm": []}
    if trainer.restore():
        found["from"] = trainer.state.step
    while not trainer.finished:
        metrics = trainer.step()
        found["loss"].append(metrics["loss"])
        found["norm"].append(metrics["gradient_norm"])
        if trainer.state.step == STEPS // 2:
            trainer.save()
    (found["flops"],) = processes.all_reduce_sum([trainer.flops])
    found["scores"] = validation.compute_scores(trainer)
    trainer.export(folder / "model", torch.float32)
    if "from" not in found:
        again, _ = make_case_trainer(case, folder, processes)
        again.restore()
        found["again"] = [again.step()["loss"] for _ in range(STEPS // 2)]
        pairs = zip(again.denoiser.parameters(), trainer.denoiser.parameters(), strict=True)
        found["same"] = not processes.any_rank(
            not all(torch.equal(*map(get_local, pair)) for pair in pairs)
        )
    return found


def main() -> None:
    root, *cases = sys.argv[1:]
    processes = DistributedContext.init()
    torch.set_num_threads(1)
    for case in cases:
        found = run_training_case(Path(case).name, Path(root, case), processes)
        if processes.is_main:
            Path(root, case, "found.json").write_text(json.dumps(found))
            print(case, found["loss"], found["norm"], flush=True)
        processes.barrier()
    processes.destroy()
    exit_rank()


if __name__ == "__main__":
    main()
