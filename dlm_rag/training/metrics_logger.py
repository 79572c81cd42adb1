"""Metrics of a run: JSON lines always, a line on the screen or in a log, W&B when asked for."""

import json
import secrets
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dlm_rag.cli import print_note
from dlm_rag.config import Config
from dlm_rag.energy.meter import format_three_digits
from dlm_rag.errors import ConfigError, summarize_error
from dlm_rag.files.checked_json import parse_json_object
from dlm_rag.files.journal import rewrite_lines
from dlm_rag.files.paths import write_text_atomic

SCREEN_WINDOW_STEPS = 50  # steps that the figures on the screen are means of
VALIDATION_PREFIXES = ("exact_match", "forwards", "nelbo")  # how the names of validation metrics begin
TEXT_METRICS = ("phase", "alarm", "joules_of")  # metrics that are no numbers
REQUIRED_METRICS = ("step", "seconds", "rows", "supervised_tokens")  # what every line of metrics has
SCREEN_LABELS = {  # metrics of the steps, by what they are called on the screen
    "loss": "loss", "name_accuracy": "name accuracy", "pointer_mass": "pointer mass",
    "rollout_reward": "reward", "rollout_exact_match": "sampled EM", "rollout_forwards": "forwards",
    "rollout_searches": "searches",
}  # fmt: skip


class MetricsLogger:
    """Writes `metrics.jsonl` in `folder`; a resumed run replaces what it computes again.

    Other lines stay and are skipped, except a last one that a kill cut short.
    """

    def __init__(self, folder: Path, config: Config, from_step: int, quiet: bool = False) -> None:
        """quiet: nothing is written, as on all processes but the first."""
        self._path, self._quiet = folder / "metrics.jsonl", quiet
        self._last: dict[str, Any] = {}
        if not quiet and self._path.is_file():
            self._rewrite(lambda metrics: metrics if metrics["step"] < from_step else None)
            self._last = next(reversed(self.read_history()), {})
        self._steps = sum(phase.max_steps for phase in config.train.get_phase_configs().values())
        self._recent: deque[dict[str, Any]] = deque(maxlen=SCREEN_WINDOW_STEPS)
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

    def __enter__(self) -> "MetricsLogger":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
        if self._wandb is not None:
            self._wandb.finish()

    def log_step(self, metrics: dict[str, Any]) -> None:
        """The metrics of one step."""
        if self._quiet:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        if self._wandb is not None:
            self._wandb.log(metrics, step=metrics["step"])
        if "alarm" in metrics:
            print_note(f"step {metrics['step'] + 1:,}: {metrics['alarm']}")
        self._recent.append(metrics)
        self._last = metrics
        seconds = sum(m["seconds"] for m in self._recent)
        figures = [
            f"{shown} {self._mean(name):.3f}" for name, shown in SCREEN_LABELS.items() if metrics.get(name)
        ]
        tokens, supervised, rows = (
            sum(m[name] for m in self._recent) / seconds for name in ("tokens", "supervised_tokens", "rows")
        )
        rollouts = "rollout_reward" in metrics
        figures.append(
            f"{rows:,.1f} rollouts/s"
            if rollouts
            else f"{tokens:,.0f} tokens/s, {supervised:,.0f} supervised"
        )
        if "mfu" in metrics:
            figures.append(f"MFU {self._mean('mfu'):.0%}")
        measured = [m for m in self._recent if m.get("joules") is not None]
        if measured:
            joules, steps = (sum(m[name] for m in measured) for name in ("joules", "joules_steps"))
            figures.append(f"{format_three_digits(joules / steps)} J/step")
        for name, form in (("exact_match", "EM {:.1%}"), ("nelbo_per_token", "NELBO {:.3f}")):
            if name in self._validated:
                figures.append(form.format(self._validated[name]))
        done, text = metrics["step"] + 1, " · ".join(figures)
        self._progress.update(self._task, completed=done, figures=text)
        if self._progress.disable and done % SCREEN_WINDOW_STEPS == 0:
            print_note(f"step {done:,}/{self._steps:,} {text}")

    @property
    def has_validation(self) -> bool:
        """Whether the last step has the scores of a validation."""
        return not self._quiet and bool(select_validation_metrics(self._last))

    def log_validation(self, scores: dict[str, float]) -> None:
        """A validation's, to the metrics of the last step."""
        if self._quiet:
            return
        self._last |= scores
        self._rewrite(lambda metrics: self._last if metrics["step"] == self._last["step"] else metrics)
        if self._wandb is not None:
            self._wandb.log(scores, step=self._last["step"])
        self._validated = select_validation_metrics(self._last)

    def _mean(self, name: str) -> float:
        """The mean of a metric over the recent steps that have it."""
        values = [metrics[name] for metrics in self._recent if name in metrics]
        return sum(values) / len(values)

    def read_history(self) -> list[dict[str, Any]]:
        """The metrics of all steps, of this process and those before it."""
        return read_metrics(self._path)

    def _rewrite(self, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        """Rewrites the file with what `change` makes of the metrics of each step."""

        def rewrite(line: bytes) -> bytes | None:
            metrics = parse_metrics(line)
            if metrics is None:
                return line if line.endswith(b"\n") else None
            changed = change(metrics)
            if changed is None or changed == metrics:
                return None if changed is None else line
            return json.dumps(changed).encode()

        rewrite_lines(self._path, rewrite)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics of all steps in a file; none where there is no file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [metrics for line in file if (metrics := parse_metrics(line))]


def parse_metrics(line: bytes) -> dict[str, Any] | None:
    """The metrics of a step, or None where a line is something else."""
    try:
        metrics = parse_json_object(line, "", ConfigError)
    except ConfigError:
        return None
    counted = all(isinstance(metrics.get(name), int | float) for name in REQUIRED_METRICS)
    return metrics if counted and all(map(_is_metric, metrics, metrics.values())) else None


def _is_metric(name: str, value: Any) -> bool:
    """Whether a value of `name` may stand in a line: null where a device could not tell it."""
    if isinstance(value, int):
        return abs(value) < 2**63
    return value is None or isinstance(value, str if name in TEXT_METRICS else float | dict)


def select_validation_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """What a validation added to the metrics of its step."""
    return {name: value for name, value in metrics.items() if name.startswith(VALIDATION_PREFIXES)}


def start_wandb(config: Config, folder: Path) -> Any:
    """A W&B run, or None when metrics go to JSON lines alone; `offline` needs no account.

    Its id is kept in `folder`, so that --resume adds to the same run. Raises `ConfigError` where W&B is
    not installed, or takes no run.
    """
    if config.train.wandb == "off":
        return None
    try:
        import wandb
    except ImportError:
        raise ConfigError("train.wandb needs wandb: install it with `pip install wandb`") from None

    mode: Any = config.train.wandb
    kept = folder / "wandb.id"
    if not kept.is_file():
        write_text_atomic(kept, secrets.token_hex(4))
    try:
        return wandb.init(
            project="dlm_rag", name=folder.name, dir=str(folder), mode=mode, config=asdict(config),
            id=kept.read_text(encoding="utf-8").strip(), resume="allow", allow_val_change=True,
        )  # fmt: skip
    except wandb.Error as error:  # no key, no network
        raise ConfigError(
            f"train.wandb={mode} does not start ({summarize_error(error)}): run `wandb login`, or set it "
            "to offline"
        ) from None
