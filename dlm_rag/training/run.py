"""A run: its phases, one after another, and the loop of each."""

import gc
import time
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any

import torch

from dlm_rag.cli import print_note
from dlm_rag.config import Config
from dlm_rag.energy.meter import EnergyMeter, format_energy, format_three_digits, merge_readings, open_meter
from dlm_rag.files.paths import open_atomic_folder
from dlm_rag.machine import get_code_commit
from dlm_rag.training.checkpoints import find_resume_point
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.initial_weights import InitialModel
from dlm_rag.training.metrics_logger import MetricsLogger, read_metrics
from dlm_rag.training.model_card import write_model_card
from dlm_rag.training.task import Validation
from dlm_rag.training.trainer import Trainer, open_phase


def run_training(
    config: Config, origin: InitialModel, folder: Path, processes: DistributedContext, stop: Any
) -> None:
    """The phases, one after another; each begins with the checkpoint of the one before.

    stop: as `commands.train.StopSignal`.
    """
    commit = get_code_commit()  # of the code that runs: at the end the checkout may be another
    step, left = find_resume_point(folder, list(config.train.get_phase_configs()))
    say = print_note if processes.is_main else lambda text: None
    if step:
        say(f"going on from step {step}")
    # What is wrong with the data of the last phase is said before the first begins.
    opened = {phase: open_phase(config, phase, origin, folder) for phase in left}
    meter: EnergyMeter | None = None
    with MetricsLogger(folder, config, step, quiet=not processes.is_main) as report:
        for phase, (task, validation) in opened.items():
            trainer = Trainer(task, processes)
            trainer.restore()
            if meter is None:
                say(describe_start(config, trainer, folder))
            with stop.catch_interrupt():
                if meter is None:
                    meter = open_meter(config.energy, trainer.device, host=processes.local_rank == 0)
                    meter.start()
                stopped = run_phase(trainer, validation, report, stop)
            if (stopped or phase == left[-1]) and (
                energy := describe_energy(meter, processes, trainer.state.step - step)
            ):
                say(energy)
            if stopped:
                say(f"stopped after step {trainer.state.step}, which is saved: --resume goes on")
                return
            if phase == left[-1]:
                model = folder / "model"
                with open_atomic_folder(model) if processes.is_main else nullcontext(model) as scratch:
                    trainer.export(scratch)
                    if processes.is_main:
                        metrics = read_metrics(folder / "metrics.jsonl")
                        write_model_card(scratch, trainer.denoiser, config, metrics, commit)
                say(f"the model is in {model}: sample --model reads it")
            del trainer
            free_memory()


def describe_start(config: Config, trainer: Trainer, folder: Path) -> str:
    """What is trained, on what, for how many steps, and where it goes, in a sentence."""
    count = sum(parameter.numel() for parameter in trainer.denoiser.parameters()) / 1e6
    data = config.data.questions or config.data.corpus or ", ".join(config.data.documents)
    phases = config.train.get_phase_configs().values()
    told = [f"{phase.max_steps:,} steps of {phase.objective}" for phase in phases]
    return (
        f"training a model of {count:,.1f} M parameters, {config.model.path or 'from scratch'}, on "
        f"{data or 'invented worlds'}: {', '.join(told)}, into {folder} (--plan estimates the time)"
    )


def run_phase(trainer: Trainer, validation: Validation, report: MetricsLogger, stop: Event) -> bool:
    """The loop, in plain steps; ends early, with a checkpoint, once any process was asked to stop.

    Returns whether it was, the same on all processes. A step is saved before it is validated; a resumed run
    makes up for a validation that was cut off.
    """
    train, state, processes = trainer.train, trainer.state, trainer.processes
    often = train.save_steps, train.eval_steps
    while True:
        due = trainer.finished or state.phase_step % train.eval_steps == 0
        if state.phase_step and due and not processes.any_rank(report.has_validation):
            report.log_validation(validation.compute_scores(trainer))
        if trainer.finished:
            return False
        begun = time.perf_counter()
        metrics = trainer.step()
        speed = trainer.speed_metrics(metrics, time.perf_counter() - begun)
        report.log_step(metrics | speed)
        stopping = processes.any_rank(stop.is_set())
        if stopping or trainer.finished or any(state.phase_step % steps == 0 for steps in often):
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


def free_memory() -> None:
    """Gives back what nobody refers to any more: a trainer and its denoiser refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
