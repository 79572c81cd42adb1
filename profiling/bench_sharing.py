"""Two people and two cores: an engine each on a core of its own, or one engine split over both?

    python profiling/bench_sharing.py --out runs/sharing                              # the shipped model
    python profiling/bench_sharing.py --out runs/sharing --shape 100m --questions 12 --batch 4

Each person has so many questions of the shipped world. With one of them at work: their own engine, or one
on two ranks; with both: two engines at once, or one on two ranks for the questions of both, twice as many
at a time. A rank has one thread. By turns; the clock, and the processor time of the busiest rank, run from
the first answers to the last: where others use the machine the second one counts. A shape has random
weights and 16 tokens for an answer.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_tools import ROOT, parse_bench_args, print_table, rotate
from decode_replay import RANDOM_MODEL_SHAPES, SHAPE_FIELDS

from dlm_rag.cli import run_program
from dlm_rag.errors import RunError
from dlm_rag.files.hub import SHIPPED_FOLDER
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.denoiser import Denoiser

MODEL, WORLD = SHIPPED_FOLDER / "model", SHIPPED_FOLDER / "world"
OPTIONS: dict[str, tuple[str | int, str]] = {
    "rounds": (3, "how often each is run"),
    "questions": (150, "of each person"),
    "batch": (8, "decode.batch_size for one person"),
    "shape": ("shipped", f"shipped, or random weights: {', '.join(RANDOM_MODEL_SHAPES)}"),
}
ARMS = {  # whose questions each engine has, and how many ranks
    "one person, their own engine": (["first"], 1),
    "one person, an engine on two ranks": (["first"], 2),
    "two people, two engines": (["first", "second"], 1),
    "two people, one engine on two ranks": (["both"], 2),
}


def write_random_model(shape: str, folder: Path) -> Path:
    """A checkpoint like the shipped one, with the widths and layers of a shape."""
    sizes: dict[str, Any] = dict(zip(SHAPE_FIELDS, RANDOM_MODEL_SHAPES[shape], strict=True))
    sizes.pop("vocab_size")  # that of the tokenizer stays
    sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    Denoiser(replace(open_checkpoint(MODEL).config, **sizes)).save_pretrained(folder)
    kept = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(kept | sizes))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return folder


class MeasuredEngine:
    """`sample.py` in a process of its own, from its first answers on."""

    def __init__(self, out: Path, words: Sequence[str], ranks: int, batch: int) -> None:
        self._out, self.done = out, 0
        out.unlink(missing_ok=True)
        Path(f"{out}.run.json").unlink(missing_ok=True)
        command = [sys.executable, "sample.py", *words, "--out", str(out), f"decode.batch_size={batch}"]
        self._process = subprocess.Popen(
            [*command, "energy=none", f"engine.tensor_parallel={ranks}"],
            cwd=ROOT, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._marks = list[tuple[float, float, int]]()

    def look(self) -> bool:
        """Takes the times where there are new answers; whether the process runs."""
        running = self._process.poll() is None
        count = self._out.read_bytes().count(b"\n") if self._out.exists() else 0
        if running and count > self.done:
            self.done = count
            self._marks.append((time.monotonic(), self._read_processor_seconds(), count))
        return running

    def _read_processor_seconds(self) -> float:
        """Of the busiest of the ranks."""
        own = self._process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        times = [
            Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split() for rank in [own, *children]
        ]
        return max(int(each[11]) + int(each[12]) for each in times) / os.sysconf("SC_CLK_TCK")

    def result(self) -> tuple[float, float]:
        """Answers a second, and seconds of the busiest processor for 100 answers."""
        if self._process.returncode or len(self._marks) < 2:
            raise RunError("an engine has failed, or has answered all at once: ask for more questions")
        (begin, busy, first), (end, busy_at_end, last) = self._marks[0], self._marks[-1]
        return (last - first) / (end - begin), 100 * (busy_at_end - busy) / (last - first)


def run_arm(
    folder: Path, whose: Sequence[str], ranks: int, batch: int, words: Sequence[str]
) -> tuple[float, float]:
    """Answers a second of all engines together; processor seconds that a rank takes for 100 of them."""
    engines = []
    for who in whose:
        asked = ["--questions", str(folder / f"{who}-questions.jsonl"), *words]
        engines.append(MeasuredEngine(folder / f"{who}.jsonl", asked, ranks, batch * (1 + (who == "both"))))
    running = engines
    while running:
        running = [engine for engine in running if engine.look()]
        time.sleep(0.01)
    rates, seconds = zip(*(engine.result() for engine in engines), strict=True)
    return sum(rates), sum(seconds) / len(seconds) / len(engines)


def main(argv: list[str]) -> None:
    words, folder = parse_bench_args(__doc__ or "", argv, OPTIONS)
    folder, options = folder.resolve(), words.options
    count, shape = int(options["questions"]), str(options["shape"])
    lines = (WORLD / "questions.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for who, part in (
        ("first", lines[:count]),
        ("second", lines[count : 2 * count]),
        ("both", lines[: 2 * count]),
    ):
        (folder / f"{who}-questions.jsonl").write_text("".join(part), encoding="utf-8")
    model = MODEL if shape == "shipped" else write_random_model(shape, folder / "model")
    more = ["--model", str(model), "--corpus", str(WORLD / "corpus.jsonl")]
    more += [] if shape == "shipped" else ["decode.max_new_tokens=16"]
    found = defaultdict[str, list[tuple[float, float]]](list)
    for number in range(int(options["rounds"])):
        for name in rotate([*ARMS], number):
            found[name].append(run_arm(folder, *ARMS[name], int(options["batch"]), more))
    print_table(
        [
            {
                "": name,
                "answers/s": [rate for rate, _ in each],
                "processor s for 100": [busy for _, busy in each],
            }
            for name, each in ((name, found[name]) for name in ARMS)
        ]
    )


if __name__ == "__main__":
    run_program(main)
