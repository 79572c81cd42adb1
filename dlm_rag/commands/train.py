"""Train a denoiser: from nothing, or from a public checkpoint, to answer by reading what it retrieves.

    dlm-rag train --config tiny.yaml             # the whole way on a small scale, on invented worlds
    dlm-rag train --config tiny.yaml --resume    # goes on where a run was stopped, however it was
    dlm-rag train --config gb300.yaml --plan     # what it takes, before anything is allocated
    torchrun --nproc-per-node 2 -m dlm_rag train --config world.yaml    # on two processes

The folder of --out gets metrics.jsonl, checkpoints/ and, at the end, model/, which sample reads:

    dlm-rag sample --model runs/tiny/model --corpus runs/tiny/validation/corpus.jsonl "Who ...?"

SIGTERM saves a checkpoint and ends with exit status 0. In a checkout `python train.py` is the same program.
"""

import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dlm_rag.commands.words import parse
from dlm_rag.errors import ConfigError
from dlm_rag.program import check_writable, note

if TYPE_CHECKING:
    from dlm_rag.config import Config
    from dlm_rag.training.origin import Origin
    from dlm_rag.training.processes import Processes
    from dlm_rag.training.report import Report
    from dlm_rag.training.trainer import Trainer
    from dlm_rag.training.validation import Validation

SWITCHES = {
    "resume": "go on from the last checkpoint",
    "plan": "print what the run takes in memory, time and energy, and do nothing",
}


def main(argv: list[str]) -> None:
    words = parse(__doc__ or "", argv, typed=False, switches=SWITCHES)
    config, resume = words.config, "resume" in words.switches
    folder = Path(config.out or "runs/train")
    if config.limit or config.quick:
        raise ConfigError("training takes all of its questions: leave limit and quick out")
    if "plan" not in words.switches:
        make_folder(folder, resume)
    if "plan" in words.switches:
        from dlm_rag.training.page import print_plan

        print_plan(config)
        return
    from dlm_rag.training.failures import failures_told
    from dlm_rag.training.origin import begin
    from dlm_rag.training.plan import refuse_unfit
    from dlm_rag.training.processes import Processes

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    processes = Processes.join()
    try:
        with failures_told():
            processes.check_folder(folder)
            device = processes.device(config.model.device)
            refuse_unfit(config, processes.count, device)  # before anything is fetched
            train(config, begin(config), folder, processes, stop)
    finally:
        processes.leave()


def make_folder(folder: Path, resume: bool) -> None:
    """Raises `ConfigError` where the folder cannot be one, or holds a run that is not to be resumed."""
    if (folder / "checkpoints").exists() and not resume:
        raise ConfigError(f"{folder} holds a run already: add --resume to go on, or name another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={folder} cannot be a folder: {error.strerror}") from None
    check_writable(str(folder / "metrics.jsonl"), "out")


def train(
    config: "Config", origin: "Origin", folder: Path, processes: "Processes", stop: threading.Event
) -> None:
    """The phases, one after another; each begins with the checkpoint of the one before."""
    from dlm_rag.training.card import write_card
    from dlm_rag.training.phase import open_phase
    from dlm_rag.training.report import Report
    from dlm_rag.training.saving import position
    from dlm_rag.training.trainer import Trainer, free_memory

    step, left = position(folder, list(config.train.in_phases()))
    if step and processes.first:
        note(f"going on from step {step}")
    # What is wrong with the data of the last phase is said before the first begins.
    opened = {phase: open_phase(config, phase, origin, folder) for phase in left}
    with Report(folder, config, from_step=step, quiet=not processes.first) as report:
        for phase, (task, validation) in opened.items():
            trainer = Trainer(config, origin, task, folder, processes, phase)
            trainer.restore()
            if run_phase(trainer, validation, report, stop):
                if processes.first:
                    note(f"stopped after step {trainer.state.step}, which is saved: --resume goes on")
                return
            if phase == left[-1]:
                trainer.export(folder / "model")
                if processes.first:
                    write_card(folder / "model", trainer.denoiser, config, report.lines())
                    note(f"the model is in {folder / 'model'}: sample --model reads it")
            del trainer
            free_memory()


def run_phase(
    trainer: "Trainer", validation: "Validation", report: "Report", stop: threading.Event
) -> bool:
    """The loop, in plain steps; ends early, with a checkpoint, once any process was asked to stop.

    Returns whether it was: all processes have the same answer, whenever the signal came. A step is saved
    before it is validated; a validation that did not come to its end is made up for by a resumed run.
    """
    train, state, processes = trainer.train, trainer.state, trainer.processes
    often = train.save_every, train.validate_every
    while True:
        due = trainer.finished or state.phase_step % train.validate_every == 0
        if state.phase_step and due and not processes.any(report.validated):
            report.add_scores(validation.scores(trainer))
        if trainer.finished:
            return False
        begun = time.perf_counter()
        metrics = trainer.step()
        report.add(metrics | trainer.speed(metrics, time.perf_counter() - begun))
        stopping = processes.any(stop.is_set())
        if stopping or trainer.finished or any(state.phase_step % steps == 0 for steps in often):
            trainer.save()
        if stopping:
            return True
