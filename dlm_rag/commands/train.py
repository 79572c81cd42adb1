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

from dlm_rag.cli import check_writable, print_note
from dlm_rag.commands.arguments import check_read, parse_command_line
from dlm_rag.config.ineffective_settings import check_effects
from dlm_rag.errors import ConfigError
from dlm_rag.files.journal import acquire_file_lock, release_file_lock
from dlm_rag.files.paths import open_atomic_folder

if TYPE_CHECKING:
    from filelock import FileLock

    from dlm_rag.config import Config
    from dlm_rag.training.distributed import DistributedContext
    from dlm_rag.training.energy import EnergyWindows
    from dlm_rag.training.initial_weights import InitialModel
    from dlm_rag.training.metrics_logger import MetricsLogger
    from dlm_rag.training.task import Validation
    from dlm_rag.training.trainer import Trainer

TRAIN_SETTINGS = (
    "model", "retrieval", "-retrieval.corpus", "-retrieval.url", "-retrieval.timeout", "-retrieval.oracle",
    "decode", "engine", "train", "data", "plan", "out", "energy",
)  # fmt: skip
TRAIN_SWITCHES = {
    "resume": "go on from the last checkpoint",
    "plan": "print what the run takes in memory, time and energy, and do nothing",
}


def main(argv: list[str]) -> None:
    words = parse_command_line(__doc__ or "", argv, TRAIN_SETTINGS, switches=TRAIN_SWITCHES)
    config, resume = words.config, "resume" in words.switches
    folder = Path(config.out or "runs/train")
    check_train_settings(config)
    if "plan" in words.switches:
        from dlm_rag.training.planning.plan_report import print_plan

        print_plan(config)
        return
    check_read(words.settings, ("-plan", *TRAIN_SETTINGS))
    prepare_run_folder(folder, resume)
    from dlm_rag.decode.memory_budget import limit_cuda_allocator
    from dlm_rag.training.checkpoints import find_latest_checkpoint, skip_damaged_checkpoints
    from dlm_rag.training.distributed import DistributedContext, translate_failures
    from dlm_rag.training.initial_model import open_initial_model
    from dlm_rag.training.planning.plan import check_run_fits

    stop = StopSignal()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    processes = DistributedContext.init(config.train.timeout_minutes)
    try:
        with translate_failures(), lock_run_folder(folder, processes):
            processes.check_shared_folder(folder)
            passed_over = skip_damaged_checkpoints(folder, processes)
            for line in passed_over if processes.is_main else ():
                print_note(line)
            if resume and processes.is_main and find_latest_checkpoint(folder) is None:
                print_note(f"{folder} has no checkpoint: the run begins again")
            device = processes.local_device(config.model.device)
            check_run_fits(config, processes.world_size, device)  # before anything is fetched
            limit_cuda_allocator(config.engine, device)
            run_training(config, open_initial_model(config), folder, processes, stop)
    finally:
        processes.destroy()
    if stop.interrupted:
        raise KeyboardInterrupt


def check_train_settings(config: "Config") -> None:
    """Raises `ConfigError` for data that is not trained on, and settings that an objective excludes."""
    check_effects([(config, ["data.documents", "data.questions", "train.counterfactual_share"])])
    from dlm_rag.training.tasks import check_task_settings

    check_task_settings(config)


class StopSignal(threading.Event):
    """Set by the first SIGTERM or Ctrl-C: the step that is under way is the last, and is saved."""

    interrupted = 0.0  # when Ctrl-C was pressed

    @contextmanager
    def catch_interrupt(self) -> Iterator[None]:
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
RUN_SUBFOLDERS = ("checkpoints", "validation", "documents", "model", "wandb")
RUN_FILE_STEMS = {"metrics", "train", *RUN_SUBFOLDERS}


def prepare_run_folder(folder: Path, resume: bool) -> None:
    """Raises `ConfigError` where the folder cannot be one, or is not what `resume` says.

    A run begins in a folder that is new or empty, or holds what another that was stopped before its
    first step has left; what is gone on with must be a run.
    """
    try:
        here = sorted(folder.iterdir()) if folder.is_dir() else []
        names = [path.name for path in here if not path.name.startswith(".")]
        foreign = [name for name in names if name.partition(".")[0] not in RUN_FILE_STEMS]
        begun = "checkpoints" in names or "metrics.jsonl" in names
        if resume and not begun and (foreign or not names):
            raise ConfigError(f"{folder} holds no run to go on with: name another, or leave --resume out")
        if not resume and begun:
            raise ConfigError(f"{folder} holds a run already: add --resume to go on, or name another --out")
        if not resume and foreign:
            raise ConfigError(
                f"{folder} holds '{foreign[0]}', which is of no run: name a new or empty folder"
            )
        if files := [part for part in RUN_SUBFOLDERS if (folder / part).is_file()]:
            raise ConfigError(f"{folder / files[0]} is a file and must be a folder: name another --out")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={folder} cannot be a folder: {error.strerror}") from None
    check_writable(str(folder / "metrics.jsonl"), "out")


@contextmanager
def lock_run_folder(folder: Path, processes: "DistributedContext") -> Iterator[None]:
    """Keeps other runs out of the folder; raises `ConfigError`, on all processes, where one is in it."""
    locks: list[FileLock] = []
    name = folder / "train.lock"
    processes.check_on_main(lambda: locks.append(acquire_file_lock(name, f"the run in {folder}")))
    try:
        yield
    finally:
        for lock in locks:
            release_file_lock(lock)


def run_training(
    config: "Config",
    origin: "InitialModel",
    folder: Path,
    processes: "DistributedContext",
    stop: StopSignal,
) -> None:
    """The phases, one after another; each begins with the checkpoint of the one before."""
    from dlm_rag.energy.meter import open_meter
    from dlm_rag.machine import get_code_commit
    from dlm_rag.training.checkpoints import find_resume_point
    from dlm_rag.training.energy import EnergyWindows
    from dlm_rag.training.metrics_logger import MetricsLogger
    from dlm_rag.training.trainer import Trainer, free_memory, open_phase

    commit = get_code_commit()  # of the code that runs: at the end the checkout may be another
    step, left = find_resume_point(folder, list(config.train.get_phase_configs()))
    say = print_note if processes.is_main else lambda text: None
    if step:
        say(f"going on from step {step}")
    # What is wrong with the data of the last phase is said before the first begins.
    opened = {phase: open_phase(config, phase, origin, folder) for phase in left}
    windows = None
    if processes.is_main:
        rows = max(task.rows for task, _ in opened.values()) / processes.world_size
        warn_slow_steps(origin, rows, processes.local_device(config.model.device).type)
    with MetricsLogger(folder, config, from_step=step, quiet=not processes.is_main) as report:
        for phase, (task, validation) in opened.items():
            trainer = Trainer(task, processes)
            trainer.restore()
            with stop.catch_interrupt():
                if windows is None:
                    meter = open_meter(config.energy, trainer.device, host=processes.local_rank == 0)
                    windows = EnergyWindows(meter, processes)
                stopped = run_training_phase(trainer, validation, report, stop, windows)
            if (stopped or phase == left[-1]) and (energy := windows.stop_and_describe()):
                say(energy)
            if stopped:
                say(f"stopped after step {trainer.state.step}, which is saved: --resume goes on")
                return
            if phase == left[-1]:
                export_model(trainer, folder / "model", config, report, commit)
            del trainer
            free_memory()


def warn_slow_steps(origin: "InitialModel", rows: float, device: str) -> None:
    """Warns where a step takes long on this machine; rows: of one process in a step."""
    from dlm_rag.model.flops import count_encode_flops, warn_slow_compute

    canvas = origin.config.canvas_length
    each = count_encode_flops(origin.config, [canvas], [canvas], [canvas], 4).flops_with_backward(False)
    warn_slow_compute(rows * each, f"a training step with max_new_tokens={canvas}", device)


def export_model(
    trainer: "Trainer", folder: Path, config: "Config", report: "MetricsLogger", commit: str | None
) -> None:
    """Writes the trained model and its card; all processes take part."""
    from dlm_rag.training.model_card import write_model_card

    is_main = trainer.processes.is_main
    with open_atomic_folder(folder) if is_main else nullcontext(folder) as model:
        trainer.export(model)
        if is_main:
            write_model_card(model, trainer.denoiser, config, report.read_history(), commit)
    if is_main:
        print_note(f"the model is in {folder}: sample --model reads it")


def run_training_phase(
    trainer: "Trainer", validation: "Validation", report: "MetricsLogger", stop: StopSignal,
    windows: "EnergyWindows",
) -> bool:  # fmt: skip
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
        report.log_step(metrics | speed | windows.add_step(metrics))
        stopping = processes.any_rank(stop.is_set())
        if stopping or trainer.finished or any(state.phase_step % steps == 0 for steps in often):
            trainer.save()
        if stopping:
            return True
