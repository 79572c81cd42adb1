"""Metrics of a run: JSON lines always, a line on the screen or in a log, W&B when asked for."""

import json
import os
import sys
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dlm_rag.config import Config
from dlm_rag.program import note

WINDOW = 50  # steps that the figures on the screen are means of
VALIDATED = ("exact_match", "forwards", "nelbo")  # how the names of validation metrics begin
SHOWN = ("loss", "name_accuracy", "pointer_mass")


class Report:
    """Writes `metrics.jsonl` in `folder`; a resumed run rewrites what it computes again."""

    def __init__(self, folder: Path, config: Config, from_step: int, quiet: bool = False) -> None:
        """quiet: nothing is written, as on all processes but the first."""
        self._path, self._quiet = folder / "metrics.jsonl", quiet
        if not quiet:
            kept = []
            if self._path.is_file():
                lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
                kept = [x for x in lines if x.endswith("\n") and json.loads(x)["step"] < from_step]
            self._path.write_text("".join(kept), encoding="utf-8")
            self._last: dict[str, Any] = json.loads(kept[-1]) if kept else {}
        self._steps = sum(phase.steps for phase in config.train.in_phases().values())
        self._recent: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._validated: dict[str, float] = {}
        self._wandb = None if quiet else start_wandb(config, folder)
        self._progress = Progress(
            TextColumn("step {task.completed:,}/{task.total:,}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=quiet or not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("train", total=self._steps, completed=from_step, figures="")

    def __enter__(self) -> "Report":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
        if self._wandb is not None:
            self._wandb.finish()

    def add(self, metrics: dict[str, Any]) -> None:
        """The metrics of one step."""
        if self._quiet:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        if self._wandb is not None:
            self._wandb.log(metrics, step=metrics["step"])
        self._recent.append(metrics)
        self._last = metrics
        seconds = sum(m["seconds"] for m in self._recent)
        rates = [sum(m[name] for m in self._recent) / seconds for name in ("tokens", "supervised_tokens")]
        figures = [
            f"{name.replace('_', ' ')} {self._mean(name):.3f}" for name in SHOWN if metrics.get(name)
        ]
        figures.append(f"{rates[0]:,.0f} tokens/s, {rates[1]:,.0f} supervised")
        if "mfu" in metrics:
            figures.append(f"MFU {self._mean('mfu'):.0%}")
        for name, form in (("exact_match", "EM {:.1%}"), ("nelbo_per_token", "NELBO {:.3f}")):
            if name in self._validated:
                figures.append(form.format(self._validated[name]))
        done, text = metrics["step"] + 1, " · ".join(figures)
        self._progress.update(self._task, completed=done, figures=text)
        if self._progress.disable and done % WINDOW == 0:
            note(f"step {done:,}/{self._steps:,} {text}")

    @property
    def validated(self) -> bool:
        """Whether the last step has the scores of a validation."""
        return not self._quiet and bool(validation_of(self._last))

    def add_scores(self, scores: dict[str, float]) -> None:
        """A validation's, to the metrics of the last step."""
        if self._quiet:
            return
        old = len(json.dumps(self._last)) + 1
        self._last |= scores
        with self._path.open("r+b") as file:  # one write, which is longer than what it replaces
            file.seek(-old, os.SEEK_END)
            file.write(json.dumps(self._last).encode() + b"\n")
        if self._wandb is not None:
            self._wandb.log(scores, step=self._last["step"])
        self._validated = validation_of(self._last)

    def _mean(self, name: str) -> float:
        """Over the recent steps whose task told it."""
        values = [metrics[name] for metrics in self._recent if name in metrics]
        return sum(values) / len(values)

    def lines(self) -> list[dict[str, Any]]:
        """The metrics of all steps, of this process and those before it."""
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]


def validation_of(metrics: dict[str, Any]) -> dict[str, float]:
    """What a validation added to the metrics of its step."""
    return {name: value for name, value in metrics.items() if name.startswith(VALIDATED)}


def start_wandb(config: Config, folder: Path) -> Any:
    """A W&B run, or None when metrics go to JSON lines alone; `offline` needs no account."""
    if config.train.wandb == "off":
        return None
    import wandb

    mode: Any = config.train.wandb
    return wandb.init(
        project="dlm_rag", name=folder.name, dir=str(folder), mode=mode, config=asdict(config)
    )
