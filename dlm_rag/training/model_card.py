"""The card of a trained model: where it comes from, its settings and curves."""

import datetime
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dlm_rag.config import Config
from dlm_rag.files.paths import open_atomic_file, write_text_atomic
from dlm_rag.machine import describe_machine, get_machine_name
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.training.metrics_logger import (
    SCREEN_WINDOW_STEPS,
    VALIDATION_PREFIXES,
    is_number,
    select_validation_metrics,
)

LOSSES = "loss", "pointer_loss", "nelbo_per_token"  # on the left; of rollouts what they cost:
COSTS = "rollout_forwards", "rollout_searches"
SHARES = "pointer_mass", "name_accuracy", "rollout_exact_match"  # on the right, with exact match


def write_model_card(
    folder: Path, denoiser: Denoiser, config: Config, metrics: list[dict[str, Any]], commit: str | None
) -> None:
    """Writes `training.json`, `README.md` and `curves.png` into a model's folder.

    metrics: every line of the run's `metrics.jsonl`. commit: of the code that ran.
    """
    validated = [line for line in metrics if select_validation_metrics(line)]
    record = {
        "command": make_train_command(),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": get_machine_name(denoiser.device),
        "machines": [describe_machine(denoiser.device, denoiser.backend)],  # as in the stamp of answers
        "seed": config.train.seed,
        "hours": round(sum(line["seconds"] for line in metrics) / 3600, 2),
        "steps": len(metrics),
        "rows": sum(line["rows"] for line in metrics),
        "supervised_tokens": sum(line["supervised_tokens"] for line in metrics),
        "parameters": sum(p.numel() for p in denoiser.parameters()),
        "validation": select_validation_metrics(validated[-1]) if validated else {},
        "config": asdict(config),
    }
    write_text_atomic(folder / "training.json", json.dumps(record, indent=2) + "\n")
    write_text_atomic(folder / "README.md", _render_readme(record))
    plot_curves(folder / "curves.png", metrics)


def make_train_command() -> str:
    """The command that trains this again, from scratch."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    start = f"torchrun --nproc-per-node {count}" if count > 1 else "python"
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return f"{start} {shlex.join([Path(sys.argv[0]).name, *words])}"


def _render_readme(record: dict[str, Any]) -> str:
    """Renders the facts of `training.json`, which has all settings, in Markdown."""
    config = record["config"]
    data = config["data"]
    rows = {
        "begun from": config["model"]["path"] or "random weights",
        "data": data["questions"] or data["documents"] or "invented worlds",
        **{name: record[name] for name in ("commit", "date", "machine", "hours", "seed", "steps", "rows")},
        "supervised tokens": record["supervised_tokens"],
        "parameters": record["parameters"],
        **{f"validation: {name}": f"{value:.3g}" for name, value in record["validation"].items()},
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"# A denoiser\n\n    {record['command']}\n\n| | |\n|---|---|\n{table}\n\n![Curves](curves.png)\n"
    )


def plot_curves(path: Path, metrics: list[dict[str, Any]]) -> None:
    """The losses on the left; on the right accuracy on names, and exact match by the real decoder."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    rollouts = any("rollout_reward" in line for line in metrics)
    scores = sorted({name for line in metrics for name in line if name.startswith("exact_match")})
    for axis, names in zip(axes, (COSTS if rollouts else LOSSES, (*SHARES, *scores)), strict=True):
        for name in names:
            logged = [line for line in metrics if is_number(line.get(name))]
            if not any(line[name] for line in logged) and name not in scores:
                continue
            size = 1 if name.startswith(VALIDATION_PREFIXES) else SCREEN_WINDOW_STEPS
            parts = [logged[n : n + size] for n in range(0, len(logged), size)]
            means = [sum(line[name] for line in part) / len(part) for part in parts]
            axis.plot(
                [part[-1]["step"] + 1 for part in parts], means, "o-" if size == 1 else "-", label=name
            )
        axis.set_xlabel("step")
        axis.set_ylim(0)
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
    with open_atomic_file(path) as scratch:
        figure.savefig(scratch, dpi=130)
    pyplot.close(figure)
