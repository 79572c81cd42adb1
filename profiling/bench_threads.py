"""What thread settings do to a forward pass on a busy machine: ours against the libraries' own.

    python profiling/bench_threads.py [SECONDS_PER_SETTING]

Each setting is a process of its own that runs a small denoiser (torch) in turn with a parallel loop (numba)
while another process keeps a core busy. Threads that spin while they wait take the cores from those they
wait for: then a forward pass waits for whole time slices of the scheduler.
"""

import json
import os
import subprocess
import sys
import time

from bench_tools import print_table, run_child

from dlm_rag.cli import run_program
from dlm_rag.commands.arguments import parse_int_args

THREAD_SETTINGS = {
    "ours (sleep while waiting; numba's own pool)": {},
    "sleep while waiting; numba on OpenMP": {"NUMBA_THREADING_LAYER": "omp"},
    "spin while waiting; numba's own pool": {"OMP_WAIT_POLICY": "ACTIVE"},
    "spin while waiting; numba on OpenMP": {"OMP_WAIT_POLICY": "ACTIVE", "NUMBA_THREADING_LAYER": "omp"},
    "what the libraries choose": {"LIBRARY_DEFAULTS": "1"},
}


def measure_forward_times(seconds: float) -> None:
    """In a child process: alternates the two runtimes, prints forward times as JSON."""
    if os.environ.get("LIBRARY_DEFAULTS"):  # the package only sets what is unset: take it out again
        for name in ("OMP_WAIT_POLICY", "NUMBA_THREADING_LAYER"):
            del os.environ[name]
    import numba
    import numpy as np
    import torch

    from dlm_rag.model.denoiser import Denoiser
    from dlm_rag.model.denoiser_config import DenoiserConfig

    @numba.njit(parallel=True)
    def parallel_sum(values: np.ndarray) -> float:
        total = 0.0
        for i in numba.prange(len(values)):
            total += np.sqrt(values[i])
        return total

    torch.set_num_threads(os.cpu_count() or 1)
    denoiser = Denoiser(DenoiserConfig(vocab_size=1536)).eval()
    ids, values = torch.zeros(1, 600, dtype=torch.long), np.ones(200_000)
    forwards, end = [], 0.0
    with torch.inference_mode():
        for turn in range(1_000_000):
            if turn == 3:  # compiled and warm
                end = time.perf_counter() + seconds
            if turn > 3 and time.perf_counter() > end:
                break
            parallel_sum(values)
            start = time.perf_counter()
            denoiser(ids)
            forwards.append(time.perf_counter() - start)
    found = sorted(forwards[3:])
    layer = numba.threading_layer()
    medians = {"median": found[len(found) // 2], "worst": found[-1]}
    print(json.dumps({"forwards": len(found), "numba": layer} | medians))


def main(argv: list[str]) -> None:
    if argv[:1] == ["--child"]:
        measure_forward_times(float(argv[1]))
        return
    seconds, *_ = parse_int_args(__doc__ or "", argv, "seconds", [10])
    for name in ("OMP_WAIT_POLICY", "NUMBA_THREADING_LAYER"):
        os.environ.pop(name, None)  # each setting names its own
    rows = []
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for name, changes in THREAD_SETTINGS.items():
            found = run_child(__file__, "--child", seconds, **changes)
            times = [f"{1e3 * found[key]:.0f} ms" for key in ("median", "worst")]
            rows.append([name, found["numba"], str(found["forwards"]), *times])
    finally:
        busy.kill()
        busy.wait()
    headings = ["setting", "numba layer", "forwards", "median", "worst"]
    print_table(headings, rows, f"{os.cpu_count()} cores, one busy")


if __name__ == "__main__":
    run_program(main)
