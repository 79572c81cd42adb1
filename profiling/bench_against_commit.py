"""The code of another commit and this one in turns: answers a second of the model that each ships.

    git worktree add ../before 8c27e33
    python profiling/bench_against_commit.py --before ../before limit=96 decode.batch_size=16

The same questions of the shipped world, with the same settings of decode and engine, in one process of
each, which forgets what it has computed before every round. Counted is the time of the processor, on one
thread.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from bench_tools import ROOT, TableRow, print_table, rotate

from dlm_rag.cli import run_program
from dlm_rag.commands.arguments import parse_command_line
from dlm_rag.errors import ConfigError, RunError

OPTIONS: dict[str, tuple[str | int, str]] = {"before": ("", "the other checkout"), "rounds": (5, "of each")}
SIDE_PROGRAM = """
import json, sys, time
from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.config import load_config
model, world, settings, questions = json.loads(sys.argv[1])
config = load_config(None, settings)
parts = Denoiser.from_pretrained(model), load_retriever(f"{world}/corpus.jsonl")
decoder = Decoder(*parts, Tokenizer.from_pretrained(model), config.decode, engine=config.engine)
print("ready", flush=True)
for _ in sys.stdin:
    decoder.model_runner.reset_cache()
    begun = time.process_time()
    rollouts = decoder.decode(questions)
    print(json.dumps([time.process_time() - begun, [r.answer for r in rollouts]]), flush=True)
"""


def start_side(code: Path, settings: list[str], questions: list[str]) -> "subprocess.Popen[str]":
    """A side, once it has loaded; the model is that of its code, the questions are of the world here."""
    asked = [f"{code}/dlm_rag/shipped/model", f"{ROOT}/dlm_rag/shipped/world", settings, questions]
    side = subprocess.Popen(
        [sys.executable, "-c", SIDE_PROGRAM, json.dumps(asked)],
        env=os.environ | {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"},
        cwd=code,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert side.stdout is not None
    if not any(line.strip() == "ready" for line in side.stdout):
        raise RunError(f"the code in {code} ended with {side.wait()} before it answered")
    return side


def time_round(side: "subprocess.Popen[str]") -> tuple[float, list[str]]:
    """Seconds and answers of a round."""
    assert side.stdin is not None and side.stdout is not None
    side.stdin.write("go\n")
    side.stdin.flush()
    seconds, answers = json.loads(side.stdout.readline())
    return seconds, answers


def main(argv: list[str]) -> None:
    words = parse_command_line(__doc__ or "", argv, reads=("limit", "decode", "engine"), options=OPTIONS)
    before = Path(words.options["before"]).resolve()
    if not words.options["before"] or not (before / "dlm_rag").is_dir():
        raise ConfigError("--before names the other checkout, a folder with dlm_rag/ in it")
    lines = (ROOT / "dlm_rag/shipped/world/questions.jsonl").read_text().splitlines()
    every = max(1, len(lines) // (words.config.limit or 96))
    questions = [json.loads(line)["question"] for line in lines[::every]][: words.config.limit or 96]
    settings = [word for word in words.settings if not word.startswith("limit=")]
    sides = [start_side(code, settings, questions) for code in (before, ROOT)]
    rates: list[list[float]] = [[], []]
    answers: list[list[str]] = [[], []]
    for number in range(words.options["rounds"] + 1):
        for side in rotate((0, 1), number):
            seconds, answers[side] = time_round(sides[side])
            if number:  # the first warms up
                rates[side].append(len(questions) / seconds)
    gains = [now / then for then, now in zip(*rates, strict=True)]
    same = sum(one == other for one, other in zip(*answers, strict=True))
    row: TableRow = {"answers/s before": rates[0], "answers/s now": rates[1], "times": gains}
    print_table([row | {"same answers": f"{same} of {len(questions)}"}])
    for process in sides:
        process.communicate()


if __name__ == "__main__":
    run_program(main)
