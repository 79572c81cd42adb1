"""A real Milvus server for tests, `milvus-lite`, as a process that can be stopped and killed; and local
search under the same rule for equal scores."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from pymilvus import MilvusClient, MilvusException

from dlm_rag.retrieval.base import Ranking
from dlm_rag.retrieval.bm25 import BM25Retriever
from dlm_rag.retrieval.bm25_build import extract_terms
from dlm_rag.retrieval.milvus import GRPC_CHANNEL_OPTIONS
from dlm_rag.retrieval.query import Query

BEGIN_SECONDS = 180


class MilvusServer:
    """A server over TCP with its data in a folder; it can be started again on the same port."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._folder = folder
        self.start()

    def url(self, name: str) -> str:
        return f"milvus://127.0.0.1:{self.port}/{name}"

    def start(self) -> None:
        with (self._folder.with_suffix(".log")).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "milvus_lite", "server", "--data-dir", self._folder,
                 "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=log, stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        deadline = time.monotonic() + BEGIN_SECONDS
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._folder.with_suffix(".log").read_text()
            with suppress(MilvusException):  # the port is open before anything answers there
                self.client(5).close()
                return
            time.sleep(0.05)
        raise AssertionError(f"the server did not begin within {BEGIN_SECONDS} s")

    def client(self, seconds: float = 30) -> MilvusClient:
        """On a channel as ours are: one with the defaults is at times hung up on for "too many pings"."""
        url = f"http://127.0.0.1:{self.port}"
        return MilvusClient(url, timeout=seconds, dedicated=True, grpc_options=GRPC_CHANNEL_OPTIONS)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)


class LocalBM25Retriever(BM25Retriever):
    """bm25s's scores in this process; what agrees to four digits stands in corpus order."""

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        return [self._best(extract_terms(query.text), depth) for query in queries]

    def _best(self, words: list[str], depth: int) -> Ranking:
        data, rows, starts = (self._index.scores[name] for name in ("data", "indices", "indptr"))
        scores = np.zeros(len(self.corpus))
        for word in self.find_word_ids(words):
            column = slice(starts[word], starts[word + 1])
            scores[rows[column]] += data[column]
        order = np.lexsort((np.arange(len(scores)), -scores.round(4)))[:depth]
        return [int(row) for row in order if scores[row] > 0]
