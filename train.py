"""Train a denoiser from scratch on invented worlds, to answer by reading what it retrieves.

    python train.py --config tiny.yaml             # the whole way on a small scale
    python train.py --config tiny.yaml --resume    # goes on where a run was stopped, however it was
    torchrun --nproc-per-node 2 train.py --config world.yaml    # on two processes

The folder of --out gets metrics.jsonl, checkpoints/ and, at the end, model/, which sample.py reads:

    python sample.py --model runs/tiny/model --corpus runs/tiny/validation/corpus.jsonl "Who ...?"
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag.cli import parse, run
from dlm_rag.errors import ConfigError

if TYPE_CHECKING:
    from dlm_rag.config import Config
    from dlm_rag.training.trainer import Trainer


def main(argv: list[str]) -> None:
    words = parse(__doc__ or "", argv, typed=False, switches={"resume": "go on from the last checkpoint"})
    config = words.config
    folder = Path(config.out or "runs/train")
    if (folder / "checkpoints").exists() and "resume" not in words.switches:
        raise ConfigError(f"{folder} holds a run already: add --resume to go on, or name another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={folder} cannot be a folder: {error.strerror}") from None
    from dlm_rag.training.parallel import Processes
    from dlm_rag.training.trainer import Trainer

    processes = Processes.join()
    trainer = Trainer(config, folder, processes)
    if "resume" in words.switches and trainer.restore() and processes.first:
        print(f"going on from step {trainer.state.step}", file=sys.stderr)
    if processes.first:
        train(trainer, config, folder)
    else:
        while trainer.state.step < config.train.steps:
            trainer.step()
    processes.leave()


def train(trainer: "Trainer", config: "Config", folder: Path) -> None:
    """The loop, in plain steps."""
    import torch

    from dlm_rag.training.card import write_card
    from dlm_rag.training.report import Report
    from dlm_rag.training.validation import Validation

    settings, state = config.train, trainer.state
    validation = Validation(config, folder / "validation")
    with Report(folder, config, from_step=state.step) as report:
        while state.step < settings.steps:
            start = time.perf_counter()
            metrics: dict[str, Any] = trainer.step()
            metrics["seconds"] = time.perf_counter() - start
            if state.step % settings.validate_every == 0 or state.step == settings.steps:
                metrics |= validation.scores(trainer.denoiser, trainer.tokenizer)
            report.add(metrics)
            if state.step % settings.save_every == 0 or state.step == settings.steps:
                trainer.save()
    trainer.export(folder / "model", torch.bfloat16)
    write_card(folder / "model", trainer.denoiser, config, report.lines())


if __name__ == "__main__":
    run(main)
