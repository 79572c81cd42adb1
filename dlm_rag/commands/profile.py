"""Profile a run: where the time went (docs/tutorials/profile-a-run.md).

dlm-rag profile sample [WORDS of sample]      # as `python profiling/nsys.py sample ...`
dlm-rag profile train --config tiny.yaml train.max_steps=60
dlm-rag profile sample --with torch           # if nsys is not installed
"""

from dlm_rag.commands.bench import run_profiling_program
from dlm_rag.files.paths import find_companion_folder


def main(argv: list[str]) -> None:
    run_profiling_program(find_companion_folder("profiling") / "nsys.py", argv, "dlm-rag profile")
