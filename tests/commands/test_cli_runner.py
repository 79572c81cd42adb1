"""What every program does: sentences for what is no fault of its own, streams that are not as usual."""

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dlm_rag.cli import check_writable, print_note, run_program
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.files import journal
from dlm_rag.files.paths import open_atomic_file, open_atomic_folder, write_text_atomic
from tests.support.paths import ROOT


def ends(capfd, error) -> tuple[int, str]:
    """Exit status and standard error of a program that raises."""

    def main(argv):
        raise error

    with pytest.raises(SystemExit) as stop:
        run_program(main)
    return stop.value.code, capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ConfigError("no such\n key"), 2, "error: no such key\n"),
        (RunError("lost"), 1, "error: lost\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "error: No space left on device\n"),
        (PermissionError(13, "Permission denied", "/x/y"), 1, "error: /x/y: Permission denied\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "error: Broken pipe\n"),  # not of our output
        (ConnectionResetError("by peer"), 1, "error: by peer\n"),
        (MemoryError(), 1, "error: the memory is full"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 1, "the memory is"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), 1, "error: the memory is full (CUDA"),
        (ConfigError("the id 'a\x1b[2J\u202eb\x9b'"), 2, "error: the id 'a [2J b '\n"),
    ],
)  # fmt: skip
def test_what_is_no_fault_of_the_program_is_one_sentence(capfd, error, code, says):
    found, err = ends(capfd, error)
    assert found == code and says in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("a bug"), KeyError("a bug")])
def test_a_fault_of_the_program_keeps_its_traceback(error):
    def main(argv):
        raise error

    with pytest.raises(type(error), match="a bug"):
        run_program(main)


def test_what_is_said_holds_no_control_characters(capfd):
    print_note("\x1b[31mred\x00\x85\tand\nso")
    assert capfd.readouterr().err == " [31mred   and\nso\n"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, env=os.environ | environment, timeout=60
    )


def program(body: str) -> str:
    code = (
        f"import sys\nfrom dlm_rag.cli import run_program\ndef main(argv):\n    {body}\nrun_program(main)"
    )
    return shlex.join([sys.executable, "-c", code])


CLOSED = b"error: standard output or error is closed"
LOG = "import logging; logging.getLogger('dlm_rag').info('the id %s', '\\x1b[2J')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "to", "code", "out", "err"),
    [
        (LOG, "", 0, b"", b"the id  [2J\n"),
        ("print('never', file=open('/dev/stderr', 'w'))", ">&-", 2, b"", CLOSED),
        ("print('never reached')", "2>&-", 2, CLOSED, b""),
        ("print('x')", "> /dev/full", 1, b"", b"error: No space left on device\n"),
        ("print('x', flush=True)", "> /dev/full", 1, b"", b"error: No space left on device\n"),
        ("[print(n) for n in range(100000)]", "| head -1", 0, b"0\n", b""),
    ],
)
def test_streams_that_are_not_as_usual(body, to, code, out, err):
    done = shell(f"set -o pipefail; {program(body)} {to}")
    assert done.returncode == code and done.stdout.startswith(out) and done.stderr.startswith(err)
    assert done.stdout.count(b"\n") == bool(out) and done.stderr.count(b"\n") == bool(err)


def test_a_working_folder_that_is_gone_is_one_sentence(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    code, err = ends(capfd, None)
    assert code == 2 and "the working folder is there no more" in err


def test_a_path_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    link, loop = Path("link"), Path("loop")
    link.symlink_to("nowhere")
    loop.symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    check_writable("link", "out")
    for path in ("a\0b", "loop", "x" * 300, "folder/", "-", "/dev/null"):
        with pytest.raises(ConfigError, match="out="):
            check_writable(path, "out")
    assert sorted(tmp_path.iterdir()) == before and link.is_symlink(), "a link that leads nowhere stays"
    check_writable("new/folder/x", "out")
    assert [*Path("new").rglob("*")] == [Path("new/folder")]


def test_a_new_file_takes_the_place_of_the_old_at_once_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_text_atomic(path, "old")
    with pytest.raises(RuntimeError), open_atomic_file(path) as scratch:
        assert scratch.suffix == ".json"
        scratch.write_text("ne")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    link = tmp_path / "link"
    link.symlink_to(path)
    write_text_atomic(link, "new")
    assert link.is_symlink() and path.read_text() == "new"


def test_a_new_folder_replaces_files_one_by_one_and_leaves_others(tmp_path):
    for text in ("old", "new"):
        with open_atomic_folder(tmp_path / "model") as scratch:
            (scratch / "config.json").write_text(text)
        assert (tmp_path / "model" / "config.json").read_text() == text
        (tmp_path / "model" / "mine").touch()
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "mine"]
    with pytest.raises(RuntimeError), open_atomic_folder(tmp_path / "model") as scratch:
        (scratch / "config.json").write_text("half")
        raise RuntimeError
    assert (tmp_path / "model" / "config.json").read_text() == "new"


def test_a_lock_is_one_process_at_a_time(tmp_path):
    for _ in range(2):
        with journal.hold_file_lock(tmp_path / "lock", "it"):
            other = pytest.raises(ConfigError, match="it is being written by another process")
            with other, journal.hold_file_lock(tmp_path / "lock", "it"):
                pass
            assert (tmp_path / "lock").exists(), "the lock is another's"
