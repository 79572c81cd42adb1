"""Profile a run: where the time went (docs/tutorials/profile-a-run.md).

dlm-rag profile sample [WORDS of sample]      # as `python profiling/nsys.py sample ...`
dlm-rag profile train --config tiny.yaml train.max_steps=60
dlm-rag profile sample --with torch           # if nsys is not installed

A checkout has benchmarks in profiling/: bench_decode, bench_retrieval, bench_serve, bench_train, gpu_proof.
"""

import runpy
import sys

from dlm_rag.files.paths import find_companion_folder


def main(argv: list[str]) -> None:
    folder = find_companion_folder("profiling")
    sys.path.insert(0, str(folder))  # the program imports others beside it
    sys.argv = ["dlm-rag profile", *argv]
    runpy.run_path(str(folder / "nsys.py"), run_name="__main__")
