"""Indexes are complete or not there, whoever builds them and whenever they die."""

import multiprocessing
import os
import signal
import time

import pytest

from dlm_rag.errors import CorpusError
from dlm_rag.retrieval.index import WHOLE, build_once


def slow_build(scratch):
    (scratch / "first").write_text("1")
    time.sleep(0.3)
    with (scratch.parent / "builds").open("a") as file:
        file.write("built\n")
    (scratch / "second").write_text("2")


def test_two_processes_at_once_build_one_index(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=build_once, args=(tmp_path / "index", slow_build)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "builds").read_text() == "built\n"
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == ["first", "second", WHOLE]


def test_a_build_that_was_killed_is_never_picked_up(tmp_path):
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=build_once, args=(tmp_path / "index", slow_build))
    worker.start()
    while not (tmp_path / "index.building" / "first").exists():
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert not (tmp_path / "index").exists()
    build_once(tmp_path / "index", lambda scratch: (scratch / "third").touch())
    assert {path.name for path in (tmp_path / "index").iterdir()} == {"third", WHOLE}, "the rest is gone"


def test_a_build_that_fails_leaves_no_index(tmp_path):
    def broken(scratch):
        (scratch / "first").touch()
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        build_once(tmp_path / "index", broken)
    assert not (tmp_path / "index").exists()


def test_a_folder_that_cannot_be_written_is_the_users_to_choose(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(CorpusError, match="retrieval.index_folder"):
        build_once(tmp_path / "sub" / "index", slow_build)
