"""BM25 for queries that follow one another: keeping the scores of a question against searching anew.

    python profiling/bench_incremental_bm25.py    # 10,000 queries; 10 k, 100 k, 1 M passages; minutes
    python profiling/bench_incremental_bm25.py 500 20000     # a quick look: queries, passages

Queries are real: those of the shipped model answering the questions of its world, step by step, one
token a step and anywhere, so that there are enough of them. Passages are that world's and those of other
worlds, up to the number asked for. Both ways answer every query, turn by turn; every ranking must be equal.
Expectation: a fresh search zeroes, fills and scans a score per passage and reads the columns of all
words; a kept one reads the columns of the changed words and scans once, block by block.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from dlm_rag.cli import print_note, run_program
from dlm_rag.commands.cli_args import parse_int_args
from dlm_rag.commands.startup import SHIPPED_FOLDER
from dlm_rag.questions import read_questions
from dlm_rag.retrieval.query import Query

REFRESHES, SIZES = 10_000, (10_000, 100_000, 1_000_000)
TOP_K = 7
PASSAGES_PER_WORLD = 2000  # passages of each world


def collect_decode_queries(count: int) -> list[Query]:
    """Queries of whole decodes, question after question, eight questions taking turns."""
    from dlm_rag import Decoder, Denoiser, load_retriever
    from dlm_rag.config import DecodeConfig
    from dlm_rag.tokenizer import Tokenizer

    decoder = Decoder(
        Denoiser.from_pretrained(SHIPPED_FOLDER / "model"),
        load_retriever(SHIPPED_FOLDER / "world" / "corpus.jsonl", top_k=TOP_K),
        Tokenizer.from_pretrained(SHIPPED_FOLDER / "model"),
        DecodeConfig(commit_rule="top_k", block_length=0, batch_size=8),
    )
    asked = read_questions(SHIPPED_FOLDER / "world" / "questions.jsonl")
    queries: list[Query] = []
    ask = decoder.retriever.search

    def search(found: list[Query]):  # type: ignore[no-untyped-def]
        queries.extend(found)
        return ask(found)

    decoder.retriever.search = search  # type: ignore[method-assign, assignment]
    for _ in decoder.stream(asked):
        if len(queries) >= count:
            break
    return queries[:count]


def write_worlds_corpus(path: Path, passages: int) -> None:
    """The shipped world, then worlds of other seeds; ids are made different."""
    from dlm_rag.data.synthetic_world import build_passage_record, make_world

    with path.open("w", encoding="utf-8") as file:
        written = 0
        for line in (
            (SHIPPED_FOLDER / "world" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()[:passages]
        ):
            file.write(line + "\n")
            written += 1
        seed = 1000
        while written < passages:
            world, seed = make_world(seed, "test", PASSAGES_PER_WORLD), seed + 1
            for entity in world.entities[: passages - written]:
                record = build_passage_record(world, entity)
                file.write(json.dumps(record | {"id": f"{seed}-{record['id']}"}) + "\n")
                written += 1


def measure_incremental_search(passages: int, queries: list[Query]) -> list[str]:
    from dlm_rag.retrieval import bm25, load_retriever

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "corpus.jsonl")
        write_worlds_corpus(path, passages)
        print_note(f"{passages:,} passages written")
        bm25.MIN_INCREMENTAL_PASSAGES = 0
        fresh, kept = (
            load_retriever(path, top_k=TOP_K, index_dir=f"{folder}/index", bm25_cache_gib=memory)
            for memory in (0.0, 1.0)
        )
        assert isinstance(kept, bm25.BM25Retriever) and kept._successive is not None
        seconds: dict[str, list[float]] = {"fresh": [], "kept": []}
        unequal = 0
        last = {query.asker: number for number, query in enumerate(queries)}
        for number, query in enumerate(queries):
            found = {}
            ways = [("fresh", fresh), ("kept", kept)]
            for name, retriever in ways if number % 2 else reversed(ways):
                start = time.perf_counter()
                found[name] = retriever.rank([query], TOP_K)
                seconds[name].append(time.perf_counter() - start)
            unequal += found["fresh"] != found["kept"]
            if last[query.asker] == number:
                kept.forget(query.asker)  # as the decoder does when a question is finished
    means = {name: 1e3 * float(np.mean(values)) for name, values in seconds.items()}
    middle = {name: 1e3 * median(values) for name, values in seconds.items()}
    return [
        f"{passages:,}", f"{len(queries):,}", str(unequal),
        f"{means['fresh']:.3f} ({middle['fresh']:.3f})", f"{means['kept']:.3f} ({middle['kept']:.3f})",
        f"{means['fresh'] / means['kept']:.2f}",
    ]  # fmt: skip


def main(argv: list[str]) -> None:
    count, *sizes = parse_int_args(__doc__ or "", argv, "queries, then passages", [REFRESHES, *SIZES])
    queries = collect_decode_queries(count)
    print_note(f"{len(queries):,} queries of {len({query.asker for query in queries})} questions")
    table = Table(
        "passages", "queries", "unequal", "fresh, ms (median)", "kept, ms (median)", "times faster"
    )
    for size in sizes or SIZES:
        table.add_row(*measure_incremental_search(size, queries))
    Console(file=sys.stdout).print(table)


if __name__ == "__main__":
    run_program(main)
