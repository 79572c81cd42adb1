"""A real Milvus server for tests, `milvus-lite`, as a process that can be stopped and killed; and vectors
that need no model."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from pymilvus import MilvusClient, MilvusException

from dlm_rag.__main__ import dispatch
from dlm_rag.retrieval import dense
from dlm_rag.retrieval.milvus import GRPC_CHANNEL_OPTIONS

BEGIN_SECONDS, WIDTH = 180, 32  # of vectors


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


class WordEncoder:
    """In place of a sentence-transformers model: each word adds a vector of its own, by its hash."""

    device, max_seq_length = torch.device("cpu"), None
    tokenizer = SimpleNamespace(backend_tokenizer=None)

    def __str__(self) -> str:
        return "words"

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def encode(self, texts: Sequence[str], prompt: str | None = None, **_: object) -> torch.Tensor:
        found = torch.zeros(len(texts), WIDTH)
        for row, text in enumerate(texts):
            for word in [" ", *text.lower().split()]:
                seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8])
                found[row] += torch.from_numpy(np.random.default_rng(seed).standard_normal(WIDTH)).float()
        return torch.nn.functional.normalize(found)


def main() -> None:
    """Runs a command of the program with these vectors, for tests that kill it."""
    dense.load_sentence_transformer = lambda *_: WordEncoder()  # type: ignore[assignment]
    dispatch(sys.argv[1:])


if __name__ == "__main__":
    main()
