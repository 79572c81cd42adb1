"""The page of a training: curves, and answers to the same questions as they improve; in one file."""

import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from dlm_rag.files.paths import write_text_atomic
from dlm_rag.page.charts import Line, render_chart
from dlm_rag.page.html import render_html
from dlm_rag.progress import format_duration

MAX_POINTS = 500  # of a curve; of longer ones neighbours are averaged
WRITE_EVERY_SECONDS = 5.0
LATEST_STEPS = 50  # by which the time left goes
HOPS = {f"exact_match_{hops}_hops": f"exact match, {hops} hop{'s' * (hops > 1)}" for hops in range(1, 5)}
# Title, unit, top (0: that of the curve), metrics with their labels.
CHARTS: tuple[tuple[str, str, float, dict[str, str]], ...] = (
    ("Loss", "nats", 0.0, {
        "loss": "training", "pointer_loss": "pointers, training",
        "nelbo_per_token": "NELBO per token, validation",
    }),
    ("Accuracy by kind", "share", 1.0, {
        **HOPS, "exact_match": "exact match, all", "name_accuracy": "masked names, training",
        "pointer_mass": "attention on the right passage", "rollout_exact_match": "rollouts",
    }),
    ("Rollouts", "each", 0.0, {
        "rollout_reward": "reward", "rollout_forwards": "forwards", "rollout_searches": "searches",
    }),
    ("Speed", "tokens/s", 0.0, {
        "tokens_per_second": "all", "supervised_tokens_per_second": "supervised",
    }),
)  # fmt: skip
VALIDATED = {*HOPS, "exact_match", "nelbo_per_token"}  # what only validations tell
NAMES = {name for *_, names in CHARTS for name in names} - VALIDATED
ABOUT = """<p><b>Loss</b> is how surprised the model is by tokens that were masked: lower is better.</p>
<p><b>Accuracy</b> is how often it is right; exact match is that of the real decoder on questions that no
step trains on, by the passages (hops) that an answer takes.</p>
<p><b>Examples</b> are some of these questions, with the answers that each validation got.</p>
"""
Curve = dict[str, float]  # means of some steps by name, with `step`, the last of them


class TrainingPage:
    """Takes the metrics of a run as they come, in little memory; writes the page now and then."""

    def __init__(self, path: Path, run: str, steps: int) -> None:
        """run: its name. steps: that it is to make."""
        self.path, self.about = path, ""
        self._run, self._steps = run, steps
        self._points: list[Curve] = []
        self._size, self._waiting = 1, list[Mapping[str, Any]]()  # steps of a point; those of the next one
        self._validations: list[Mapping[str, Any]] = []
        self._done, self._seconds, self._latest = 0, 0.0, list[float]()
        self._due = 0.0

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        """The metrics of one step, with those of a validation where it has them."""
        self._done, seconds = metrics["step"] + 1, metrics["seconds"]
        self._seconds += seconds
        self._latest = [*self._latest[1 - LATEST_STEPS :], seconds]
        self._waiting.append(metrics)
        if len(self._waiting) == self._size:
            self._points.append(_average(self._waiting))
            self._waiting = []
        if len(self._points) > MAX_POINTS:
            self._points = [_average(self._points[n : n + 2]) for n in range(0, len(self._points), 2)]
            self._size *= 2
        if VALIDATED & metrics.keys():
            self.add_validation(metrics)

    def add_validation(self, metrics: Mapping[str, Any]) -> None:
        """A validation's metrics: those of its step with the scores, and `examples` by question."""
        self._validations.append(metrics)

    def write(self, state: str = "") -> None:
        """Writes the page where it is due; state: why it is the last one, in words, which is always due."""
        if not state and time.monotonic() < self._due:
            return
        write_text_atomic(self.path, self.render(state))
        self._due = time.monotonic() + WRITE_EVERY_SECONDS

    def render(self, state: str = "") -> str:
        """The text of the page, which loads itself again until it has a `state`."""
        charts = "".join(self._render_charts())
        body = (
            f"<body>\n<main>\n<h1>Training {escape(self._run)}</h1>\n"
            f'<p class="dim">{escape(self.about)}</p>\n'
            f'{self._render_progress(state)}{ABOUT}<div id="charts">{charts}</div>\n'
            f"{render_examples(self._validations)}</main>\n</body>\n"
        )
        return render_html(
            f"Training {self._run}", body, "report.css", ("training.js",), {"live": not state}
        )

    def _render_progress(self, state: str) -> str:
        share = self._done / max(1, self._steps)
        said = [f"step {self._done:,} of {self._steps:,}", f"{format_duration(self._seconds)} of steps"]
        if not state and self._latest:
            said.append(f"{format_duration((self._steps - self._done) * fmean(self._latest))} left")
        clock = time.strftime("%H:%M:%S")
        live = f'<label id="follow"><input type="checkbox" checked> Follow</label> as of {clock}'
        return (
            f'<div id="state"><progress max="1" value="{share:.4f}" aria-label="Steps made"></progress>'
            f"<b>{' · '.join(said)}</b> <span>{escape(state) or live}</span></div>\n"
        )

    def _render_charts(self) -> list[str]:
        waiting = [_average(self._waiting)] if self._waiting else []
        points, found = [*self._points, *waiting], []
        for title, unit, top, names in CHARTS:
            lines = []
            for name, label in names.items():
                marked = name in VALIDATED
                told = [p for p in (self._validations if marked else points) if p.get(name) is not None]
                if told and (marked or any(point[name] for point in told)):
                    lines.append(Line(label, [(p["step"] + 1, p[name]) for p in told], marked))
            if lines:
                found.append(render_chart(title, unit, lines, max(self._steps, self._done), top))
        return found


def _average(points: Sequence[Mapping[str, Any]]) -> Curve:
    """One point of several; a metric that only some have is the mean of these."""
    mean: Curve = {"step": points[-1]["step"]}
    for name in NAMES:
        values = [point[name] for point in points if isinstance(point.get(name), int | float)]
        if values:
            mean[name] = fmean(values)
    return mean


def render_examples(validations: Sequence[Mapping[str, Any]]) -> str:
    """The questions with their answers over time, of which the same one is told once; may be empty."""
    cards: dict[str, list[str]] = {}
    latest: dict[str, str] = {}
    golden: dict[str, str] = {}
    for validation in validations:
        for question, found in (validation.get("examples") or {}).items():
            golden[question] = found["gold"]
            if latest.get(question) == found["answer"]:
                continue
            latest[question] = found["answer"]
            right = "right" if found["right"] else "wrong"
            cards.setdefault(question, []).append(
                f"<li><small>step {validation['step'] + 1:,}</small> {escape(found['answer'] or '(none)')} "
                f'<span class="{right}">{right}</span></li>'
            )
    if not cards:
        return ""
    shown = "".join(
        f"<article><h3>{escape(question)}</h3><ol>{''.join(answers)}</ol>"
        f'<p class="dim">gold: {escape(golden[question])}</p></article>'
        for question, answers in cards.items()
    )
    return f'<h2>Examples</h2>\n<div id="examples">{shown}</div>\n'


def make_training_page(path: Path, folder: Path, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Writes the page of a run from all of its metrics."""
    page = TrainingPage(path, str(folder), metrics[-1]["step"] + 1)
    for line in metrics:
        page.add_step(line)
    page.write("as its metrics.jsonl has it")
