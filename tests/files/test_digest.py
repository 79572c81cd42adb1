"""Digests of whole files: any byte counts, and what is remembered of a file is never stale."""

import os
import time

import pytest
from blake3 import blake3

from dlm_rag.files import paths
from dlm_rag.files.paths import digest_file


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file that has not changed for a while, of a size that is worth remembering."""
    monkeypatch.setenv("DLM_RAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(paths, "MIN_CACHED_FILE_BYTES", 1000)
    monkeypatch.setattr(paths, "RACY_WINDOW_NS", 0)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 4)
    return path


@pytest.fixture
def reads(monkeypatch):
    """How often a file was read."""
    seen = []

    class Counted:
        AUTO = 1

        def __new__(cls, **_):
            seen.append(1)
            return blake3()

    monkeypatch.setattr(paths, "blake3", Counted)
    return seen


def test_it_is_the_digest_of_all_bytes_in_blocks_of_any_size(file, monkeypatch):
    expected = blake3(file.read_bytes()).hexdigest()
    for block in (1, 7, 1024, 4096):
        monkeypatch.setattr(paths, "READ_BLOCK_BYTES", block)
        monkeypatch.setattr(paths, "MIN_CACHED_FILE_BYTES", 10**9)
        assert digest_file(file) == expected
    file.write_bytes(b"")
    assert digest_file(file) == blake3(b"").hexdigest()


def test_a_file_that_has_not_changed_is_not_read_again(file, reads):
    first = digest_file(file)
    assert digest_file(file) == first and len(reads) == 1
    link = file.with_name("link")
    link.symlink_to(file)
    assert digest_file(link) == first and len(reads) == 1, "the same file by another name"


def test_a_change_that_keeps_size_and_time_is_seen(file):
    first, times = digest_file(file), file.stat()
    file.write_bytes(file.read_bytes()[::-1])
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_mtime_ns == times.st_mtime_ns and digest_file(file) != first
    other = file.with_name("other")
    other.write_bytes(bytes(1024))
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(file)
    assert digest_file(file) == blake3(bytes(1024)).hexdigest()


def test_a_file_that_has_just_changed_is_not_remembered(file, reads, monkeypatch):
    """It may change again within the same tick of the clock."""
    monkeypatch.setattr(paths, "RACY_WINDOW_NS", 2 * 10**9)
    file.touch()
    digest_file(file)
    digest_file(file)
    assert len(reads) == 2
    later = time.time_ns() + 3 * 10**9
    monkeypatch.setattr(paths.time, "time_ns", lambda: later)
    digest_file(file)
    digest_file(file)
    assert len(reads) == 3


def test_a_file_that_changes_while_it_is_read_is_not_remembered(file, monkeypatch):
    class Slow:
        def __init__(self, **_):
            file.write_bytes(bytes(1024))
            self.update, self.hexdigest = lambda _: None, lambda: "torn"

    with monkeypatch.context() as patched:
        Slow.AUTO = 1
        patched.setattr(paths, "blake3", Slow)
        assert digest_file(file) == "torn"
    assert digest_file(file) == blake3(bytes(1024)).hexdigest()


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b"{}", b"\xff", b'{"digest": 7}', b"null"])
def test_a_broken_memory_costs_only_time(file, record, monkeypatch):
    first = digest_file(file)
    (kept,) = (file.parent / "cache" / "digests").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(record)
    assert digest_file(file) == first and kept.read_bytes() == whole
    monkeypatch.setenv("DLM_RAG_CACHE", str(file / "below"))  # which cannot be written
    assert digest_file(file) == first
