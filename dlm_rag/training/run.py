"""A run: the loop of its steps, and the model with its card that it leaves."""

import datetime
import json
import os
import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

from dlm_rag.cli import print_note
from dlm_rag.config import Config
from dlm_rag.energy import EnergyMeter, format_energy, format_three_digits, merge_readings, open_meter
from dlm_rag.files.paths import open_atomic_folder, write_text_atomic
from dlm_rag.machine import describe_machine, get_code_commit, get_machine_name
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.initial_model import InitialModel
from dlm_rag.training.metrics_logger import MetricsLogger, read_metrics, select_validation_metrics
from dlm_rag.training.task import Validation
from dlm_rag.training.trainer import Trainer, open_trainer


def run_training(
    config: Config, origin: InitialModel, folder: Path, processes: DistributedContext, stop: Any
) -> None:
    """Trains from the newest checkpoint in `folder` on, and writes the model.

    stop: as `commands.train.StopSignal`.
    """
    commit = get_code_commit()  # of the code that runs: at the end the checkout may be another
    say = print_note if processes.is_main else lambda text: None
    trainer, validation = open_trainer(config, folder, processes, origin)
    trainer.restore()
    if begun := trainer.state.step:
        say(f"going on from step {begun}")
    with MetricsLogger(folder, config, begun, quiet=not processes.is_main) as report:
        count = sum(parameter.numel() for parameter in trainer.denoiser.parameters()) / 1e6
        say(
            f"training a model of {count:,.1f} M parameters, {config.model.path or 'from scratch'}, on "
            f"{config.data.questions or config.data.documents or 'invented worlds'}: "
            f"{config.train.max_steps:,} steps of {config.train.objective}, into {folder} (--plan "
            "estimates the time)"
        )
        with stop.catch_interrupt():
            meter = open_meter(config.energy, trainer.device, host=processes.local_rank == 0)
            stopped = run_steps(trainer, validation, report, stop)
        if energy := describe_energy(meter, processes, trainer.state.step - begun):
            say(energy)
        if stopped:
            say(f"stopped after step {trainer.state.step}, which is saved: --resume goes on")
            return
        model = folder / "model"
        with open_atomic_folder(model) if processes.is_main else nullcontext(model) as scratch:
            trainer.export(scratch)
            if processes.is_main:
                metrics = read_metrics(folder / "metrics.jsonl")
                write_model_card(scratch, trainer.denoiser, config, metrics, commit)
        say(f"the model is in {model}: sample --model reads it")


def run_steps(trainer: Trainer, validation: Validation, report: MetricsLogger, stop: Event) -> bool:
    """The loop, in plain steps; ends early, with a checkpoint, once any process was asked to stop.

    Returns whether it was, the same on all processes. A step is saved before it is validated; a resumed run
    makes up for a validation that was cut off.
    """
    train, state, processes = trainer.train, trainer.state, trainer.processes
    while True:
        due = trainer.finished or state.step % train.eval_steps == 0
        if state.step and due and not processes.any_rank(report.has_validation):
            report.log_validation(validation.compute_scores(trainer))
        if trainer.finished:
            return False
        begun = time.perf_counter()
        metrics = trainer.step()
        speed = trainer.speed_metrics(metrics, time.perf_counter() - begun)
        report.log_step(metrics | speed)
        stopping = processes.any_rank(stop.is_set())
        often = train.save_steps, train.eval_steps
        if stopping or trainer.finished or any(state.step % steps == 0 for steps in often):
            trainer.save()
        if stopping:
            return True


def describe_energy(meter: EnergyMeter, processes: DistributedContext, steps: int) -> str:
    """Stops the meters of all processes; returns what the run has used, in words; "" if nobody asked."""
    reading = merge_readings(processes.all_gather_object(meter.stop()))
    record = reading.to_record()
    if record is None:
        return ""
    if (joules := reading.joules) is None:
        return format_energy(None, reading.reason)
    watts = format_three_digits(joules / reading.seconds)
    each = format_three_digits(joules / max(1, steps))
    return f"energy: {format_three_digits(joules)} J · {each} J/step · {watts} W · {record['sensor']}"


def write_model_card(
    folder: Path, denoiser: Denoiser, config: Config, metrics: list[dict[str, Any]], commit: str | None
) -> None:
    """Writes `training.json` and `README.md` into a model's folder.

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
    return f"# A denoiser\n\n    {record['command']}\n\n| | |\n|---|---|\n{table}\n"
