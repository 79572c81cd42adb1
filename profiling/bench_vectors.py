"""Dense search in vectors of lower precision: what of the float32 neighbours it finds, bytes and seconds.

    python profiling/bench_vectors.py --passages 2000000 --folder /tmp/vectors

The vectors are invented (clusters of unit vectors, from a seed). Float32 is never stored: its neighbours
are found tile by tile while the others are written.
"""

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dlm_rag.cli import CommandParser, run_program
from dlm_rag.retrieval.dense import DenseRetriever
from dlm_rag.retrieval.passage_vectors import describe_rows, pack_rows

TILE, CLUSTERS, QUERIES, DEPTH = 50_000, 20_000, 64, 10
SPREAD = 0.6  # of a vector around the middle of its cluster, whose length is 1
DTYPES = ("float16", "int8")


def make_tiles(count: int, width: int, seed: int) -> Iterator[tuple[int, Tensor]]:
    """Unit vectors (n, width), with the number of the first."""
    draw = torch.Generator().manual_seed(seed)
    middles = torch.nn.functional.normalize(torch.randn(CLUSTERS, width, generator=draw))
    for start in range(0, count, TILE):
        draw = torch.Generator().manual_seed(seed + 1 + start)
        size = min(TILE, count - start)
        noise = torch.randn(size, width, generator=draw) * (SPREAD / width**0.5)
        near = middles[torch.randint(CLUSTERS, (size,), generator=draw)]
        yield start, torch.nn.functional.normalize(near + noise)


def write_vectors(folder: Path, count: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Writes a file for each of `DTYPES`; returns queries and the rows of their float32 neighbours."""
    files = {}
    for dtype in DTYPES:
        kind, row = describe_rows(dtype, width)
        files[dtype] = np.lib.format.open_memmap(folder / f"{dtype}.npy", "w+", kind, (count, *row))
    _, first = next(make_tiles(count, width, seed))
    noise = torch.randn(QUERIES, width, generator=torch.Generator().manual_seed(seed)) * (
        SPREAD / width**0.5
    )
    queries = torch.nn.functional.normalize(first[:QUERIES] + noise)
    best, rows = torch.full((QUERIES, DEPTH), -2.0, dtype=torch.float64), torch.zeros(QUERIES, DEPTH).long()
    for start, tile in make_tiles(count, width, seed):
        for dtype, file in files.items():
            file[start : start + len(tile)] = pack_rows(tile, dtype)
        near = (queries @ tile.T).topk(4 * DEPTH).indices
        found = torch.einsum("qd,qkd->qk", queries.double(), tile[near].double())
        best, order = torch.cat((best, found), 1).topk(DEPTH)
        rows = torch.cat((rows, near + start), 1).gather(1, order)
    return queries, rows


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "")
    parser.add_argument("--passages", type=int, default=2_000_000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    given = parser.parse_args(argv)
    given.folder.mkdir(parents=True, exist_ok=True)
    queries, expected = write_vectors(given.folder, given.passages, given.width, given.seed)
    for dtype in DTYPES:
        path = given.folder / f"{dtype}.npy"
        vectors = np.load(path, mmap_mode="c")
        numbered = range(given.passages)  # a corpus is asked for its length alone
        search = DenseRetriever(numbered, DEPTH, lambda texts: queries, vectors, given.device)  # type: ignore[arg-type]
        found, seconds = search._find_nearest(queries, DEPTH), []
        for begin in range(0, QUERIES, 8):
            start = time.perf_counter()
            search._find_nearest(queries[begin : begin + 8], DEPTH)
            seconds.append(time.perf_counter() - start)
        same = sum(len({*one} & {*other}) for one, other in zip(found, expected.tolist(), strict=True))
        print(
            f"{dtype}: {path.stat().st_size / 1e9:.2f} GB, recall@{DEPTH} of float32 "
            f"{100 * same / (QUERIES * DEPTH):.2f} %, 8 queries in {np.median(seconds):.2f} s"
        )
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"largest memory {most:.2f} GB, pages of mapped files included")


if __name__ == "__main__":
    run_program(main)
