"""What a GPU does, on one page: first what is right, then how fast, in at most twelve minutes.

    python profiling/gpu_proof.py --out runs/gpu --call 1          # right, and decoding; page.md, page.json
    python profiling/gpu_proof.py --out runs/gpu --call 2          # training, and all that is left
    python profiling/gpu_proof.py --out runs/gpu                   # both, one after the other
    python profiling/gpu_proof.py --out runs/gpu --quick           # tiny shapes, two minutes, on a CPU too
    python profiling/gpu_proof.py --out runs/gpu --only training

The machine and the kernels that work on it; attention against float64. How many questions get the same
tokens alone and in a batch, by kernel and graphs. Batches that stay full, by kernel, graphs and overlap, of
the shipped model and of random weights of 7 billion that follow its decodes (decode_replay.py), beside the
published algorithm done plainly, with GFLOPs counted and the share of what the device could do at best.
Training at 1 and 7 billion, sequences of 4,096 tokens, with each switch: tokens a second, MFU, peak memory
beside the plan's. Learning by reward with adapters, and prompts of 1 to 32 K tokens, at 7 billion. Where
the time of it goes (attribute.py).

Every part is a process of its own with a time limit, --minutes for all of them, and every row has an alarm:
what fails or takes too long leaves its error on the page, and the next begins, in a new process where the
old one has ended. Each row is in parts/PART.json at once; the page is rewritten after every part.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpu_proof_parts as proof
from bench_tools import format_markdown_table, plot_bars, write_json

from dlm_rag.cli import CommandParser, print_note, run_program
from dlm_rag.errors import ConfigError
from dlm_rag.files.paths import make_folder, write_text_atomic


class ReportPart(NamedTuple):
    """A part of the proof, in a process of its own."""

    call: int  # 1 or 2
    seconds: float  # how long it may take
    measure: Callable[[proof.PartRecord], None]


RESTART_SECONDS = 15  # left, in which a part that has ended may find something
MINUTES = {1: 4.7, 2: 6.4, None: 11.1}  # of each call, and of both
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "sequence_length", "batch_tokens")


def list_sizes(*values: int) -> list[str]:
    return [f"train.{name}={value}" for name, value in zip(SIZES, values, strict=True)]


# As many tokens as the plan has room for: of 7 billion `selective` would take 131 GiB at 16,384.
BILLION = list_sizes(2048, 5632, 20, 4096, 49_152)
SEVEN_BILLION = list_sizes(4096, 11_008, 32, 4096, 12_288)
TINY = list_sizes(64, 128, 2, 64, 128)
LONG_PROMPTS = (1024, 4096, 16_384, 32_768)  # tokens
FEW_ROLLOUTS = ("train.prompts_per_step=2", "train.num_generations=2", "train.world_passages=100")
full, long = proof.measure_full_batches, proof.measure_long_prompts
train = partial(proof.measure_training, vocabulary=32_000, steps=3)
# What is expected is what one H200 was thought to do when this was written, as shares of its best.
MFU_1B = {"selective": 45, "compile": 50}
MFU_7B = {"selective": 52, "compile, half": 54, "compile, selective": 47, "compile, full": 46}
ROOFLINE, UNKNOWN, FEW = {64: 55, 16: 30, 1: 10}, dict.fromkeys((64, 16, 1)), dict.fromkeys((4, 1))
SWITCHES = dict.fromkeys(("none", "selective", "full"))
FULL_PARTS = {
    "machine": ReportPart(1, 25, proof.inspect_machine),
    "exactness": ReportPart(1, 75, partial(proof.measure_exactness, questions=40, batch=16)),
    "full_7b": ReportPart(1, 182, partial(full, shape="7b", expected=ROOFLINE, steps=24)),
    "training_1b": ReportPart(2, 75, partial(train, settings=BILLION, expected=MFU_1B)),
    "training_7b": ReportPart(2, 120, partial(train, settings=SEVEN_BILLION, expected=MFU_7B)),
    "rl_7b": ReportPart(2, 70, partial(proof.measure_rl, shape="7b", steps=3)),
    "shipped": ReportPart(2, 74, partial(full, shape="", expected=UNKNOWN, steps=24)),
    "long_prompts": ReportPart(2, 45, partial(long, shape="7b", tokens=LONG_PROMPTS)),
}
QUICK_PARTS = {
    "machine": ReportPart(1, 60, proof.inspect_machine),
    "exactness": ReportPart(1, 60, partial(proof.measure_exactness, questions=3, batch=2)),
    "full_tiny": ReportPart(1, 60, partial(full, shape="tiny", expected=FEW, steps=8)),
    "shipped": ReportPart(1, 60, partial(full, shape="", expected=FEW, steps=8)),
    "training": ReportPart(2, 90, partial(train, settings=TINY, vocabulary=512, expected=SWITCHES)),
    "rl": ReportPart(2, 60, partial(proof.measure_rl, shape="tiny", steps=1, settings=FEW_ROLLOUTS)),
    "long_prompts": ReportPart(2, 30, partial(long, shape="tiny", tokens=(200, 800))),
}


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "", prog="gpu_proof.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of the page")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, in about two minutes")
    parser.add_argument("--call", type=int, choices=(1, 2), help="half of the parts; the page keeps others")
    parser.add_argument("--minutes", type=float, help="for everything (calls: 4.7 and 6.4; both: 11.1)")
    parser.add_argument("--only", metavar="PART", help=f"one part: {', '.join(FULL_PARTS)}")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # the process of a part
    given = parser.parse_args(argv)
    parts = QUICK_PARTS if given.quick else FULL_PARTS
    name = given.only or given.part
    if name is not None and name not in parts:
        raise ConfigError(f"'{name}' is not a part of it: {', '.join(parts)}")
    folder = make_folder(given.out / "parts")
    if given.part is not None:
        parts[name].measure(proof.PartRecord(folder / f"{name}.json", given.out / f"attribution-{name}"))
        return
    words = ["--out", str(given.out), *(["--quick"] if given.quick else [])]
    chosen = {key: part for key, part in parts.items() if given.call in (None, part.call)}
    minutes = given.minutes or MINUTES[given.call]
    run_parts({name: parts[name]} if name else chosen, given.out, words, 60 * minutes)


def run_parts(parts: dict[str, ReportPart], out: Path, words: list[str], seconds: float) -> None:
    """Takes the parts one after another; a part may use what those before it have left over.

    The page keeps what an earlier call has found of other parts.
    """
    earlier = out / "page.json"
    found: dict[str, dict[str, Any]] = json.loads(earlier.read_text()) if earlier.is_file() else {}
    end = time.monotonic() + seconds
    later = sum(part.seconds for part in parts.values())
    for name, part in parts.items():
        record = out / "parts" / f"{name}.json"
        for path in (record, record.with_suffix(".log")):
            path.unlink(missing_ok=True)
        later, begun = later - part.seconds, time.monotonic()
        limit = max(min(part.seconds, end - begun), end - begun - later)
        print_note(f"{name}: at most {limit:.0f} s")
        error = run_part([sys.executable, __file__, *words, "--part", name], record, begun + limit)
        found[name] = read_record(record) | {"seconds": time.monotonic() - begun, "error": error}
        print_note(f"{name}: {found[name]['seconds']:.0f} s" + (f"; {error}" if error else ""))
        write_json(earlier, found)
        try:
            write_gpu_report(out, found)
        except Exception as problem:  # the figures are written
            print_note(f"the page: {problem!r}")


def read_record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {"rows": [], "tried": [], "errors": {}}


def run_part(command: list[str], record: Path, end: float) -> str:
    """Runs a part until `end`, once more after each row that has ended its process."""
    tried, now = -1, 0
    while True:
        error = run_part_process(command, record, end - time.monotonic())
        tried, now = now, len(read_record(record)["tried"])
        if not error or now == tried or time.monotonic() > end - RESTART_SECONDS:
            return error


def run_part_process(command: list[str], record: Path, limit: float) -> str:
    """Runs a part; returns what went wrong, or nothing. Its output goes to a log next to its record."""
    if limit <= 0:
        return "no time was left for it"
    log = record.with_suffix(".log")
    with log.open("a", encoding="utf-8") as words:
        process = subprocess.Popen(command, stdout=words, stderr=words, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # compilers that it has started, too
            process.wait()
            return f"it took more than its {limit:.0f} s"
    said = log.read_text(encoding="utf-8").strip().splitlines()
    return "" if code == 0 else f"exit status {code}: {said[-1] if said else 'it said nothing'}"


def write_gpu_report(out: Path, found: dict[str, dict[str, Any]]) -> None:
    """page.md and page.png from what the parts have found until now."""
    blocks = ["# What this GPU does"]
    rows = [(name, row) for name, part in found.items() for row in part["rows"] if "answers/s" in row]
    if bars := {f"{name}, {row['setting']}": row["answers/s"] for name, row in rows}:
        plot_bars(out / "page.png", bars, "answers a second", log=True)
        blocks.append("![answers a second](page.png)")
    for name, part in found.items():
        if part["rows"]:
            blocks += [f"## {part['title']}", part["text"], format_markdown_table(part["rows"])]
        if "attribution" in part:
            report = out / part["attribution"] / "report.md"
            blocks += [f"## Where the time goes: {name}", report.read_text().partition("\n\n")[2]]
    errors = [f"**{name}**: {part['error']}" for name, part in found.items() if part["error"]]
    for name, part in found.items():
        errors += [f"**{name}, {row}**: {said}" for row, said in part["errors"].items()]
    times = [{"part": name, "seconds": part["seconds"]} for name, part in found.items()]
    blocks += ["## What went wrong", *(errors or ["Nothing."]), format_markdown_table(times)]
    write_text_atomic(out / "page.md", "\n\n".join(blocks) + "\n")


if __name__ == "__main__":
    run_program(main)
