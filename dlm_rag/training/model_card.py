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

CURVES = (  # the axis, the metric, its label, its colour
    (0, "loss", "masked tokens, training", "#1f5c99"),
    (0, "pointer_loss", "pointers, training", "#b8862b"),
    (0, "nelbo_per_token", "NELBO per token, validation", "#b3423c"),
    (0, "rollout_forwards", "forwards of a rollout", "#1f5c99"),
    (0, "rollout_searches", "searches of a rollout", "#b8862b"),
    (1, "pointer_mass", "attention on the right passage", "#b8862b"),
    (1, "name_accuracy", "masked names right, training", "0.55"),
    (1, "rollout_exact_match", "exact match of rollouts", "0.55"),
    *(
        (1, f"exact_match_{hops}_hops", f"exact match, {hops} hops", color)
        for hops, color in enumerate(("#cfe3d4", "#93c3a0", "#4f9a68", "#1d6b3c"), start=1)
    ),
)


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
        "data": data["questions"] or data["corpus"] or data["documents"] or "invented worlds",
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
    for side, name, label, color in CURVES:
        logged = [line for line in metrics if is_number(line.get(name))]
        validated = name.startswith(VALIDATION_PREFIXES)
        size = 1 if validated else SCREEN_WINDOW_STEPS
        of_counts = rollouts and side == 0  # what the left axis then shows
        if not any(validated or line[name] for line in logged) or (of_counts and "rollout" not in name):
            continue
        parts = [logged[n : n + size] for n in range(0, len(logged), size)]
        means = [sum(line[name] for line in part) / len(part) for part in parts]
        at, mark = [part[-1]["step"] + 1 for part in parts], "o-" if validated else "-"
        axes[side].plot(at, means, mark, color=color, markersize=3, label=label)
    axes[0].set_ylabel("a rollout" if rollouts else "nats")
    axes[0].set_ylim(0)
    axes[1].set_ylim(0, 1.02)
    for axis in axes:
        axis.set_xlabel("step")
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    with open_atomic_file(path) as scratch:
        figure.savefig(scratch, dpi=130)
    pyplot.close(figure)
