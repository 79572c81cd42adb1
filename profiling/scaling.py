"""How training scales over processes: time of a step, efficiency, share of communication.

    python profiling/scaling.py --config tiny.yaml --out runs/scaling [--processes 1,2] [--steps 10]

Strong: the same batch shared by more processes. Weak: a batch that grows with them. The phase is the
config's first. Communication is what a step takes longer than one whose gradients are left where they are;
on a GPU cluster start the workers by hand, on every node:

    torchrun --nnodes N ... profiling/scaling.py --worker strong --config NAME --out FOLDER
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench_tools import parse_bench_args, print_table, write_json

from dlm_rag.cli import parse_int, print_note, run_program
from dlm_rag.config import Config

WARMUP_STEPS = 3
OPTIONS: dict[str, tuple[str | int, str]] = {
    "processes": ("1,2", "numbers of processes on this machine"),
    "steps": (10, "steps measured with communication, and as many without"),
    "worker": ("", "strong or weak: measure as one process among those that torchrun started"),
}


def measure_process_count(config: Config, kind: str, steps: int, folder: Path) -> None:
    """Measures this number of processes; the first writes `KIND-COUNT.json`."""
    import torch

    from dlm_rag.training.distributed import DistributedContext, skip_gradient_sync
    from dlm_rag.training.trainer import open_trainer

    processes = DistributedContext.init()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # as torchrun sets it; a single process gets no more
    if kind == "weak":
        train = config.train
        groups, tokens = (
            n * processes.world_size for n in (train.passage_sets_per_step, train.batch_tokens)
        )
        config = replace(config, train=replace(train, passage_sets_per_step=groups, batch_tokens=tokens))
    trainer, _ = open_trainer(config, folder, processes)
    device = trainer.device

    def measured(count: int) -> tuple[list[float], float]:
        found, tokens = [], 0.0
        for _ in range(count):
            processes.barrier()
            begun = time.perf_counter()
            metrics = trainer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            processes.barrier()
            found.append(time.perf_counter() - begun)
            tokens += metrics["tokens"]
        return found, tokens / sum(found)

    measured(WARMUP_STEPS)
    seconds, rate = measured(steps)
    root: Any = trainer.root
    if hasattr(root, "set_requires_gradient_sync"):  # of FSDP
        root.set_requires_gradient_sync(False)
    with skip_gradient_sync(root):
        alone, _ = measured(steps)
    if processes.is_main:
        found = {
            "kind": kind, "processes": processes.world_size, "seconds": median(seconds),
            "without_sum": median(alone), "tokens_per_second": rate,
        }  # fmt: skip
        write_json(folder / f"{kind}-{processes.world_size}.json", found)
    processes.destroy()


def main(argv: list[str]) -> None:
    words, folder = parse_bench_args(__doc__ or "", argv, OPTIONS)
    counts = [parse_int(word) for word in words.options["processes"].split(",")]
    steps = words.options["steps"]
    if words.options["worker"]:
        measure_process_count(words.config, words.options["worker"], steps, folder)
        return
    lines = []
    for kind in ("strong", "weak"):
        for count in counts:
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                str(count), str(Path(__file__).resolve()), *argv, "--worker", kind,
            ]  # fmt: skip
            print_note(f"{kind}, {count} process(es)")
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            lines.append(json.loads((folder / f"{kind}-{count}.json").read_text()))
    write_scaling_report(folder, lines)


def write_scaling_report(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Table and JSON."""
    for line in lines:
        first = next(x for x in lines if x["kind"] == line["kind"])
        gain = line["tokens_per_second"] / first["tokens_per_second"]
        line["efficiency"] = gain * first["processes"] / line["processes"]
        line["communication"] = max(0.0, 1 - line["without_sum"] / line["seconds"])
    write_json(folder / "scores.json", lines)
    print_table(lines)


if __name__ == "__main__":
    run_program(main)
