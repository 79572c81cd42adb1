"""Run a benchmark from any folder.

dlm-rag bench                            # list them
dlm-rag bench decode --help
dlm-rag bench decode --out runs/decode   # as `python profiling/bench_decode.py --out runs/decode`
dlm-rag bench gpu_proof --out runs/gpu
"""

import ast
import runpy
import sys
from pathlib import Path

from dlm_rag.errors import ConfigError, suggest_nearest
from dlm_rag.files.paths import find_companion_folder

FOLDER = find_companion_folder("profiling")


def main(argv: list[str]) -> None:
    programs = list_benchmarks()
    name = argv[0] if argv else "--help"
    if name in programs:
        run_profiling_program(programs[name], argv[1:], f"dlm-rag bench {name}")
    elif name in ("-h", "--help"):
        print(__doc__)
        for name, path in programs.items():
            print(f"    {name:18} {(ast.get_docstring(ast.parse(path.read_text())) or '').splitlines()[0]}")
    else:
        near = suggest_nearest(name, programs)
        raise ConfigError(f"'{name}' is none of the benchmarks {', '.join(programs)}{near}")


def list_benchmarks() -> dict[str, Path]:
    paths = [path for path in sorted(FOLDER.glob("bench_*.py")) if path.stem != "bench_tools"]
    return {path.stem.removeprefix("bench_"): path for path in [*paths, FOLDER / "gpu_proof.py"]}


def run_profiling_program(path: Path, argv: list[str], name: str) -> None:
    """Runs a program of profiling/ in this process, which finds the others beside it."""
    sys.path.insert(0, str(path.parent))
    sys.argv = [name, *argv]
    runpy.run_path(str(path), run_name="__main__")


def profile(argv: list[str]) -> None:
    """Profile a run: where the time went (docs/tutorials/profile-a-run.md).

    dlm-rag profile sample [WORDS of sample]      # as `python profiling/nsys.py sample ...`
    dlm-rag profile train --config tiny.yaml train.max_steps=60
    dlm-rag profile sample --with torch           # if nsys is not installed
    """
    run_profiling_program(FOLDER / "nsys.py", argv, "dlm-rag profile")
