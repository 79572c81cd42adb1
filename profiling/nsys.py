"""One command from a program to the table that says where its time went.

    python profiling/nsys.py sample [words of sample] [--report FOLDER] [--from-step 3] [--steps 100]
    python profiling/nsys.py train --config tiny.yaml train.max_steps=60
    python profiling/nsys.py sample --with torch        # torch.profiler, where nsys cannot run

Runs the program under `nsys profile` (NVTX, and CUDA and the OS runtime where they can be traced), prints
that line for use by hand, imports and exports the report, and ends in the tables of attribute.py. Recorded
are --steps steps from --from-step on: before it kernels are compiled and caches filled. FOLDER
(runs/nsys-sample) gets the report, its sqlite export, and report.md, .json, .html.
"""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from attribute import main as attribute
from profile_readers import find_nsys, import_qdstrm

from dlm_rag import nvtx_ranges
from dlm_rag.__main__ import main as run_command
from dlm_rag.cli import print_note, run_program
from dlm_rag.commands.arguments import CommandParser
from dlm_rag.errors import ConfigError
from dlm_rag.files.paths import make_folder
from dlm_rag.machine import choose_device, choose_dtype, describe_machine, get_code_commit
from dlm_rag.nvtx_ranges import NVTX_DOMAIN

PROGRAMS = ("sample", "evaluate", "train")


def build_nsys_command(nsys: str, report: Path, command: list[str], window: str | None = None) -> list[str]:
    """The whole `nsys profile` line; no sampling, which makes reports large.

    window: `FIRST:LAST` (no LAST: to the end), the steps to record.
    """
    traced = "nvtx,osrt,cuda" if shutil.which("nvidia-smi") else "nvtx,osrt"
    line = [nsys, "profile", f"--trace={traced}", "--sample=none", "--cpuctxsw=none", "--kill=none"]
    if window is not None:
        line += [
            "--capture-range=nvtx", f"--nvtx-capture=capture@{NVTX_DOMAIN}", "--capture-range-end=stop",
            f"--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0,DLM_RAG_CAPTURE={window}",
        ]  # fmt: skip
    return [*line, "--force-overwrite=true", f"--output={report}", *command]


def record_with_nsys(report: Path, command: list[str], window: str | None = None) -> tuple[Path, int]:
    """Runs a command under nsys; returns the report and the exit status.

    The report is imported by hand where nsys could not. Raises `ConfigError` where there is none
    afterwards.
    """
    whole, raw = report.with_suffix(".nsys-rep"), report.with_suffix(".qdstrm")
    for old in (whole, raw, report.with_suffix(".sqlite")):
        old.unlink(missing_ok=True)
    line = build_nsys_command(find_nsys(), report, command, window)
    print_note(f"$ {shlex.join(line)}")
    code = subprocess.run(line, check=False).returncode
    if not whole.is_file() and raw.is_file():
        print_note(f"nsys could not import {raw.name}; its importer is called by hand")
        import_qdstrm(raw)
        raw.unlink()
    if not whole.is_file():
        few = f"; are there steps {window}? --from-step 0 --steps 0 records everything" if window else ""
        raise ConfigError(f"nsys left no report at {whole} (exit status {code}){few}")
    return whole, code


def record_with_torch_profiler(target: Path, words: list[str], first: int, last: int | None) -> int:
    """Runs `dlm-rag WORDS` here under torch.profiler, writes a Chrome trace; returns its exit status.

    Raises `ConfigError` where nothing was recorded.
    """
    import torch

    # Searches run on a thread of their own with decode.overlap.
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profiler = torch.profiler.profile(experimental_config=threads)
    capture = nvtx_ranges.capture_window = nvtx_ranges.CaptureWindow(
        first, last, profiler.start, lambda _: profiler.stop()
    )
    sys.argv, code = ["dlm-rag", *words], 0
    try:
        run_command()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    if capture.open:
        profiler.stop()
    if capture.steps <= first:
        raise ConfigError(f"the program made {capture.steps} steps (exit status {code}): lower --from-step")
    profiler.export_chrome_trace(str(target))
    return code


def describe_session() -> dict[str, str | int | None]:
    """The code and the machine of a session, with the kernel that programs choose here."""
    from dlm_rag.model.layers import choose_backend

    device = choose_device("auto")
    kernel = choose_backend("auto", device, choose_dtype("auto", device))
    return {"commit": get_code_commit(), **describe_machine(device, kernel)}


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "", prog="nsys.py")
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--report", type=Path, help="folder of the session")
    parser.add_argument("--with", dest="tool", choices=("nsys", "torch"), default="nsys")
    parser.add_argument("--from-step", type=int, default=3, help="first step to record")
    parser.add_argument("--steps", type=int, default=100, help="how many of them; 0: to the end")
    given, words = parser.parse_known_args(argv)
    first, last = given.from_step, given.from_step + given.steps - 1 if given.steps else None
    folder = given.report or Path("runs", f"{given.tool}-{given.program}")
    make_folder(folder)
    words = [given.program, *words]
    if given.tool == "nsys":
        window = f"{first}:{'' if last is None else last}" if first or last is not None else None
        report, code = record_with_nsys(
            folder.resolve() / "report", [sys.executable, "-m", "dlm_rag", *words], window
        )
    else:
        report = folder / "trace.json"
        code = record_with_torch_profiler(report, words, first, last)
    session = {"command": shlex.join(["dlm-rag", *words]), **describe_session()}
    (folder / "machine.json").write_text(json.dumps(session, indent=2) + "\n", encoding="utf-8")
    attribute([str(report), "--out", str(folder)])
    raise SystemExit(code)


if __name__ == "__main__":
    run_program(main)
