"""A run: the loop of its steps, and what it leaves."""

import time
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any

from dlm_rag.cli import print_note
from dlm_rag.config import Config
from dlm_rag.energy.meter import EnergyMeter, format_energy, format_three_digits, merge_readings, open_meter
from dlm_rag.files.paths import open_atomic_folder
from dlm_rag.machine import get_code_commit
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.initial_weights import InitialModel
from dlm_rag.training.metrics_logger import MetricsLogger, read_metrics
from dlm_rag.training.model_card import write_model_card
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
        say(describe_start(config, trainer, folder))
        with stop.catch_interrupt():
            meter = open_meter(config.energy, trainer.device, host=processes.local_rank == 0)
            meter.start()
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


def describe_start(config: Config, trainer: Trainer, folder: Path) -> str:
    """What is trained, on what, for how many steps, and where it goes, in a sentence."""
    count = sum(parameter.numel() for parameter in trainer.denoiser.parameters()) / 1e6
    data = config.data.questions or config.data.documents or "invented worlds"
    return (
        f"training a model of {count:,.1f} M parameters, {config.model.path or 'from scratch'}, on "
        f"{data}: {config.train.max_steps:,} steps of {config.train.objective}, into {folder} (--plan "
        "estimates the time)"
    )


def run_steps(trainer: Trainer, validation: Validation, report: MetricsLogger, stop: Event) -> bool:
    """The loop, in plain steps; ends early, with a checkpoint, once any process was asked to stop.

    Returns whether it was, the same on all processes. A step is saved before it is validated; a resumed run
    makes up for a validation that was cut off.
    """
    train, state, processes = trainer.train, trainer.state, trainer.processes
    often = train.save_steps, train.eval_steps
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
