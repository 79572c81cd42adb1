"""Which steps of a rollout to learn from: the variance of the gradient, by how `k` of its steps are chosen.

    python profiling/bench_rl_step_sampling.py --config search_rl.yaml train.trainable=all
    decode.commit_rule=threshold

Makes the rollouts of one update and takes the gradient of every step by itself, weighed by its advantage.
How far the sum of a rollout's k weighed steps is from the sum over all then follows without drawing any: by
lot without putting back (`train.train_steps_per_rollout`), one of each k-th part of the rollout, with
chances as the steps' entropy, and with those that no draw with putting back beats (as the norms, which
nobody knows).
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from dlm_rag.cli import run_program
from dlm_rag.commands.cli_args import parse_command_line
from dlm_rag.config import Config
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.progress import report_progress
from dlm_rag.training.phase_setup import open_trainer
from dlm_rag.training.rl.policy_loss import GateDecisions
from dlm_rag.training.rl.rollouts import WeightedStep
from dlm_rag.training.rl.task import RlMicrobatch, RlTask
from dlm_rag.training.trainer import Trainer

OPTIONS: dict[str, tuple[str | int, str]] = {
    "k": (2, "steps of each rollout"),
    "update": (0, "whose rollouts"),
}


def variance_uniform_sampling(g: torch.Tensor, k: int) -> float:
    """Of k of the S rows of g without putting back, each by S / k."""
    steps = len(g)
    return steps**2 / k * (1 - k / steps) * float(g.var(0).sum())


def variance_stratified_sampling(g: torch.Tensor, k: int) -> float:
    """Of one row of each of k parts, by the length of the part."""
    parts = g.tensor_split(k)
    return sum(len(part) ** 2 * float(part.var(0, correction=0).sum()) for part in parts)


def variance_weighted_sampling(g: torch.Tensor, k: int, chance: torch.Tensor) -> float:
    """Of k draws with putting back, each by 1 / (k chance)."""
    share = chance / chance.sum()
    squares = (g.square().sum(1) / share.clamp_min(1e-12)).sum()
    return float(squares - g.sum(0).square().sum()) / k


def per_step_gradients(
    trainer: Trainer, taken: list[WeightedStep], layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a rollout: the gradients (S, P) of its steps, and their entropies (S,)."""
    task, weights = trainer.task, [p for p in trainer.denoiser.parameters() if p.requires_grad]
    assert isinstance(task, RlTask)
    found, entropies = [], []
    for row in task.make_denoiser_rows(taken, layout):
        part = RlMicrobatch({}, [row], GateDecisions.from_commits([]), GateDecisions.from_searches([]))
        loss, sums = trainer.root(part, {"divisor": 1.0}, None)
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)]))
        entropies.append(float(sums["entropy"]))
    return torch.stack(found), torch.tensor(entropies)


def measure_step_variance(config: Config, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Mean squares, summed over rollouts: of the distance of each choice, and of the gradient itself."""
    k = options["k"]
    config = replace(config, train=replace(config.train, train_steps_per_rollout=None))
    trainer, _ = open_trainer(config, folder)
    trainer.denoiser.eval()
    assert isinstance(trainer.task, RlTask)
    buffer, layout = trainer.task.collect_rollouts(options["update"], range(config.train.items))
    sums = dict.fromkeys(("lot", "spread", "entropy", "norm"), 0.0)
    rollouts: dict[str, list[WeightedStep]] = {}
    for one in buffer.weighted_steps:
        rollouts.setdefault(one.rollout.id, []).append(one)
    groups: dict[str, torch.Tensor] = {}
    steps = 0
    with report_progress("gradients", len(rollouts)) as advance:
        for name, taken in rollouts.items():
            g, entropy = per_step_gradients(trainer, taken, layout)
            group = name.rpartition(".")[0]
            groups[group] = groups.get(group, 0) + g.sum(0)
            steps += len(g)
            advance(1)
            if len(g) <= k:
                continue
            sums["lot"] += variance_uniform_sampling(g, k)
            sums["spread"] += variance_stratified_sampling(g, k)
            sums["entropy"] += variance_weighted_sampling(g, k, entropy)
            sums["norm"] += variance_weighted_sampling(g, k, g.norm(dim=1))
    if not rollouts:
        raise RunError("no group has both right and wrong rollouts: try another --update")
    apart = torch.stack(list(groups.values()))
    between = float(apart.var(0).sum()) * len(apart) if len(apart) > 1 else float("nan")
    return {"k": k, "rollouts": len(rollouts), "steps": steps, "groups": len(groups),
            "variance": sums, "between_groups": between}  # fmt: skip


def main(argv: list[str]) -> None:
    words = parse_command_line(__doc__ or "", argv, typed=False, options=OPTIONS)
    if words.config.train.trainable == "policy_heads" or words.config.train.objective != "rl":
        raise ConfigError("steps are chosen where rl trains the denoiser: set train.trainable=all")
    with tempfile.TemporaryDirectory() as scratch:
        found = measure_step_variance(words.config, Path(scratch), words.options)
    told = "{rollouts} rollouts of {groups} groups, {steps} steps, {k} of each".format(**found)
    table = Table(
        "choice", *(Column(h, justify="right") for h in ("variance", "by that of lot")), title=told
    )
    for name, value in found["variance"].items():
        table.add_row(name, f"{value:.3g}", f"{value / found['variance']['lot']:.2f}")
    table.add_row("between groups, all steps", f"{found['between_groups']:.3g}",
                  f"{found['between_groups'] / found['variance']['lot']:.2f}")  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    run_program(main)
