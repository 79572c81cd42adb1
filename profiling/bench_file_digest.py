"""How fast the files of a checkpoint or a corpus are read and digested, and what it costs to know them.

    python profiling/bench_file_digest.py [GIGABYTES]

Expectation: BLAKE3 takes about 3 GB/s of each core with AVX2, so a file in the page cache is bound by the
copy out of it, and any other by its disk. A file that has not changed costs one `stat` and one small read.
"""

import os
import tempfile
import time
from pathlib import Path

from dlm_rag.cli import run_program
from dlm_rag.commands.cli_args import parse_int_args
from dlm_rag.files.digest import RACY_WINDOW_NS, digest_file

BYTES_PER_GIGABYTE = 10**9


def main(argv: list[str]) -> None:
    """Writes a file of random bytes, digests it three times, then asks again once it has settled."""
    size = parse_int_args(__doc__ or "", argv, "gigabytes", [4])[0] * BYTES_PER_GIGABYTE
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DLM_RAG_CACHE"] = folder
        path = Path(folder) / "file"
        block = os.urandom(1 << 26)
        with path.open("wb") as file:
            for begin in range(0, size, len(block)):
                file.write(block[: size - begin])
        for _ in range(3):  # younger than RACY_WINDOW_NS, nothing is remembered
            os.utime(path)
            seconds = time_digest(path)
            print(f"read and digested: {seconds:.2f} s, {size / seconds / BYTES_PER_GIGABYTE:.2f} GB/s")
        time.sleep(RACY_WINDOW_NS / 1e9 + 1)
        time_digest(path)
        print(f"known: {time_digest(path) * 1e3:.2f} ms")


def time_digest(path: Path) -> float:
    """Seconds of one digest."""
    begun = time.perf_counter()
    digest_file(path)
    return time.perf_counter() - begun


if __name__ == "__main__":
    run_program(main)
