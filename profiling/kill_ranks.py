"""Kills and stops a rank of a run at random moments: are answers lost or doubled, and when have all ended?

    python profiling/kill_ranks.py --out runs/ranks [--kills 100] [--stops 10] [--torchrun 1]

`sample.py` answers questions of the shipped world with one model on two ranks. SIGKILL is sent to one of
them at a random moment of the first seconds, at the start as well as between answers; SIGSTOP after an
answer, for at the start ranks wait for one another. Once all have ended the same command is given again.
Where all questions are answered another file is begun.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from bench_tools import ROOT, parse_bench_args

from dlm_rag.cli import print_note, run_program
from dlm_rag.errors import RunError

OPTIONS: dict[str, tuple[str | int, str]] = {
    "kills": (100, "how often SIGKILL is sent"),
    "stops": (10, "how often SIGSTOP is sent"),
    "torchrun": (0, "1: torchrun starts the ranks, else rank 0"),
    "questions": (300, "how many are in a file"),
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MAX_SECONDS_BEFORE_KILL = 15.0  # after the start
MAX_SECONDS_BEFORE_STOP = 2.0  # after an answer
MAX_SECONDS = 120.0  # after a signal
Run = subprocess.Popen[bytes]


def start_run(out: Path, questions: int, torchrun: bool) -> Run:
    words = ["sample.py", f"limit={questions}", "decode.batch_size=2", "energy=none", "--out", str(out)]
    command = [sys.executable, *(TORCHRUN if torchrun else []), *words, "engine.tensor_parallel=2"]
    return subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def read_answers(out: Path) -> list[tuple[str, str]]:
    """Id and response of every whole line."""
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True) if out.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(line["id"], line["response"]) for line in found]


def list_ranks(run: Run, torchrun: bool) -> list[int]:
    """The process ids of the ranks that there are; empty before both are there."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    ranks = [*([] if torchrun else [run.pid]), *map(int, children)]
    return sorted(ranks) if len(ranks) == 2 else []


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_random_moment(run: Run, out: Path, number: signal.Signals, rng: random.Random) -> None:
    before = len(read_answers(out))
    while number is signal.SIGSTOP and run.poll() is None and len(read_answers(out)) == before:
        time.sleep(0.05)
    most = MAX_SECONDS_BEFORE_STOP if number is signal.SIGSTOP else MAX_SECONDS_BEFORE_KILL
    time.sleep(rng.random() * most)


def strike(run: Run, torchrun: bool, number: signal.Signals, rank: int) -> float:
    """Sends the signal to a rank, once there is one; seconds until all processes of the run have ended."""
    while not (ranks := list_ranks(run, torchrun)):
        time.sleep(0.05)
    begin, processes = time.monotonic(), {run.pid, *ranks}
    os.kill(ranks[rank], number)
    while run.poll() is None or any(map(is_running, processes)):
        if time.monotonic() - begin > MAX_SECONDS:
            raise RunError(f"{processes} go on {MAX_SECONDS:.0f} s after {number.name} to rank {rank}")
        time.sleep(0.02)
    if run.returncode == 0:
        raise RunError(f"exit status 0 after {number.name} to rank {rank}")
    return time.monotonic() - begin


def finish(out: Path, questions: int, torchrun: bool) -> list[tuple[str, str]]:
    if start_run(out, questions, torchrun).wait():
        raise RunError(f"the run that nothing disturbs has failed: {out}")
    return read_answers(out)


def main(argv: list[str]) -> None:
    words, folder = parse_bench_args(__doc__ or "", argv, OPTIONS)
    folder, options = folder.resolve(), words.options
    asked, torchrun = int(options["questions"]), bool(options["torchrun"])
    signals = [signal.SIGKILL] * int(options["kills"]) + [signal.SIGSTOP] * int(options["stops"])
    rng, file, idle, lost, doubled = random.Random(0), 0, 0, 0, 0
    rng.shuffle(signals)
    seconds: dict[str, list[float]] = {number.name: [] for number in signals}
    whole = set(finish(folder / "whole.jsonl", asked, torchrun))
    while signals:
        out = folder / f"{file}.jsonl"
        before, run = read_answers(out), start_run(out, asked, torchrun)
        wait_for_random_moment(run, out, signals[-1], rng)
        if run.poll() is not None:  # all was answered before: nothing is struck, and a file begun
            file += 1
            continue
        number = signals.pop()
        seconds[number.name].append(strike(run, torchrun, number, rng.randrange(2)))
        after = read_answers(out)
        idle += len(after) == len(before)
        lost += len(set(before) - set(after))
        print_note(f"{len(signals)} to come; {len(after)} of {asked} answers, file {file}", end="\r")
    for number_of_file in range(file + 1):
        found = finish(folder / f"{number_of_file}.jsonl", asked, torchrun)
        lost += len(whole - set(found))
        doubled += len(found) - len(whole)
    for name, each in seconds.items():
        print(f"{len(each)} {name}: all had ended after {median(each):.1f} s, {max(each):.1f} s at most")
    print(f"{file + 1} files of {asked} answers, {lost} lost, {doubled} doubled; {idle} before any answer")


if __name__ == "__main__":
    run_program(main)
