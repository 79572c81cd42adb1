"""What thread settings do to a forward pass on a busy machine: ours against the libraries' own.

    python profiling/bench_threads.py [SECONDS_PER_SETTING]

Each setting is a process of its own that alternates a forward pass of a small denoiser (torch's
OpenMP threads) with a parallel loop of numba's, while one more process keeps a core busy. Expectation:
waiting threads that spin take the cores from the threads they wait for, so a forward pass waits for
whole time slices of the scheduler; threads that sleep while they wait cost a few microseconds.
"""

import json
import os
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

from dlm_rag.cli import run_program
from dlm_rag.commands.cli_args import parse_int_args

BUSY_LOOP_CODE = "while True: pass"
THREAD_SETTINGS = {
    "ours (sleep while waiting; numba's own pool)": {},
    "sleep while waiting; numba on OpenMP": {"NUMBA_THREADING_LAYER": "omp"},
    "spin while waiting; numba's own pool": {"OMP_WAIT_POLICY": "ACTIVE"},
    "spin while waiting; numba on OpenMP": {"OMP_WAIT_POLICY": "ACTIVE", "NUMBA_THREADING_LAYER": "omp"},
    "what the libraries choose": {"LIBRARY_DEFAULTS": "1"},
}


def measure_forward_times(seconds: float) -> None:
    """In a child process: alternate the two runtimes, report forward times as JSON."""
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
    print(
        json.dumps(
            {"forwards": len(found), "median": found[len(found) // 2], "worst": found[-1], "numba": layer}
        )
    )


def main(argv: list[str]) -> None:
    if argv[:1] == ["--child"]:
        measure_forward_times(float(argv[1]))
        return
    seconds, *_ = parse_int_args(__doc__ or "", argv, "seconds", [10])
    cleaned = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "NUMBA_THREADING_LAYER")}
    table = Table(
        "setting", "numba layer", "forwards", "median", "worst", title=f"{os.cpu_count()} cores, one busy"
    )
    busy = subprocess.Popen([sys.executable, "-c", BUSY_LOOP_CODE])
    try:
        for name, changes in THREAD_SETTINGS.items():
            command = [sys.executable, __file__, "--child", str(seconds)]
            done = subprocess.run(
                command, env=cleaned | changes, capture_output=True, text=True, check=True
            )
            found = json.loads(done.stdout.splitlines()[-1])
            table.add_row(
                name, found["numba"], str(found["forwards"]),
                f"{1e3 * found['median']:.0f} ms", f"{1e3 * found['worst']:.0f} ms",
            )  # fmt: skip
    finally:
        busy.kill()
        busy.wait()
    Console().print(table)


if __name__ == "__main__":
    run_program(main)
