"""What one model on several ranks takes of each of them: milliseconds of a call of 256 tokens.

    python profiling/bench_tensor_parallel.py                                 # one process, then two
    python profiling/bench_tensor_parallel.py --hidden 128 --ranks 4

Processes of one thread over gloo, random weights in float32 (heads of 64, keys and values for two each).
Processor time is of rank 0; while it waits for a sum it takes none. Medians of 20 calls.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from bench_tools import TableRow, print_table
from torch import multiprocessing

from dlm_rag.cli import CommandParser, run_program
from dlm_rag.decode.tensor_parallel import load_rank
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.packed_batch import Segment, pack_rows
from dlm_rag.model.tensor_parallel import TensorParallel, split_checkpoint

TOKENS, CALLS, WARM_UP_CALLS = 256, 20, 3


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "")
    for name, default in (("hidden", 1024), ("layers", 8), ("ranks", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(argv)
    heads, inner = given.hidden // 64, given.hidden * 8 // 3 // 64 * 64
    shape = DenoiserConfig(
        vocab_size=512, hidden_size=given.hidden, num_hidden_layers=given.layers, head_dim=64,
        num_attention_heads=heads, num_key_value_heads=heads // 2, intermediate_size=inner,
    )  # fmt: skip
    rows: list[TableRow] = []
    with tempfile.TemporaryDirectory() as folder:
        Denoiser(shape).save_pretrained(folder)
        for size in (1, given.ranks):
            found = multiprocessing.get_context("spawn").SimpleQueue()
            multiprocessing.spawn(time_rank, (size, Path(folder), found), nprocs=size)
            rows.append({"ranks": size} | found.get())
    for row in rows[1:]:
        row["of one process"] = row["processor ms"] / rows[0]["processor ms"]
    print_table(rows)


def time_rank(rank: int, size: int, folder: Path, found: multiprocessing.SimpleQueue) -> None:
    """Times the calls on one rank; the first one puts its row into `found`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/group-{size}", rank=rank, world_size=size)
    whole, device = open_checkpoint(folder), torch.device("cpu")
    part = split_checkpoint(whole, rank, size)
    denoiser = load_rank(TensorParallel(rank, size), part, device, torch.float32, "auto")
    rows, times = pack_rows([Segment((0,) * TOKENS, 0)], device), list[tuple[float, float]]()
    with torch.inference_mode():
        for _ in range(WARM_UP_CALLS + CALLS):
            begin = time.process_time(), time.perf_counter()
            denoiser.encode(rows)
            times.append((time.process_time() - begin[0], time.perf_counter() - begin[1]))
    processor, wall = (1000 * median(each) for each in zip(*times[WARM_UP_CALLS:], strict=True))
    if not rank:
        found.put({"processor ms": processor, "wall ms": wall})
    dist.destroy_process_group()


if __name__ == "__main__":
    run_program(main)
