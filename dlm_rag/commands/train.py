"""Train a denoiser: from nothing, or from a public checkpoint, to answer by reading what it retrieves.

    dlm-rag train --config tiny.yaml             # the whole way on a small scale, on invented worlds
    dlm-rag train --config tiny.yaml --resume    # goes on where a run was stopped, however it was
    dlm-rag train --config gb300.yaml --plan     # what it takes, before anything is allocated
    torchrun --nproc-per-node 2 -m dlm_rag train --config world.yaml    # on two processes

The folder of --out gets metrics.jsonl, checkpoints/ and, at the end, model/, which sample reads:

    dlm-rag sample --model runs/tiny/model --corpus runs/tiny/validation/corpus.jsonl "Who ...?"

Ctrl-C saves a checkpoint and ends with exit status 130, a second one ends at once; SIGTERM saves one
and ends with 0. In a checkout `python train.py` is the same program.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.commands.words import parse
from dlm_rag.errors import ConfigError
from dlm_rag.files.whole import give_back, new_folder, take_lock
from dlm_rag.program import check_writable, note

if TYPE_CHECKING:
    from filelock import FileLock

    from dlm_rag.config import Config
    from dlm_rag.training.energy import Windows
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
    refuse_unread(config)
    if "plan" not in words.switches:
        make_folder(folder, resume)
    if "plan" in words.switches:
        from dlm_rag.training.page import print_plan

        print_plan(config)
        return
    from dlm_rag.decode.budget import hold
    from dlm_rag.training.failures import failures_told
    from dlm_rag.training.origin import begin
    from dlm_rag.training.plan import refuse_unfit
    from dlm_rag.training.processes import Processes
    from dlm_rag.training.saving import newest, pass_over_damaged

    stop = Stop()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    processes = Processes.join(config.train.timeout_minutes)
    try:
        with failures_told(), running(folder, processes):
            processes.check_folder(folder)
            passed_over = pass_over_damaged(folder, processes)
            for line in passed_over if processes.first else ():
                note(line)
            if resume and processes.first and newest(folder) is None:
                note(f"{folder} has no checkpoint: the run begins anew")
            device = processes.device(config.model.device)
            refuse_unfit(config, processes.count, device)  # before anything is fetched
            hold(config.engine, device)
            train(config, begin(config), folder, processes, stop)
    finally:
        processes.leave()
    if stop.interrupted:
        raise KeyboardInterrupt


def refuse_unread(config: "Config") -> None:
    """Raises `ConfigError` for data that are named and would not be trained on."""
    given = {"questions": config.questions, "corpus": config.retrieval.corpus}
    if other := [name for name, path in given.items() if path is not None]:
        raise ConfigError(f"training reads data.questions and data.corpus: give these, not --{other[0]}")
    if config.retrieval.url is not None:
        raise ConfigError("training searches data.corpus, or worlds of its own: leave retrieval.url out")
    unread = ("trace", "html", "guesses", "compare", "workers")
    if other := [name for name in unread if getattr(config, name) not in (None, False)]:
        raise ConfigError(f"training has no use for {other[0]}: leave it out")
    phases = config.train.in_phases().values()
    objectives = {phase.objective for phase in phases}
    learned = any(phase.objective == "rl" and phase.learn != "heads" for phase in phases)
    if learned and config.decode.copy_price is not None:
        raise ConfigError(
            "rl of the denoiser computes steps again from its own logits, without what decode.copy_price "
            "makes of them: leave it out, or set train.learn=heads"
        )
    if config.data.documents and objectives <= {"sft", "rl"}:
        raise ConfigError(
            "data.documents are read by pretrain and adapt: set train.objective to one of them"
        )
    if config.data.questions and not objectives & {"sft", "rl"}:
        raise ConfigError(
            "data.questions are read by sft and rl: set train.objective, or name data.documents"
        )
    made = config.data.corpus is not None and config.data.questions is None
    for phase in phases:
        if phase.crossed and not (made and phase.objective == "sft"):
            raise ConfigError(
                f"train.crossed={phase.crossed} is for sft on questions that are made: give data.corpus "
                "without data.questions, or set train.crossed=0"
            )
        if made and phase.hops == 1 and phase.objective in ("sft", "rl"):
            raise ConfigError(
                "train.hops=1: what is made of data.corpus alone are chains of 2 passages or more"
            )


class Stop(threading.Event):
    """Set by the first SIGTERM or Ctrl-C: the step that is under way is the last, and is saved."""

    interrupted = 0.0  # when Ctrl-C was pressed

    @contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """While there is something to be saved the first Ctrl-C stops, and a second ends at once."""
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.default_int_handler:  # ignored, as in the background of a shell
            yield
            return
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, *signalled: Any) -> None:
        now = time.monotonic()
        # The same Ctrl-C comes twice under torchrun: from the terminal and from torchrun.
        if self.interrupted and now - self.interrupted > 1:
            signal.default_int_handler(*signalled)
        elif not self.interrupted:
            self.interrupted = now
            self.set()
            if os.environ.get("RANK", "0") == "0":  # not by print, which may be what was interrupted
                os.write(2, b"\nstopping after this step, which will be saved; Ctrl-C again ends at once\n")


# What a run puts into its folder, by the beginnings of the names.
FOLDERS = ("checkpoints", "validation", "documents", "model", "wandb")
PARTS = {"metrics", "train", *FOLDERS}


def make_folder(folder: Path, resume: bool) -> None:
    """Raises `ConfigError` where the folder cannot be one, or is not what `resume` says.

    A run begins in a folder that is new or empty, or holds what another that was stopped before its
    first step has left; what is gone on with must be a run.
    """
    try:
        here = sorted(folder.iterdir()) if folder.is_dir() else []
        names = [path.name for path in here if not path.name.startswith(".")]
        foreign = [name for name in names if name.partition(".")[0] not in PARTS]
        begun = "checkpoints" in names or "metrics.jsonl" in names
        if resume and not begun and (foreign or not names):
            raise ConfigError(f"{folder} holds no run to go on with: name another, or leave --resume out")
        if not resume and begun:
            raise ConfigError(f"{folder} holds a run already: add --resume to go on, or name another --out")
        if not resume and foreign:
            raise ConfigError(
                f"{folder} holds '{foreign[0]}', which is of no run: name a new or empty folder"
            )
        if files := [part for part in FOLDERS if (folder / part).is_file()]:
            raise ConfigError(f"{folder / files[0]} is a file and must be a folder: name another --out")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={folder} cannot be a folder: {error.strerror}") from None
    check_writable(str(folder / "metrics.jsonl"), "out")


@contextmanager
def running(folder: Path, processes: "Processes") -> Iterator[None]:
    """Keeps other runs out of the folder; raises `ConfigError`, on all processes, where one is in it."""
    locks: list[FileLock] = []
    name = folder / "train.lock"
    processes.check_first(lambda: locks.append(take_lock(name, f"the run in {folder}")))
    try:
        yield
    finally:
        for lock in locks:
            give_back(lock)


def train(config: "Config", origin: "Origin", folder: Path, processes: "Processes", stop: Stop) -> None:
    """The phases, one after another; each begins with the checkpoint of the one before."""
    from dlm_rag.energy.meter import open_meter
    from dlm_rag.machine import commit_of_code
    from dlm_rag.model.cost import announce_work, encode_work
    from dlm_rag.training.card import write_card
    from dlm_rag.training.energy import Windows
    from dlm_rag.training.phase import open_phase
    from dlm_rag.training.report import Report
    from dlm_rag.training.saving import position
    from dlm_rag.training.trainer import Trainer, free_memory

    commit = commit_of_code()  # of what runs: at the end the checkout may be another
    step, left = position(folder, list(config.train.in_phases()))
    if processes.first and step:
        note(f"going on from step {step}")
    # What is wrong with the data of the last phase is said before the first begins.
    opened = {phase: open_phase(config, phase, origin, folder) for phase in left}
    windows = None
    canvas, device = origin.config.canvas_length, processes.device(config.model.device)
    each = encode_work(origin.config, [canvas], [canvas], [canvas], 4)
    rows = max(phase.items * phase.rows for phase in config.train.in_phases().values()) / processes.count
    if processes.first:
        what = f"a training step with canvas_length={canvas}"
        announce_work(rows * each.with_backward(False), what, device.type)
    with Report(folder, config, from_step=step, quiet=not processes.first) as report:
        for phase, (task, validation) in opened.items():
            trainer = Trainer(config, origin, task, folder, processes, phase)
            trainer.restore()
            with stop.on_interrupt():
                if windows is None:
                    meter = open_meter(config.energy, trainer.device, host=processes.local_rank == 0)
                    windows = Windows(meter, processes)
                stopped = run_phase(trainer, validation, report, stop, windows)
            if (stopped or phase == left[-1]) and (told := windows.told()) and processes.first:
                note(told)
            if stopped:
                if processes.first:
                    note(f"stopped after step {trainer.state.step}, which is saved: --resume goes on")
                return
            if phase == left[-1]:
                with new_folder(folder / "model") if processes.first else nullcontext(folder) as model:
                    trainer.export(model)
                    if processes.first:
                        write_card(model, trainer.denoiser, config, report.lines(), commit)
                if processes.first:
                    note(f"the model is in {folder / 'model'}: sample --model reads it")
            del trainer
            free_memory()


def run_phase(
    trainer: "Trainer", validation: "Validation", report: "Report", stop: Stop, windows: "Windows"
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
        report.add(metrics | trainer.speed(metrics, time.perf_counter() - begun) | windows.add(metrics))
        stopping = processes.any(stop.is_set())
        if stopping or trainer.finished or any(state.phase_step % steps == 0 for steps in often):
            trainer.save()
        if stopping:
            return True
