"""Which steps of a rollout to learn from: the variance of the gradient, by how `k` of its steps are chosen.

    python profiling/bench_steps.py --config search_rl.yaml train.learn=all decode.commit_rule=threshold

Makes the rollouts of one update and takes the gradient of every step by itself, weighed by its advantage.
How far the sum of a rollout's k weighed steps is from the sum over all then follows without drawing any: by
lot without putting back (`train.steps_of_rollout`), one of each k-th part of the rollout, with chances as
the steps' entropy, and with those that no draw with putting back beats (as the norms, which nobody knows).
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from dlm_rag.commands.words import parse
from dlm_rag.config import Config
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.program import run
from dlm_rag.progress import progress
from dlm_rag.training.phase import open_trainer
from dlm_rag.training.policy_loss import Gates
from dlm_rag.training.rl import Part, Rl
from dlm_rag.training.rollouts import Taken
from dlm_rag.training.trainer import Trainer

OPTIONS: dict[str, tuple[str | int, str]] = {
    "k": (2, "steps of each rollout"),
    "update": (0, "whose rollouts"),
}


def by_lot(g: torch.Tensor, k: int) -> float:
    """Of k of the S rows of g without putting back, each by S / k."""
    steps = len(g)
    return steps**2 / k * (1 - k / steps) * float(g.var(0).sum())


def spread(g: torch.Tensor, k: int) -> float:
    """Of one row of each of k parts, by the length of the part."""
    parts = g.tensor_split(k)
    return sum(len(part) ** 2 * float(part.var(0, correction=0).sum()) for part in parts)


def by_chance(g: torch.Tensor, k: int, chance: torch.Tensor) -> float:
    """Of k draws with putting back, each by 1 / (k chance)."""
    share = chance / chance.sum()
    squares = (g.square().sum(1) / share.clamp_min(1e-12)).sum()
    return float(squares - g.sum(0).square().sum()) / k


def gradients(trainer: Trainer, taken: list[Taken], layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a rollout: the gradients (S, P) of its steps, and their entropies (S,)."""
    task, weights = trainer.task, [p for p in trainer.denoiser.parameters() if p.requires_grad]
    assert isinstance(task, Rl)
    found, entropies = [], []
    for row in task.policy_rows(taken, layout):
        part = Part({}, [row], Gates.of_commits([]), Gates.of_searches([]))
        loss, sums = trainer.root(part, {"divisor": 1.0}, None)
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)]))
        entropies.append(float(sums["entropy"]))
    return torch.stack(found), torch.tensor(entropies)


def measure(config: Config, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Mean squares, summed over rollouts: of the distance of each choice, and of the gradient itself."""
    k = options["k"]
    config = replace(config, train=replace(config.train, steps_of_rollout=None))
    trainer, _ = open_trainer(config, folder)
    trainer.denoiser.eval()
    assert isinstance(trainer.task, Rl)
    buffer, layout = trainer.task.buffer(options["update"], range(config.train.items))
    sums = dict.fromkeys(("lot", "spread", "entropy", "norm"), 0.0)
    rollouts: dict[str, list[Taken]] = {}
    for one in buffer.taken:
        rollouts.setdefault(one.rollout.id, []).append(one)
    groups: dict[str, torch.Tensor] = {}
    steps = 0
    with progress("gradients", len(rollouts)) as advance:
        for name, taken in rollouts.items():
            g, entropy = gradients(trainer, taken, layout)
            group = name.rpartition(".")[0]
            groups[group] = groups.get(group, 0) + g.sum(0)
            steps += len(g)
            advance(1)
            if len(g) <= k:
                continue
            sums["lot"] += by_lot(g, k)
            sums["spread"] += spread(g, k)
            sums["entropy"] += by_chance(g, k, entropy)
            sums["norm"] += by_chance(g, k, g.norm(dim=1))
    if not rollouts:
        raise RunError("no group has both right and wrong rollouts: try another --update")
    apart = torch.stack(list(groups.values()))
    between = float(apart.var(0).sum()) * len(apart) if len(apart) > 1 else float("nan")
    return {"k": k, "rollouts": len(rollouts), "steps": steps, "groups": len(groups),
            "variance": sums, "between_groups": between}  # fmt: skip


def main(argv: list[str]) -> None:
    words = parse(__doc__ or "", argv, typed=False, options=OPTIONS)
    if words.config.train.learn == "heads" or words.config.train.objective != "rl":
        raise ConfigError("steps are chosen where rl trains the denoiser: set train.learn=all")
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(words.config, Path(scratch), words.options)
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
    run(main)
