"""The first look at a machine with a GPU: one page of what it does, in at most ten minutes.

    python profiling/first_gpu.py --out runs/first            # page.md, page.json, page.png
    python profiling/first_gpu.py --out runs/first --quick    # tiny shapes, in about a minute, on a CPU too
    python profiling/first_gpu.py --out runs/first --only training

The machine and the kernels that work on it. Answers a second with the shipped model, and with random
weights of 1 and 7 billion parameters that follow its decodes (bench_decode.py, decode_replay.py), against
the published algorithm done plainly, with GFLOPs counted and the share of what the device could do at best
. How many questions get the same tokens alone and in a batch. Tokens a second, MFU and peak
memory of training steps at about 1 billion parameters and sequences of 4,096 tokens, with each switch,
beside the memory that was planned. Milliseconds of a step of a DiffusionGemma in the shape of 26B-A4B, with
random weights in bfloat16 (bench_diffusion_gemma.py). Where the time of all goes (attribute.py).

Every part is a process of its own with a time limit, --minutes for all of them: one that fails or takes too
long leaves its error on the page, with what it had found until then, and the next begins. The page is
written anew after every part. Pools are warm: they have seen other questions before.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_tools import make_folder
from first_gpu_parts import (
    DecodeSpec,
    DenoiseSpec,
    ExactnessSpec,
    PartRecord,
    PartSpec,
    TrainSpec,
    inspect_machine,
    measure_decoding,
    measure_denoising,
    measure_exactness,
    measure_training,
)

from dlm_rag.cli import print_note, run_program
from dlm_rag.commands.arguments import CommandParser
from dlm_rag.errors import ConfigError

ReportLine = dict[str, Any]


@dataclass(frozen=True)
class ReportPart:
    """A part of the look, in a process of its own."""

    seconds: float  # how long it may take
    spec: PartSpec = None  # None: the machine


FULL_PARTS = {
    "machine": ReportPart(30),
    "shipped": ReportPart(75, DecodeSpec("", {0: 8, 64: 96, 16: 40, 1: 6}, pool_warmup_questions=64)),
    "exactness": ReportPart(40, ExactnessSpec(40, 16)),
    "training": ReportPart(
        130,
        TrainSpec(
            (
                "train.hidden_size=2048", "train.head_dim=64", "train.intermediate_size=5632",
                "train.num_hidden_layers=20", "train.sequence_length=4096", "train.batch_tokens=16384",
            ),
            vocabulary=32_000,
        ),
    ),
    "1b": ReportPart(105, DecodeSpec("1b", {0: 6, 64: 96, 16: 40, 1: 6}, pool_warmup_questions=64)),
    "7b": ReportPart(130, DecodeSpec("7b", {0: 4, 64: 96, 16: 40, 1: 6}, pool_warmup_questions=64)),
    "gemma": ReportPart(60, DenoiseSpec("26b-a4b", (1, 4, 16), 2000)),
}  # fmt: skip
QUICK_PARTS = {
    "machine": ReportPart(60),
    "shipped": ReportPart(60, DecodeSpec("", {0: 2, 4: 4, 1: 2}, pool_warmup_questions=4, rounds=1,
    profiled_questions=2)),
    "exactness": ReportPart(60, ExactnessSpec(3, 2)),
    "training": ReportPart(
        90,
        TrainSpec(
            (
                "train.hidden_size=64", "train.head_dim=32", "train.intermediate_size=128",
                "train.num_hidden_layers=2", "train.sequence_length=64", "train.batch_tokens=128",
            ),
            vocabulary=512, switches=("none", "logit_chunk", "selective", "full"), steps=2, logit_chunk=16,
        ),
    ),
    "tiny": ReportPart(60, DecodeSpec("tiny", {0: 1, 4: 4, 1: 2}, pool_warmup_questions=2, rounds=1,
    profiled_questions=2)),
    "gemma": ReportPart(20, DenoiseSpec("tiny", (1, 3), 40, repeats=2)),
}  # fmt: skip


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "", prog="first_gpu.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of the page")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, in about a minute")
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything (9.5)")
    parser.add_argument("--only", metavar="PART", help=f"one part: {', '.join(FULL_PARTS)}")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # the process of a part
    given = parser.parse_args(argv)
    parts = QUICK_PARTS if given.quick else FULL_PARTS
    name = given.only or given.part
    if name is not None and name not in parts:
        raise ConfigError(f"'{name}' is not a part of it: {', '.join(parts)}")
    make_folder(given.out / "parts")
    if given.part is not None:
        run_part(given.part, parts[given.part].spec, given.out)
        return
    chosen = {name: parts[name]} if name else parts
    words = ["--out", str(given.out), *(["--quick"] if given.quick else [])]
    run_parts(chosen, given.out, words, 60 * given.minutes)


def run_parts(parts: dict[str, ReportPart], out: Path, words: list[str], seconds: float) -> None:
    """Takes the parts one after another; a part may use what those before it have left over."""
    from first_gpu_report import write_first_gpu_report

    end = time.monotonic() + seconds
    found: dict[str, ReportLine] = {}
    for name, part in parts.items():
        (out / "parts" / f"{name}.json").unlink(missing_ok=True)
        names = list(parts)
        later = sum(parts[other].seconds for other in names[names.index(name) + 1 :])
        limit = max(min(part.seconds, end - time.monotonic()), end - time.monotonic() - later)
        begun = time.monotonic()
        print_note(f"{name}: at most {limit:.0f} s")
        error = run_part_process(
            [sys.executable, __file__, *words, "--part", name], out / "parts" / name, limit
        )
        record = out / "parts" / f"{name}.json"
        found[name] = {
            "seconds": time.monotonic() - begun,
            "error": error,
            **(json.loads(record.read_text()) if record.is_file() else {"lines": []}),
        }
        print_note(f"{name}: {found[name]['seconds']:.0f} s" + (f"; {error}" if error else ""))
        write_first_gpu_report(out, found)


def run_part_process(command: list[str], log: Path, limit: float) -> str:
    """Runs a part; returns what went wrong, or nothing. Its words go to `log`."""
    if limit <= 0:
        return "no time was left for it"
    with log.with_suffix(".log").open("w", encoding="utf-8") as words:
        process = subprocess.Popen(command, stdout=words, stderr=words, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # compilers that it has started, too
            process.wait()
            return f"it took more than its {limit:.0f} s"
    said = log.with_suffix(".log").read_text(encoding="utf-8").strip().splitlines()
    return "" if code == 0 else f"exit status {code}: {said[-1] if said else 'it said nothing'}"


def run_part(name: str, what: PartSpec, out: Path) -> None:
    """A part, in the process that is its own."""
    record = PartRecord(out / "parts" / f"{name}.json")
    if what is None:
        inspect_machine(record)
    elif isinstance(what, DecodeSpec):
        measure_decoding(what, record, out / f"attribution-{name}")
    elif isinstance(what, ExactnessSpec):
        measure_exactness(what, record)
    elif isinstance(what, DenoiseSpec):
        measure_denoising(what, record, out / f"attribution-{name}")
    else:
        measure_training(what, record, out / f"attribution-{name}")


if __name__ == "__main__":
    run_program(main)
