"""The code of another commit and this one in turns: answers a second of the model that each ships.

    git worktree add ../before c5e5331
    python profiling/bench_against_commit.py --before ../before limit=96 decode.batch_size=16

The same questions of the shipped world, nothing held out, in one process of each, which keeps what it has
loaded and forgets the rest before every round. Counted is the time of the processor, on one thread.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from dlm_rag.cli import print_note, run_program
from dlm_rag.commands.arguments import parse_command_line
from dlm_rag.errors import ConfigError, RunError

ROOT = Path(__file__).resolve().parent.parent
OPTIONS: dict[str, tuple[str | int, str]] = {"before": ("", "the other checkout"), "rounds": (4, "of each")}
SIDE_PROGRAM = """
import json, sys, time
try:
    from dlm_rag.commands.prepare_decoder import apply_shipped_defaults, gather_questions, prepare_decoder
except ImportError:  # commits before 2026-11-25 have other names
    from dlm_rag.commands.prepare import gather_questions
    from dlm_rag.commands.prepare import prepare as prepare_decoder
    from dlm_rag.commands.prepare import with_shipped as apply_shipped_defaults
from dlm_rag.config import load_config
count, world, *words = json.loads(sys.argv[1])
named = [f"retrieval.corpus={world}/corpus.jsonl", f"questions={world}/questions.jsonl"]
config = apply_shipped_defaults(load_config(None, [*named, *words]), [])
plain = [question for question in gather_questions(config, []) if not question.labels]
chosen = plain[:: max(1, len(plain) // count)][:count]
decoder = prepare_decoder(config, chosen).load()
print("ready", flush=True)
for _ in sys.stdin:
    (getattr(decoder, "reset_cache", None) or decoder.forget)()
    begun = time.process_time()
    found = decoder.decode(chosen)
    spent = time.process_time() - begun
    print(json.dumps([spent, sum(r.forwards for r in found) / count]), flush=True)
"""


def start_side(code: Path, count: int, settings: list[str]) -> "subprocess.Popen[str]":
    """A side, once it has loaded; the model is that of its code, the questions are of the world here."""
    shipped = code / "dlm_rag" / "shipped"
    told = [count, str(ROOT / "dlm_rag/shipped/world"), f"model.path={shipped / 'model'}", *settings]
    side = subprocess.Popen(
        [sys.executable, "-c", SIDE_PROGRAM, json.dumps(told)],
        env=os.environ | {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"},
        cwd=code,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert side.stdout is not None
    for line in side.stdout:
        if line.strip() == "ready":
            return side
    raise RunError(f"the code in {code} ended with {side.wait()} before it answered")


def time_side_round(side: "subprocess.Popen[str]") -> tuple[float, float]:
    """Seconds and forwards an answer of a round."""
    assert side.stdin is not None and side.stdout is not None
    side.stdin.write("go\n")
    side.stdin.flush()
    seconds, forwards = json.loads(side.stdout.readline())
    return seconds, forwards


def main(argv: list[str]) -> None:
    words = parse_command_line(__doc__ or "", argv, typed=False, options=OPTIONS)
    before, count = words.options["before"], words.config.limit or 96
    if not before or not (Path(before) / "dlm_rag").is_dir():
        raise ConfigError("--before names the other checkout, a folder with dlm_rag/ in it")
    settings = [word for word in words.settings if not word.startswith("limit=")]
    sides = [start_side(code.resolve(), count, settings) for code in (Path(before), ROOT)]
    gains = []
    for number in range(words.options["rounds"] + 1):
        order = (0, 1) if number % 2 else (1, 0)
        found = dict(sorted((side, time_side_round(sides[side])) for side in order))
        if number:  # the first warms up
            gains.append(found[0][0] / found[1][0])
            told = [
                f"{count / seconds:.2f} answers/s, {forwards:.2f} forwards"
                for seconds, forwards in found.values()
            ]
            print_note(f"before {told[0]} · now {told[1]} · {gains[-1]:.2f} times")
    print(f"{median(gains):.2f} times the answers a second [{min(gains):.2f}, {max(gains):.2f}]")
    for side in sides:
        side.communicate()


if __name__ == "__main__":
    run_program(main)
