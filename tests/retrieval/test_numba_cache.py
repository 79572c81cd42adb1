"""Compiled searches are kept wherever a folder can be written; without one a search still answers."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from numba import config

from dlm_rag.retrieval.numba_cache import _warn_no_cache_folder, enable_numba_cache
from tests.support.passages import write_jsonl_file
from tests.support.paths import ROOT


class Function:
    """A jitted function whose source folder and home cannot be written, as numba answers then."""

    def __init__(self, writable):
        self.writable, self.kept = writable, None

    def enable_caching(self):
        if not config.CACHE_DIR or not self.writable:
            raise RuntimeError("cannot cache function: no locator available")
        self.kept = config.CACHE_DIR


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", "")
    _warn_no_cache_folder.cache_clear()


def test_the_folder_of_the_indexes_stands_in(cache, caplog):
    functions = [enable_numba_cache(Function(True)) for _ in range(2)]
    assert [function.kept for function in functions] == [str(cache / "numba")] * 2 and not caplog.records


def test_that_nothing_can_be_kept_is_said_once(caplog):
    functions = [enable_numba_cache(Function(False)) for _ in range(2)]
    assert not any(function.kept for function in functions)
    (record,) = caplog.records
    assert "NUMBA_CACHE_DIR" in record.getMessage()


SEARCH = """
from sys import argv
from dlm_rag import load_retriever
from dlm_rag.retrieval.query import Query
retriever = load_retriever(argv[1], top_k=1, index_dir=argv[2])
((passage,),) = retriever.search([Query("novel", ("novel",))])
print(passage.id)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root")
def test_a_user_who_can_write_nothing_but_the_cache_can_search():
    """Who may read every file and write those of nobody; then one who cannot write the cache either."""
    nobody = "--reuid=65534 --regid=65534 --clear-groups --inh-caps=+dac_read_search"
    command = ["setpriv", *nobody.split(), "--ambient-caps=+dac_read_search", sys.executable, "-c", SEARCH]

    def search(cache):
        given = {**os.environ, "HOME": "/proc/x", "DLM_RAG_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, corpus, str(folder / "indexes")],
            env=given,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout == "emma\n", done.stderr
        return done.stderr

    def compiled():
        return {path: path.stat().st_mtime_ns for path in folder.glob("cache/numba/*/*.nbc")}

    with tempfile.TemporaryDirectory() as made:  # those of pytest are for root alone
        folder = Path(made)
        folder.chmod(0o777)
        corpus = str(write_jsonl_file(folder / "corpus.jsonl", [{"id": "emma", "contents": "A novel."}]))
        assert "NUMBA" not in search(folder / "cache")
        known = compiled()
        assert search(folder / "cache") == "" and known and compiled() == known, "compiled once"
        assert "NUMBA_CACHE_DIR" in search("/proc/x")
