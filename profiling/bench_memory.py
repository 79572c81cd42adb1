"""Memory: how far the plan of a training step is off; what a prompt cache saves.

    python profiling/bench_memory.py plan [KEY=VALUE ...]
    torchrun --nproc-per-node 2 profiling/bench_memory.py plan       # in shards
    python profiling/bench_memory.py prefix FOLDER

plan: predicted peak bytes and FLOPs of one microbatch beside those of torch.profiler and torch's counter on
a CPU. On a GPU compare `memory_gib` of metrics.jsonl with --plan.
prefix: tokens that a causal encoder runs for an answer whose evidence changes, with the unchanged beginning
of each prompt kept. FOLDER has `corpus.jsonl` and `questions.jsonl` with `supporting_ids`. Queries are
scripted: after the question come more words of its supporting passages and its answer at each step
(`growing`), or a new sample of them (`flickering`). Tokens are bytes.
"""

import math
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_tools import TableRow, print_table, run_subcommand
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from dlm_rag.cli import CommandParser, run_program
from dlm_rag.commands.arguments import parse_command_line
from dlm_rag.config import load_config
from dlm_rag.decode.uniform_noise import PrefixKVCache
from dlm_rag.evidence.prompt_segments import order_by_arrival
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import CorpusRetriever
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import build_query
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.planning.plan import ROLLOUT_EXTRA_KEY, count_forward_flops, plan_phases
from dlm_rag.training.trainer import open_trainer

SINGLE_PROCESS = DistributedContext(0, 1, 0)
BASE_SETTINGS = [
    "train.hidden_size=128", "train.num_hidden_layers=4", "train.vocab_size=2000", "train.rows_per_set=8",
    "train.passage_sets_per_step=1", "train.prompts_per_step=1", "train.num_generations=8",
    "train.world_passages=100", "train.worlds=1", "train.eval_questions=1", "train.optimizer=adamw",
    "train.pointer_loss_weight=0", "train.final_pointer_loss_weight=0", "decode.max_new_tokens=120",
    "retrieval.top_k=3",
]  # fmt: skip
PRETRAIN_SETTINGS = ["train.objective=pretrain", "train.sequence_length=1024", "train.batch_tokens=1024"]
# Larger than what the plan itself runs (five layers at most, few items).
MORE_LAYERS_SETTINGS = ["train.num_hidden_layers=7", "train.logit_chunk=64"]
RL_SETTINGS = [
    "model.path=dlm_rag/shipped/whole", "train.objective=rl", "train.trainable=all",
    "train.num_generations=2", "train.train_steps_per_rollout=2", "train.pointer_loss_weight=null",
    "train.final_pointer_loss_weight=null",
]  # fmt: skip
TWO_PARTS_SETTINGS = ["train.passage_sets_per_step=2", "train.prompts_per_step=2"]
THREE_SETS_SETTINGS = ["train.passage_sets_per_step=3", "train.prompts_per_step=3"]
PLAN_CASES = {
    "sft, independent": [],
    "sft, both objectives": ["model.block_size=8", "train.causal_loss_weight=1"],
    "sft, joint": ["model.evidence_layout=joint"],
    "sft, checkpointing full": ["train.activation_checkpointing=full"],
    "sft, checkpointing selective": ["train.activation_checkpointing=selective"],
    "sft, second of two parts": [*TWO_PARTS_SETTINGS, "train.gradient_accumulation_steps=2"],
    "pretrain": PRETRAIN_SETTINGS,
    "pretrain, 64 logits at a time": [*PRETRAIN_SETTINGS, "train.logit_chunk=64"],
    "sft, more layers and sets": [*THREE_SETS_SETTINGS, *MORE_LAYERS_SETTINGS],
    "pretrain, more layers and rows": [
        *PRETRAIN_SETTINGS, "train.batch_tokens=3072", *MORE_LAYERS_SETTINGS
    ],
    "rl": [*RL_SETTINGS, "train.prompts_per_step=3", "train.logit_chunk=64"],
    "rl, with a reference": [
        *RL_SETTINGS, *THREE_SETS_SETTINGS, "train.logit_chunk=64", "train.kl_coef=0.1"
    ],
}  # fmt: skip


@dataclass(frozen=True)
class PlanComparison:
    """The last microbatch of a step on a device: bytes beyond the weights at the peak; FLOPs."""

    predicted_bytes: float
    measured_bytes: float
    predicted_flops: float
    measured_flops: float  # with what backward recomputes


def measure_planned_step(
    words: list[str], processes: DistributedContext = SINGLE_PROCESS
) -> PlanComparison:
    """Plans and takes a step with these settings; several processes take it in shards."""
    count = processes.world_size
    config = load_config(None, words)
    if count > 1:
        items = count * config.train.gradient_accumulation_steps
        tokens = items * config.train.sequence_length
        shared = [f"train.passage_sets_per_step={items}", f"train.prompts_per_step={items}"]
        shared += [f"train.batch_tokens={tokens}", f"plan.devices={count}"]
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
        held = plan.device_bytes["gradients"]
    elif config.train.gradient_accumulation_steps > 1:
        held = plan.memory.gradients
    else:
        trainer.denoiser.zero_grad(set_to_none=True)
    examples = trainer.task.sample_examples(shape, plan.microbatch_items)
    work = count_forward_flops(shape, examples, trainer.task.layout(shape))
    held_all_along = ("weights", "reference", "optimizer", ROLLOUT_EXTRA_KEY)
    return PlanComparison(
        predicted_bytes=sum(n for name, n in plan.device_bytes.items() if name not in held_all_along),
        measured_bytes=held + measure_peak_bytes(step),
        predicted_flops=work.flops_with_backward(frozen=False)
        + (work.flops if plan.memory.reference else 0),
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


def compare_plans(argv: list[str]) -> None:
    words = parse_command_line(__doc__ or "", argv, typed=False)
    processes, rows = DistributedContext.init(), []
    for name, settings in PLAN_CASES.items():
        found = measure_planned_step([*BASE_SETTINGS, *settings, *words.settings], processes)
        row: TableRow = {"a step": name}
        row |= {"predicted MB": found.predicted_bytes / 1e6, "measured MB": found.measured_bytes / 1e6}
        row["off, %"] = 100 * (found.predicted_bytes / found.measured_bytes - 1)
        if processes.world_size == 1:  # else torch counts nothing
            row |= {"GFLOP": found.predicted_flops / 1e9, "torch": found.measured_flops / 1e9}
            row["FLOPs off, %"] = 100 * (found.predicted_flops / found.measured_flops - 1)
        rows.append(row)
    if processes.is_main:
        print_table(rows)
    processes.destroy()


QueryScript = Callable[..., str]
PassageOrder = Callable[..., list[Passage]]
STEPS, QUESTIONS, TOP_K, WORDS = 16, 100, 7, 25  # WORDS: of each supporting passage
HEAD, TAIL = "Use ONLY the provided facts to answer the question.\nQuestion:\n{}\n\nFacts:\n", "<turn|>\n"


class CountingEncoder:
    """Stands for a model: one key and one value a token."""

    def extend_cache(self, kept, ids):  # type: ignore[no-untyped-def]
        held = kept[0][0].shape[2] if kept else 0
        return [(torch.zeros(1, 1, held + len(ids), 1),) * 2]


def growing(words: Sequence[str], step: int, draw: random.Random) -> str:
    return " ".join(words[: len(words) * step // STEPS])


def flickering(words: Sequence[str], step: int, draw: random.Random) -> str:
    return " ".join(word for word in words if draw.random() < step / STEPS)


def ranked(before: Sequence[Passage], now: Sequence[Passage]) -> list[Passage]:
    return list(now)


def count_prompt_tokens(
    retriever: CorpusRetriever, question: Question, script: QueryScript, order: PassageOrder
) -> tuple[int, int, int]:
    """Tokens run with the cache; without it, of changed prompts; how often the evidence changed."""
    texts = [p.contents for p in retriever.corpus if p.id in question.supporting_ids]
    words = [word for text in texts for word in text.split()[:WORDS]]
    words += ["###", *question.golden_answers[0].split()]
    draw, prefixes = random.Random(question.id), PrefixKVCache(CountingEncoder())  # type: ignore[arg-type]
    held: list[Passage] = []
    whole = changes = 0
    for step in range(STEPS):
        query = build_query("proxy", question.question, script(words, step, draw))
        now = order(held, retriever.search([query])[0])
        if step and now == held:
            continue
        held, changes = now, changes + 1
        facts = "\n".join(f"[{n}] {passage.text}" for n, passage in enumerate(held, start=1))
        ids = f"{HEAD.format(question.question)}{facts}{TAIL}".encode()
        prefixes.prefill(0, ids)
        whole += len(ids)
    return prefixes.cache_stats.encoded_tokens, whole, changes


def measure_reuse_shares(folder: Path, count: int = QUESTIONS) -> dict[str, tuple[float, float]]:
    """By script and order of passages: the share of tokens run, prompts a question."""
    retriever = load_retriever(folder / "corpus.jsonl", top_k=TOP_K)
    questions = [q for q in read_questions(folder / "questions.jsonl") if q.supporting_ids][:count]
    found = {}
    for script in (growing, flickering):
        for order in (order_by_arrival, ranked):
            rows = [count_prompt_tokens(retriever, question, script, order) for question in questions]
            kept, whole, changes = map(sum, zip(*rows, strict=True))
            found[f"{script.__name__}, {order.__name__}"] = kept / whole, changes / len(rows)
    return found


def compare_reuse(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    for name, (share, prompts) in measure_reuse_shares(parser.parse_args(argv).folder).items():
        print(f"{name:24} {share:6.1%} of the tokens run, {prompts:.1f} prompts a question")


def main(argv: list[str]) -> None:
    run_subcommand(__doc__ or "", argv, {"plan": compare_plans, "prefix": compare_reuse})


if __name__ == "__main__":
    run_program(main)
