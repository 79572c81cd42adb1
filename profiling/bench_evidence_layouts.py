"""Which evidence layout learns best, for equal time and for equal rows.

    OMP_NUM_THREADS=1 python profiling/bench_evidence_layouts.py --workers 2 --config tiny.yaml --out
    runs/layouts \\
        train.decay_fraction=0 retrieval.top_k=2 train.max_steps=1200 train.eval_steps=300

Trains a denoiser in every layout for each of three seeds, all on the same examples; the learning rate
should not fall, so that every moment of a run can be compared. Equal rows: after the last step. Equal
time: when the fastest layout had done its last step. Intervals are of Student's t over the seeds, for
the difference from `joint` of the same seed. --workers: runs side by side, which share the machine; a
finished run is not repeated.
"""

import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from dlm_rag.cli import print_note, run_program
from dlm_rag.commands.cli_args import parse_command_line
from dlm_rag.config import Config
from dlm_rag.errors import ConfigError
from dlm_rag.files.atomic import write_text_atomic
from dlm_rag.model.denoiser_config import EVIDENCE_LAYOUTS

SEEDS = (0, 1, 2)
T_95 = 4.303  # of Student's t with two degrees of freedom
METRICS = {"NELBO per token": "nelbo_per_token", "exact match": "exact_match"}


def main(argv: list[str]) -> None:
    options = {"workers": (1, "runs side by side")}
    words = parse_command_line(__doc__ or "", argv, typed=False, options=options)
    config, workers = words.config, words.options["workers"]
    if config.out is None:
        raise ConfigError("the runs need --out FOLDER")
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    keys = [(layout, seed) for seed in SEEDS for layout in EVIDENCE_LAYOUTS]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for key, points in zip(
            keys, pool.map(partial(load_or_train_layout, config, out), keys), strict=True
        ):
            runs[key] = points
            print_note(f"{key[0]}, seed {key[1]}: {points[-1]}")
    for title, chosen in (
        ("equal rows", {key: points[-1] for key, points in runs.items()}),
        (
            "equal time",
            {
                key: validation_at_time(points, fastest_layout_seconds(runs, key[1]))
                for key, points in runs.items()
            },
        ),
    ):
        print_layout_table(title, chosen)


def load_or_train_layout(config: Config, out: Path, key: tuple[str, int]) -> list[dict[str, Any]]:
    """The points of a run of that layout and seed, from its file where it was done before."""
    layout, seed = key
    path = out / f"{layout}-{seed}.json"
    if not path.exists():
        model = replace(config.model, evidence_layout=layout)
        config = replace(config, model=model, train=replace(config.train, seed=seed))
        points = train_layout(config, out / f"{layout}-{seed}")
        write_text_atomic(path, json.dumps(points, indent=2) + "\n")
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def train_layout(config: Config, folder: Path) -> list[dict[str, Any]]:
    """A run; its validations, with the rows seen and the seconds spent on training until then."""
    from dlm_rag.training.phase_setup import open_trainer

    trainer, validation = open_trainer(config, folder)
    points, seconds, rows = [], 0.0, 0
    while trainer.state.step < config.train.max_steps:
        start = time.perf_counter()
        rows += int(trainer.step()["rows"])
        seconds += time.perf_counter() - start
        if trainer.state.step % config.train.eval_steps == 0:
            scores = validation.compute_scores(trainer)
            points.append({"rows": rows, "seconds": round(seconds, 1), **scores})
    return points


def fastest_layout_seconds(runs: dict[tuple[str, int], list[dict[str, Any]]], seed: int) -> float:
    """Seconds of the layout that was done first."""
    return min(points[-1]["seconds"] for (_, of), points in runs.items() if of == seed)


def validation_at_time(points: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The last validation by that time; the first one where there is none yet."""
    return next((point for point in reversed(points) if point["seconds"] <= seconds), points[0])


def print_layout_table(title: str, chosen: dict[tuple[str, int], dict[str, Any]]) -> None:
    headings = [heading for name in METRICS for heading in (name, f"{name}, less joint's")]
    table = Table("layout", "rows", "seconds", *headings, title=title, title_justify="left")
    for layout in EVIDENCE_LAYOUTS:
        ours = [chosen[layout, seed] for seed in SEEDS]
        cells = [f"{fmean(p['rows'] for p in ours):,.0f}", f"{fmean(p['seconds'] for p in ours):,.0f}"]
        for metric in METRICS.values():
            values = [point[metric] for point in ours]
            less = [v - chosen["joint", seed][metric] for v, seed in zip(values, SEEDS, strict=True)]
            half = T_95 * stdev(less) / len(less) ** 0.5
            cells.append(f"{fmean(values):.3f} ({', '.join(f'{v:.2f}' for v in values)})")
            cells.append("-" if layout == "joint" else f"{fmean(less):+.3f} ± {half:.3f}")
        table.add_row(layout, *cells)
    Console(file=sys.stdout).print(table)


if __name__ == "__main__":
    run_program(main)
