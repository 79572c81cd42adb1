"""Runs with workers under Ray: their surroundings, and which of their processes are alive."""

import os
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="module", autouse=True)
def surroundings(ray_token):
    """Where fakes are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


def processes(mark: bytes) -> dict[int, bytes]:
    """Command line by id of the processes whose environment holds `mark`; this one is none of them."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes()
        except OSError:  # it has ended, or is another's
            continue
    return {number: words for number, words in found.items() if words}


def workers(mark: bytes) -> list[int]:
    return [number for number, words in processes(mark).items() if words.startswith(b"ray::Worker")]


@pytest.fixture
def mark(monkeypatch) -> bytes:
    """What the environment of every process of a test holds."""
    monkeypatch.setenv("DLM_RAG_TEST", name := f"{os.getpid()}-{time.monotonic_ns()}")
    return f"DLM_RAG_TEST={name}".encode()


def gone(mark: bytes, seconds: float = 120) -> bool:
    """Whether nothing is left of a run; Ray's own agents see at their own pace that they are alone."""
    end = time.monotonic() + seconds
    while processes(mark) and time.monotonic() < end:
        time.sleep(0.1)
    return not processes(mark)
