"""The card of a trained model: where it comes from, its settings and curves."""

import datetime
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dlm_rag.config import Config, list_changed_settings
from dlm_rag.files.paths import open_atomic_file, write_text_atomic
from dlm_rag.machine import describe_machine, get_machine_name
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.training.metrics_logger import SCREEN_WINDOW_STEPS, select_validation_metrics


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
        "parameters": sum(parameter.numel() for parameter in denoiser.parameters()),
        "validation": select_validation_metrics(validated[-1]) if validated else {},
        "config": asdict(config),
    }
    write_text_atomic(folder / "training.json", json.dumps(record, indent=2) + "\n")
    write_text_atomic(folder / "README.md", _render_readme(record, list_changed_settings(config)))
    plot_curves(folder / "curves.png", metrics)


def make_train_command() -> str:
    """The command that trains this again, from nothing."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    start = f"torchrun --nproc-per-node {count}" if count > 1 else "python"
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return f"{start} {shlex.join([Path(sys.argv[0]).name, *words])}"


def _render_readme(record: dict[str, Any], settings: dict[str, Any]) -> str:
    rows = {
        "commit": record["commit"],
        "finished": record["date"],
        "machine": f"{record['machine']}, {record['hours']} hours",
        "seed": record["seed"],
        "steps": f"{record['steps']:,}, of {record['rows']:,} rows, "
        f"{record['supervised_tokens']:,} masked tokens in all",
        "parameters": f"{record['parameters']:,}",
    }
    rows |= {
        f"validation: {name.replace('_', ' ')}": f"{v:.3g}" for name, v in record["validation"].items()
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    listed = "\n".join(f"    {key}: {value}" for key, value in settings.items())
    return (
        f"# {_title(record['config'])}\n\n"
        f"    {record['command']}\n\n| | |\n|---|---|\n{table}\n\n"
        "![Losses, pointer mass and exact match while training](curves.png)\n\n"
        f"Settings that are not the defaults:\n\n{listed}\n{_knowledge_note(record['config'])}"
    )


def _title(config: dict[str, Any]) -> str:
    start, layers = config["model"]["path"], config["train"]["init_layers_from"]
    begun = start or (f"the layers of {layers}" if layers else "nothing")
    return f"A denoiser trained from {begun} on {_describe_data(config)}"


def _describe_data(config: dict[str, Any]) -> str:
    data = config["data"]
    named = [*data["documents"], *([data["questions"]] if data["questions"] else [])]
    if data["corpus"] and not data["questions"]:
        named.append(f"questions made from {data['corpus']}")
    return ", ".join(named) or "invented worlds"


def _knowledge_note(config: dict[str, Any]) -> str:
    if config["model"]["path"] or _describe_data(config) != "invented worlds":
        return ""
    return (
        "\nIt knows the English of these worlds and nothing else: it answers about passages that tell of\n"
        "invented people, places, works and companies, by reading what it retrieves.\n"
    )


def plot_curves(path: Path, metrics: list[dict[str, Any]]) -> None:
    """The losses on the left; on the right what the names do, and exact match by the real decoder."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    parts = [metrics[n : n + SCREEN_WINDOW_STEPS] for n in range(0, len(metrics), SCREEN_WINDOW_STEPS)]

    def curve(axis: Any, name: str, label: str, **style: Any) -> None:
        logged = [[line for line in part if name in line] for part in parts]
        if not any(line[name] for part in logged for line in part):
            return
        steps = [part[-1]["step"] + 1 for part in logged if part]
        means = [sum(line[name] for line in part) / len(part) for part in logged if part]
        axis.plot(steps, means, label=label, linewidth=1.5, **style)

    rollouts = any("rollout_reward" in line for line in metrics)
    if rollouts:
        curve(left, "rollout_forwards", "forwards of a rollout", color="#1f5c99")
        curve(left, "rollout_searches", "searches of a rollout", color="#b8862b")
        curve(right, "rollout_exact_match", "exact match of rollouts", color="0.55")
    else:
        curve(left, "loss", "masked tokens, training", color="#1f5c99")
    curve(left, "pointer_loss", "pointers, training", color="#b8862b")
    curve(right, "pointer_mass", "attention on the right passage", color="#b8862b")
    curve(right, "name_accuracy", "masked names right, training", color="0.55")
    bounded = [line for line in metrics if "nelbo_per_token" in line]
    if bounded and not rollouts:
        at = [line["step"] + 1 for line in bounded]
        left.plot(at, [line["nelbo_per_token"] for line in bounded], "o-", color="#b3423c", markersize=3,
                  label="NELBO per token, validation")  # fmt: skip
    validated = [line for line in metrics if "exact_match" in line]
    at = [line["step"] + 1 for line in validated]
    if validated:
        shades = ("#cfe3d4", "#93c3a0", "#4f9a68", "#1d6b3c")
        for hops, shade in enumerate(shades, start=1):
            if f"exact_match_{hops}_hops" not in validated[0]:
                break
            values = [line[f"exact_match_{hops}_hops"] for line in validated]
            right.plot(at, values, "o-", color=shade, markersize=3, label=f"exact match, {hops} hops")
    left.set_ylabel("a rollout" if rollouts else "nats")
    left.set_ylim(0, None if rollouts else 6)
    right.set_ylim(0, 1.02)
    for axis in (left, right):
        axis.set_xlabel("step")
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    with open_atomic_file(path) as scratch:
        figure.savefig(scratch, dpi=130)
    pyplot.close(figure)
