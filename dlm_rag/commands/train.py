"""Train a denoiser, from random weights or a public checkpoint, to answer from what it retrieves.

    dlm-rag train --config tiny.yaml             # a small model, on invented worlds
    dlm-rag train --config tiny.yaml --resume    # continue from the last checkpoint
    dlm-rag train --config gb300.yaml --plan     # memory, time and cost, before anything is allocated
    torchrun --nproc-per-node 2 -m dlm_rag train --config world.yaml    # on two processes

The folder of --out gets metrics.jsonl, checkpoints/ and, at the end, model/. Then ask it:

    dlm-rag sample --model runs/tiny/model --corpus runs/tiny/validation/corpus.jsonl "Who ...?"

Ctrl-C saves a checkpoint and exits with status 130; a second one exits at once. SIGTERM saves a checkpoint
and exits with status 0. In a checkout, `python train.py` is the same program.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dlm_rag.cli import check_writable, print_note
from dlm_rag.commands.arguments import check_read, parse_command_line
from dlm_rag.config.fields import check_effects
from dlm_rag.errors import ConfigError
from dlm_rag.files.build_once import DIGESTS_FILE
from dlm_rag.files.journal import hold_file_lock
from dlm_rag.files.paths import make_folder
from dlm_rag.machine import limit_cuda_allocator

TRAIN_SETTINGS = (
    "model", "-model.device_map", "-model.dtype", "prompt", "retrieval", "-retrieval.corpus",
    "-retrieval.url", "-retrieval.timeout", "-retrieval.oracle", "decode", "engine", "train", "data",
    "plan", "out", "energy",
)  # fmt: skip


def main(argv: list[str]) -> None:
    options = {
        "resume": (False, "go on from the last checkpoint"),
        "plan": (False, "print what the run takes in memory, time and energy, and do nothing"),
    }
    words = parse_command_line(__doc__ or "", argv, TRAIN_SETTINGS, options=options)
    config, resume = words.config, words.options["resume"]
    folder = Path(config.out or "runs/train")
    check_effects([(config, ["data.documents", "data.questions"])])
    from dlm_rag.engine.store import check_store
    from dlm_rag.training.task import check_task_settings

    check_task_settings(config)
    check_store(config.engine)
    if words.options["plan"]:
        from dlm_rag.training.plan import print_plan

        print_plan(config)
        return
    check_read(words.settings, ("-plan", *TRAIN_SETTINGS))
    prepare_run_folder(folder, resume)
    from dlm_rag.training.checkpoints import find_latest_checkpoint, skip_damaged_checkpoints
    from dlm_rag.training.distributed import DistributedContext, translate_distributed_errors
    from dlm_rag.training.initial_model import open_initial_model
    from dlm_rag.training.plan import check_run_fits
    from dlm_rag.training.sources import remove_stale_worlds
    from dlm_rag.training.trainer import run_training

    stop = StopSignal()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    processes = DistributedContext.init()
    with ExitStack() as stack:
        stack.callback(processes.destroy)
        stack.enter_context(translate_distributed_errors())
        lock = hold_file_lock(folder / "train.lock", f"the run in {folder}")
        processes.check_on_main(lambda: stack.enter_context(lock))
        processes.check_shared_folder(folder)
        passed_over = skip_damaged_checkpoints(folder, processes)
        for line in passed_over if processes.is_main else ():
            print_note(line)
        begins = processes.is_main and find_latest_checkpoint(folder) is None
        if resume and begins:
            print_note(f"{folder} has no checkpoint: the run begins again")
        asked = config.train.eval_questions * config.train.max_hops
        processes.check_on_main(lambda: remove_stale_worlds(folder, asked, begins))
        device = processes.local_device(config.model.device)
        check_run_fits(config, processes.world_size, device)  # before anything is fetched
        limit_cuda_allocator(config.engine.memory_gib, device)
        run_training(config, open_initial_model(config), folder, processes, stop)
    if stop.interrupted:
        raise KeyboardInterrupt


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
    """Raises `ConfigError` where a folder is of something else, or not as `resume` says."""
    here = folder.iterdir() if folder.is_dir() else ()
    names = sorted(path.name for path in here if not path.name.startswith("."))
    foreign = [name for name in names if name.partition(".")[0] not in RUN_FILE_STEMS]
    begun = "checkpoints" in names or "metrics.jsonl" in names
    if not begun:  # an attempt may have left worlds, which it has marked
        made = {name for name in ("validation", "documents") if (folder / name / DIGESTS_FILE).is_file()}
        foreign += sorted({*names} & {"model", "validation", "documents"} - made)
    if resume and not begun and (foreign or not names):
        raise ConfigError(f"{folder} holds no run to go on with: name another, or leave --resume out")
    if begun and not resume:
        raise ConfigError(f"{folder} holds a run already: add --resume to go on, or name another --out")
    if foreign and not resume:
        raise ConfigError(f"{folder} holds '{foreign[0]}', which is of no run: name a new or empty folder")
    for name in RUN_SUBFOLDERS:
        if (folder / name).is_file():  # which would end the run at its first checkpoint, or after its last
            raise ConfigError(f"{folder / name} is a file and must be a folder: name another --out")
    make_folder(folder, "out=")
    # Where a run begins, by no name of one: another process of it may look.
    check_writable(str(folder / ("metrics.jsonl" if begun else ".metrics.jsonl")), "out")
