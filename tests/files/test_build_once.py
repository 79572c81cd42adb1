"""Indexes are complete or not there, whoever builds them and whenever they die."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from dlm_rag.errors import CorpusError
from dlm_rag.files.build_once import DIGESTS_FILE, build_once
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import build_query
from tests.support.processes import wait_until


def slow_build(scratch):
    (scratch / "first").write_text("1")
    time.sleep(0.3)
    with (scratch.parent / "builds").open("a") as file:
        file.write("built\n")
    (scratch / "second").write_text("2")


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_several_processes_build_an_index_once(tmp_path, damaged):
    if damaged:
        build_once(tmp_path / "index", slow_build)
        (tmp_path / "index" / "second").write_text("3")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=build_once, args=(tmp_path / "index", slow_build)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "builds").read_text() == "built\n" * (1 + damaged)
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == ["first", "second", DIGESTS_FILE]
    assert (tmp_path / "index" / "second").read_text() == "2"
    (tmp_path / "index" / "mine").touch()
    build_once(tmp_path / "index", slow_build)
    assert (tmp_path / "index" / "mine").exists(), "what was added is no damage"


@pytest.mark.slow
def test_a_build_that_was_killed_is_never_picked_up(tmp_path):
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=build_once, args=(tmp_path / "index", slow_build))
    worker.start()
    wait_until((tmp_path / "index.building" / "first").exists)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    with pytest.raises(KeyError):
        build_once(tmp_path / "index", lambda scratch: {}[scratch])
    assert not (tmp_path / "index").exists()
    build_once(tmp_path / "index", lambda scratch: (scratch / "third").touch())
    assert {path.name for path in (tmp_path / "index").iterdir()} == {"third", DIGESTS_FILE}, (
        "the rest is gone"
    )


def test_a_folder_that_cannot_be_written_is_the_users_to_choose(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(CorpusError, match="retrieval.index_dir"):
        build_once(tmp_path / "sub" / "index", slow_build)


HARMS = {
    "missing": Path.unlink,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_index_is_reported_and_built_again(corpus_file, tmp_path, caplog, harm):
    """Whatever has become of whichever file, the passages found are those that were."""

    def search():
        retriever = load_retriever(corpus_file, top_k=2, index_dir=str(tmp_path / "index"))
        return [passage.id for passage in retriever.search([build_query("question", "who wrote dune")])[0]]

    found = search()
    files = [path for path in (tmp_path / "index").rglob("*") if path.is_file() and path.suffix != ".lock"]
    kept = {path: path.read_bytes() for path in files}
    assert len(kept) == 8
    for path in kept:
        caplog.clear()
        HARMS[harm](path)
        assert search() == found == ["dune"]
        assert path.name in caplog.text and "built again" in caplog.text
        assert {path: path.read_bytes() for path in kept} == kept, path


def test_a_build_that_goes_on_finds_what_it_has_left(tmp_path):
    def killed(scratch):
        (scratch / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "index", killed, resumable=True)
    build_once(
        tmp_path / "index", lambda scratch: (scratch / "half").rename(scratch / "whole"), resumable=True
    )
    assert (tmp_path / "index" / "whole").exists()


def test_a_list_of_files_that_leads_elsewhere_is_damage(tmp_path):
    """Nothing outside of an index is read for it."""
    build_once(tmp_path / "index", lambda scratch: (scratch / "a").write_text("1"))
    (tmp_path / "b").write_text("1")
    note = json.loads((tmp_path / "index" / DIGESTS_FILE).read_text())
    note["../b"] = note["a"]
    (tmp_path / "index" / DIGESTS_FILE).write_text(json.dumps(note))
    build_once(tmp_path / "index", lambda scratch: (scratch / "a").write_text("3"))
    assert (tmp_path / "index" / "a").read_text() == "3"
