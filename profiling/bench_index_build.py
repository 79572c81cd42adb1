"""Building a large index as a stream: seconds, bytes, and memory over time.

    python profiling/bench_index_build.py 1000000               # into nothing; 4 minutes
    python profiling/bench_index_build.py 20000 --to milvus://127.0.0.1:19530/bench

Passages are invented: 60 words each, drawn by Zipf's law from ten million with a seed, so that new words
keep coming. Each stage is of a process of its own, whose own memory (anonymous; mapped pages can be given
back) is looked at ten times. Without a URL the vectors are counted and dropped: 8 bytes a word and passage,
as an engine takes them. With one the collection has to be new; its build is killed once half of it is
there, gone on with, and the collection searched beside our own index.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dlm_rag.cli import CommandParser, parse_int, run_program
from dlm_rag.progress import format_bytes

WORDS, VOCABULARY, BLOCK, BATCH, QUERY_WORDS = 60, 10_000_000, 10_000, 16, 20


def draw_zipf_texts(rng: np.random.Generator, texts: int, words: int) -> list[str]:
    """Texts of made-up words, the r-th most frequent with probability proportional to 1 / r."""
    ranks = np.exp(rng.random((texts, words)) * np.log(VOCABULARY)).astype(int).tolist()
    return [" ".join(f"w{rank}" for rank in row) for row in ranks]


def write_zipf_corpus_blocks(path: Path, passages: int) -> None:
    """The corpus, block by block."""
    rng = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, passages, BLOCK):
            texts = draw_zipf_texts(rng, min(BLOCK, passages - start), WORDS)
            file.writelines(f'{{"id": "{start + n}", "contents": "{t}"}}\n' for n, t in enumerate(texts))


def scan_corpus(path: Path) -> dict[str, int]:
    """Opens the corpus for the first time: every line is read, its offset and a digest of its id kept."""
    from dlm_rag.retrieval.corpus import open_corpus

    return {"passages": len(open_corpus(path))}


def count_corpus_words(path: Path) -> dict[str, int]:
    """The first pass."""
    from dlm_rag.retrieval.corpus import open_corpus
    from dlm_rag.retrieval.milvus_ingest import load_corpus_statistics

    return {"words": len(load_corpus_statistics(open_corpus(path)).ids)}


def stream_corpus_vectors(path: Path) -> dict[str, int]:
    """The second pass, into nothing."""
    from dlm_rag.retrieval.corpus import open_corpus
    from dlm_rag.retrieval.milvus_ingest import iterate_write_batches, load_corpus_statistics

    corpus = open_corpus(path)
    vector, entries, texts = load_corpus_statistics(corpus).encode_passage, 0, 0
    for _, passages in iterate_write_batches(corpus, 0):
        for passage in passages:
            entries += len(vector(passage.text))
            texts += len(passage.text.encode())
    return {"sparse": 8 * entries, "text": texts}


INDEX_STAGES: dict[str, Callable[[Path], dict[str, int]]] = {
    "scan": scan_corpus,
    "count": count_corpus_words,
    "stream": stream_corpus_vectors,
}


def read_anonymous_bytes() -> int:
    """Bytes that this process alone holds."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) << 10


def run_index_stage(name: str, path: Path) -> None:
    """In a child process: one stage; prints what it found, its seconds and its memory over time as JSON."""
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            seen.append(read_anonymous_bytes())

    threading.Thread(target=watch, daemon=True).start()
    start = time.perf_counter()
    found = INDEX_STAGES[name](path)
    seconds = time.perf_counter() - start
    done.set()
    tenths = [max(part, default=0) for part in np.array_split(seen, 10)] if seen else []
    print(json.dumps(found | {"seconds": seconds, "memory": [int(m) for m in tenths]}))


def run_stage_process(name: str, path: Path) -> dict[str, object]:
    command = [sys.executable, __file__, "--stage", name, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def print_stage_table(path: Path) -> None:
    """Each stage once, and the second pass's bytes."""
    table = Table("stage", "seconds", "own memory in each tenth of it, MB", "found")
    for name in INDEX_STAGES:
        found = run_stage_process(name, path)
        seconds, memory = found.pop("seconds"), found.pop("memory")
        assert isinstance(memory, list)
        megabytes = " ".join(f"{size / 1e6:.0f}" for size in memory)
        said = ", ".join(f"{key} {value:,}" for key, value in found.items())
        table.add_row(name, f"{seconds:.1f}", megabytes, said)
    Console(width=140).print(table)


def build_remote_index(url: str, path: Path, passages: int) -> None:
    """A build that is killed once half of it is there, the rest of it, and queries."""
    from dlm_rag.retrieval import load_retriever
    from dlm_rag.retrieval.milvus_collection import MilvusCollection
    from dlm_rag.retrieval.query import Query

    command = [sys.executable, "-m", "dlm_rag", "index", "--corpus", str(path), "--to", url]
    start = time.perf_counter()
    first = subprocess.Popen(command)
    collection, there = MilvusCollection(url, 60.0), 0
    while there < passages // 2 and first.poll() is None:
        time.sleep(0.5)
        if collection.describe():
            collection.load()
            there = collection.count_rows(passages)
    first.kill()
    first.wait()
    killed = time.perf_counter() - start
    print(f"killed after {killed:.0f} s, with {there:,} passages there", flush=True)
    subprocess.run(command, check=True)
    print(f"whole after {time.perf_counter() - start - killed:.0f} s more")
    rng = np.random.default_rng(1)
    texts = [draw_zipf_texts(rng, BATCH, QUERY_WORDS) for _ in range(21)]
    for name, retriever in (("there", load_retriever(url=url)), ("here", load_retriever(str(path)))):
        seconds = []
        for batch in texts:
            start = time.perf_counter()
            retriever.search([Query(text, (text,)) for text in batch])
            seconds.append(time.perf_counter() - start)
        print(f"{name}: {1e3 * np.median(seconds[1:]):.1f} ms a batch of {BATCH} queries")


def main(argv: list[str]) -> None:
    if argv[:1] == ["--stage"]:
        run_index_stage(argv[1], Path(argv[2]))
        return
    parser = CommandParser(__doc__ or "")
    parser.add_argument("passages", metavar="NUMBER", help="passages")
    parser.add_argument("--to", metavar="URL", help="a collection to build, which is not there yet")
    given = parser.parse_args(argv)
    passages = parse_int(given.passages)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DLM_RAG_CACHE"] = str(Path(folder, "cache"))
        path = Path(folder, "corpus.jsonl")
        start = time.perf_counter()
        write_zipf_corpus_blocks(path, passages)
        size = path.stat().st_size
        print(
            f"{passages:,} passages, {format_bytes(size)}: made in {time.perf_counter() - start:.0f} s",
            flush=True,
        )
        if given.to:
            build_remote_index(given.to, path, passages)
        else:
            print_stage_table(path)


if __name__ == "__main__":
    run_program(main)
