"""Metrics of a run: JSON lines always, a line on the screen or in a log, W&B when asked for."""

import json
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dlm_rag.cli import print_note
from dlm_rag.config import Config
from dlm_rag.errors import ConfigError
from dlm_rag.files.checked_json import parse_json_object
from dlm_rag.files.paths import open_atomic_file, write_text_atomic
from dlm_rag.progress import LOG_EVERY_SECONDS, can_draw, format_duration, report_progress
from dlm_rag.text import normalize_whitespace

Metrics = dict[str, Any]

SCREEN_WINDOW_STEPS = 50  # steps that the figures on the screen are means of
VALIDATION_PREFIXES = ("exact_match", "forwards", "nelbo")  # how the names of validation metrics begin
REQUIRED_METRICS = ("step", "seconds", "rows", "supervised_tokens")  # what every line of metrics has
SCREEN_FORMATS = {  # of metrics of the steps
    "loss": "loss {:.3f}", "name_accuracy": "name accuracy {:.3f}", "pointer_mass": "pointer mass {:.3f}",
    "rollout_reward": "reward {:.3f}", "rollout_exact_match": "sampled EM {:.3f}",
    "rollout_forwards": "forwards {:.3f}", "rollout_searches": "searches {:.3f}", "mfu": "MFU {:.0%}",
}  # fmt: skip
VALIDATION_FORMATS = {"exact_match": "EM {:.1%}", "nelbo_per_token": "NELBO {:.3f}"}


class MetricsLogger:
    """Writes `metrics.jsonl` in `folder`; a resumed run replaces what it computes again."""

    def __init__(self, folder: Path, config: Config, from_step: int, quiet: bool = False) -> None:
        """quiet: nothing is written, as on all processes but the first."""
        self._path, self._quiet = folder / "metrics.jsonl", quiet
        self._last: Metrics = {"step": from_step - 1}
        if not quiet and self._path.is_file():
            self._drop_steps(from_step)
        self._steps = config.train.max_steps
        self._recent: deque[Metrics] = deque(maxlen=SCREEN_WINDOW_STEPS)
        self._validated: Metrics = {}
        self._wandb = None if quiet else start_wandb(config, folder)
        self._begun, self._from_step, self._said = time.perf_counter(), from_step, 0.0
        # In a log the line of metrics has the time left, once a minute.
        self._bar = report_progress("training", self._steps, done=from_step) if can_draw() else None

    def __enter__(self) -> "MetricsLogger":
        self._advance = self._bar.__enter__() if self._bar else lambda more: None
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.__exit__(None, None, None)
        if self._wandb is not None:
            self._wandb.finish()

    def log_step(self, metrics: Metrics) -> None:
        """The metrics of one step."""
        if self._quiet:
            return
        with self._path.open("ab") as file:
            file.write(encode_metrics(metrics))
        if self._wandb is not None:
            self._wandb.log(metrics, step=metrics["step"])
        done, self._last, now = metrics["step"] + 1, metrics, time.perf_counter()
        self._recent.append(metrics)
        # In a terminal after so many steps; in a log after as many, then once a minute, and at the end.
        due = done % SCREEN_WINDOW_STEPS == 0
        if not self._bar:
            late = self._said and now - self._said >= LOG_EVERY_SECONDS
            due = bool((due and not self._said) or done == self._steps or late)
        if due:
            self._said = now
            left = (self._steps - done) * (now - self._begun) / (done - self._from_step)
            print_note(
                f"step {done:,}/{self._steps:,} {describe_steps(self._recent, self._validated)} · "
                f"{format_duration(left)} left"
            )
        self._advance(1)

    @property
    def has_validation(self) -> bool:
        """Whether the last step has the scores of a validation."""
        return not self._quiet and bool(select_validation_metrics(self._last))

    def log_validation(self, scores: dict[str, float]) -> None:
        """Adds the scores of a validation to the metrics of the last step, whose line is written anew."""
        if self._quiet:
            return
        old, self._last = encode_metrics(self._last), self._last | scores
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.is_file() else []
        self._write([*(line for line in lines if line != old), encode_metrics(self._last)])
        if self._wandb is not None:
            self._wandb.log(scores, step=self._last["step"])
        self._validated = select_validation_metrics(self._last)
        if (done := self._last["step"] + 1) == self._steps:  # no later line would show it
            print_note(f"validation after step {done:,}{describe_validation(self._validated)}")

    def _drop_steps(self, begin: int) -> None:
        """Drops the lines of steps from `begin` on, and a last line that was cut short; others stay."""
        kept = []
        for line in self._path.read_bytes().splitlines(keepends=True):
            metrics = parse_metrics(line)
            if metrics is not None and metrics["step"] < begin:
                self._last = metrics
                kept.append(encode_metrics(metrics))
            elif metrics is None and line.endswith(b"\n"):
                kept.append(line)
        self._write(kept)

    def _write(self, lines: list[bytes]) -> None:
        with open_atomic_file(self._path) as scratch:
            scratch.write_bytes(b"".join(lines))


def describe_steps(recent: Sequence[Metrics], validated: Metrics) -> str:
    """Means over recent steps, what was done in a second, and the last validation, in a line."""
    last, seconds = recent[-1], sum(metrics["seconds"] for metrics in recent)

    def total(name: str) -> float:
        return sum(metrics[name] for metrics in recent if is_number(metrics.get(name)))

    shown = [
        form.format(total(name) / sum(is_number(metrics.get(name)) for metrics in recent))
        for name, form in SCREEN_FORMATS.items()
        if last.get(name) and is_number(last[name])
    ]
    if "rollout_reward" in last:
        shown.append(f"{total('rows') / seconds:,.1f} rollouts/s")
    else:
        tokens, supervised = (total(name) / seconds for name in ("tokens", "supervised_tokens"))
        shown.append(f"{tokens:,.0f} tokens/s, {supervised:,.0f} supervised")
    return " · ".join(shown) + describe_validation(validated)


def describe_validation(validated: Metrics) -> str:
    """The scores of a validation that a line has room for, each after a dot."""
    shown = {name: form for name, form in VALIDATION_FORMATS.items() if name in validated}
    return "".join(f" · {form.format(validated[name])}" for name, form in shown.items())


def read_metrics(path: Path) -> list[Metrics]:
    """The metrics of all steps in a file; none where there is no file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [metrics for line in file if (metrics := parse_metrics(line))]


def encode_metrics(metrics: Metrics) -> bytes:
    """The line of a step; null stands for a number that is not finite, which JSON does not have. Numbers of
    numpy and torch are taken as such; what is no value of JSON is shown as text."""
    metrics = {k: v.item() if getattr(v, "ndim", None) == 0 else v for k, v in metrics.items()}
    floats = {name: value for name, value in metrics.items() if isinstance(value, float)}
    lost = [name for name, value in floats.items() if not math.isfinite(value)]
    return f"{json.dumps(metrics | dict.fromkeys(lost), default=str)}\n".encode()


def parse_metrics(line: bytes) -> Metrics | None:
    """The metrics of a step, whose `REQUIRED_METRICS` are numbers; None where a line is something else."""
    try:
        metrics = parse_json_object(line, "", ConfigError)
    except ConfigError:
        return None
    return metrics if all(is_number(metrics.get(name)) for name in REQUIRED_METRICS) else None


def is_number(value: Any) -> bool:
    """Whether a metric can be summed up and drawn."""
    return isinstance(value, int | float) and abs(value) < 2**63


def select_validation_metrics(metrics: Metrics) -> Metrics:
    """What a validation added to the metrics of its step."""
    return {name: value for name, value in metrics.items() if name.startswith(VALIDATION_PREFIXES)}


def start_wandb(config: Config, folder: Path) -> Any:
    """A W&B run, whose id is kept in `folder` for --resume; None if W&B is off. `offline` needs no account.
    Raises `ConfigError` where W&B takes no run."""
    mode: Any = config.train.wandb
    if mode == "off":
        return None
    import wandb  # takes a second

    for name in [name for name in os.environ if name.startswith("WANDB_") and not os.environ[name].strip()]:
        del os.environ[name]  # an empty variable is one that is not set; W&B takes it for a wrong value
    kept = folder / "wandb.id"
    if not kept.is_file():
        write_text_atomic(kept, secrets.token_hex(4))
    try:
        return wandb.init(
            project="dlm_rag", name=folder.name, dir=str(folder), mode=mode, config=asdict(config),
            id=kept.read_text(encoding="utf-8").strip(), resume="allow", allow_val_change=True,
        )  # fmt: skip
    except (wandb.Error, ValueError) as error:  # no key, no network, a variable that W&B cannot read
        reason = normalize_whitespace(str(error)).partition(" [type=")[0][:300]  # not the value, a key say
        raise ConfigError(
            f"train.wandb={mode} does not start ({reason}): run `wandb login`, set it to offline, or mend "
            "WANDB_* in the environment"
        ) from None
