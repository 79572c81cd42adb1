"""Kills a small training run at random moments and resumes it: does it end where it would have?

    python profiling/kill_train.py --out runs/killed [--kills 100]

One run goes through. Another, the same, is sent SIGKILL again and again, at a random moment after its first
new step, while it computes or saves, and is started with --resume each time; then it may finish. Both must
have the same weights bit for bit, and the same loss at every step.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from bench_tools import ROOT, parse_bench_args
from safetensors.torch import load_file

from dlm_rag.cli import print_note, run_program
from dlm_rag.errors import RunError

TINY_RUN_SETTINGS = [
    "train.hidden_size=64", "train.num_hidden_layers=2", "train.vocab_size=400",
    "train.passage_sets_per_step=2",
    "train.rows_per_set=4", "train.world_passages=100", "train.save_steps=2", "train.worlds=2",
    "train.steps_per_world=50", "train.eval_steps=100000", "train.eval_questions=1",
    "decode.max_new_tokens=120", "retrieval.top_k=3",
]  # fmt: skip
STEPS_PER_KILL = 12  # about as many as a life has
MAX_SECONDS_BEFORE_KILL = 1.5  # seconds after the first new step
OPTIONS: dict[str, tuple[str | int, str]] = {"kills": (100, "how often")}


def start_run(folder: Path, steps: int, *more: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "train.py", "--out", str(folder.resolve()), *TINY_RUN_SETTINGS]
    command += [f"train.max_steps={steps}", *more]
    return subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def count_metrics_lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


def main(argv: list[str]) -> None:
    words, out = parse_bench_args(__doc__ or "", argv, OPTIONS)
    kills = words.options["kills"]
    steps = STEPS_PER_KILL * kills
    whole, killed = out / "whole", out / "killed"
    begun = start_run(whole, steps)
    rng, saving = random.Random(0), 0
    for number in range(1, kills + 1):
        before = count_metrics_lines(killed)
        process = start_run(killed, steps, *(["--resume"] if before else []))
        # What a resumed run computes again rewrites its lines: fewer, then more.
        while process.poll() is None and count_metrics_lines(killed) in (before, 0):
            time.sleep(0.01)
        time.sleep(rng.random() * MAX_SECONDS_BEFORE_KILL)
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            raise RunError(f"the run had finished before kill {number}: nothing was killed")
        saving += any((killed / "checkpoints").glob("*.part"))
        print_note(
            f"kill {number}: {count_metrics_lines(killed)} of {steps} steps, {saving} kills while saving",
            end="\r",
        )
    if start_run(killed, steps, "--resume").wait() or begun.wait():
        raise RunError("a run failed")
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (killed, whole))
    same = all(torch.equal(value, theirs[name]) for name, value in ours.items())
    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (killed, whole)
    ]
    print(
        f"{kills} kills, {saving} of them while a checkpoint was written; {steps} steps; weights "
        f"{'equal' if same else 'NOT equal'} bit for bit, losses "
        f"{'equal' if losses[0] == losses[1] else 'NOT equal'}"
    )
    raise SystemExit(0 if same and losses[0] == losses[1] else 1)


if __name__ == "__main__":
    run_program(main)
