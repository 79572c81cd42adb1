"""Time and peak memory of building and of querying a BM25 index, by corpus size.

    python profiling/bench_bm25.py                    # 10 k, 100 k and 1 M passages; minutes
    python profiling/bench_bm25.py 2000 5000          # a quick look

Passages are generated: 60 words each, drawn from 200,000 by Zipf's law with a seed. Every figure is
of a process of its own. Peak memory counts mapped pages; "own" is what the process could not give
back without swapping (anonymous memory at its end). Expectation: 8 bytes for each pair of passage
and distinct term on disk, and a query reads the columns of its terms and one score per passage.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dlm_rag.cli import run_program
from dlm_rag.commands.cli_args import parse_int_args

WORDS, VOCABULARY, QUERIES, QUERY_WORDS = 60, 200_000, 200, 20


def draw_zipf_words(rng: np.random.Generator, count: int) -> list[str]:
    """`count` made-up words, the r-th most frequent with probability proportional to 1 / r."""
    ranks = np.exp(rng.random(count) * np.log(VOCABULARY)).astype(int)
    return [f"w{rank}" for rank in ranks]


def write_zipf_corpus(path: Path, passages: int) -> None:
    rng = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(passages):
            text = " ".join(draw_zipf_words(rng, WORDS))
            file.write(json.dumps({"id": str(number), "contents": text}) + "\n")


def measure_index_open(path: Path) -> None:
    """In a child process: open (and build, the first time), query, report as JSON."""
    from dlm_rag.retrieval import load_retriever
    from dlm_rag.retrieval.query import Query

    start = time.perf_counter()
    retriever = load_retriever(str(path))
    opened = time.perf_counter() - start
    rng = np.random.default_rng(1)
    queries = [Query(" ".join(draw_zipf_words(rng, QUERY_WORDS)), ()) for _ in range(QUERIES)]
    retriever.search(queries[:1])
    start = time.perf_counter()
    for query in queries:
        retriever.search([query])
    per_query = (time.perf_counter() - start) / QUERIES
    status = Path("/proc/self/status").read_text()
    anonymous = int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"open": opened, "query": per_query, "peak": peak, "own": anonymous}))


def run_measurement_process(path: Path, cache: Path) -> dict[str, float]:
    environment = os.environ | {"DLM_RAG_CACHE": str(cache)}
    command = [sys.executable, __file__, "--child", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str]) -> None:
    if argv[:1] == ["--child"]:
        measure_index_open(Path(argv[1]))
        return
    sizes = parse_int_args(__doc__ or "", argv, "passages", [10_000, 100_000, 1_000_000])
    table = Table("passages", "corpus", "build", "peak", "index", "open", "query", "peak", "own")
    for passages in sizes:
        with tempfile.TemporaryDirectory() as folder:
            path, cache = Path(folder, "corpus.jsonl"), Path(folder, "cache")
            write_zipf_corpus(path, passages)
            built, opened = run_measurement_process(path, cache), run_measurement_process(path, cache)
            size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
            table.add_row(
                f"{passages:,}",
                f"{path.stat().st_size >> 20} MB",
                f"{built['open']:.1f} s",
                f"{built['peak'] / 2**20:.2f} GB",
                f"{size >> 20} MB",
                f"{opened['open']:.2f} s",
                f"{1e3 * opened['query']:.2f} ms",
                f"{opened['peak'] / 2**10:.0f} MB",
                f"{opened['own'] / 2**10:.0f} MB",
            )
    Console().print(table)


if __name__ == "__main__":
    run_program(main)
