"""Corpus files: what a passage is, and every bad line by file and line number."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
from blake3 import blake3

from dlm_rag.errors import CorpusError
from dlm_rag.files.paths import digest_file
from dlm_rag.retrieval import corpus as corpus_module
from dlm_rag.retrieval.corpus import Passage, open_corpus
from tests.support.passages import PASSAGES, write_jsonl_file

GOOD = b'{"id": "a", "contents": "text"}\n'


def test_rows_are_the_passages_in_order(corpus, corpus_file):
    """Of the file that was opened, whatever has its name by now."""
    assert corpus[-1].title == "Frank Herbert" and len(corpus[1:3]) == 2
    with pytest.raises(IndexError):
        corpus[5]
    corpus_file.with_name("new").write_bytes(GOOD)
    corpus_file.with_name("new").replace(corpus_file)
    assert [passage.id for passage in corpus] == [name for name, _, _ in PASSAGES]


@pytest.mark.parametrize(
    ("passage", "text"),
    [
        (Passage("1", "Emma", "A novel."), "Emma\nA novel."),
        (Passage("1", "", "A novel."), "A novel."),
        (Passage("1", "Emma", "Emma\nA novel."), "Emma\nA novel."),
        (Passage("1", "Emma", '"Emma"\nA novel.'), '"Emma"\nA novel.'),
    ],
)
def test_the_title_is_shown_once(passage, text):
    assert passage.text == text


def test_blank_lines_windows_line_ends_a_byte_order_mark_and_an_open_end_do_no_harm(tmp_path):
    good, odd = GOOD.replace(b"\n", b"\r\n"), "Zoë’s “name”\u2028is odd"
    last = json.dumps({"id": 7, "text": odd}).encode()
    (tmp_path / "c.jsonl").write_bytes(b"\n\xef\xbb\xbf" + good + b"  \n\n" + last)
    assert list(open_corpus(tmp_path / "c.jsonl")) == [Passage("a", "", "text"), Passage("7", "", odd)]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.txt", "x" * 10**6), ("a.txt", "one word more " * 70_000), ("a.md", f"# a{' ' * 10**5}b\nx")],
)
def test_a_text_without_an_end_takes_no_time(tmp_path, name, text):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / name).write_text(text)
    begun = time.process_time()
    passages = open_corpus(tmp_path / "texts", tmp_path / "index")
    assert time.process_time() - begun < 2
    assert all(len(passage.contents) <= 700 for passage in passages)
    assert sum(len(passage.contents.replace(" ", "").replace("\n", "")) for passage in passages) == len(
        text.rpartition("\n")[2].replace(" ", "")
    )


CHANGES = {"other bytes": lambda data: data.replace(b"Austen", b"Bronte"), "emptied": lambda data: b""}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_in_use_is_named(corpus_file, change):
    """Not a signal that ends the process, and no passage that the index is not of."""
    corpus, known = open_corpus(corpus_file), corpus_file.stat()
    assert corpus[4].id == "herbert"
    time.sleep(0.02)  # longer than a tick of the clock that files have
    corpus_file.write_bytes(CHANGES[change](corpus_file.read_bytes()))
    os.utime(corpus_file, ns=(known.st_atime_ns, known.st_mtime_ns))
    for read in (lambda: corpus.read_passages([0]), lambda: corpus[4:], lambda: list(corpus)):
        with pytest.raises(CorpusError, match="has changed while it was in use"):
            read()


SAME = {
    "touched": lambda path: os.utime(path, ns=(0, 1)),
    "written again": lambda path: path.write_bytes(path.read_bytes()),
}


@pytest.mark.parametrize("change", SAME)
def test_the_same_bytes_are_the_same_corpus(corpus_file, change):
    """Read once more after the change, and not again."""
    corpus = open_corpus(corpus_file)
    SAME[change](corpus_file)
    with ThreadPoolExecutor(4) as threads:  # of which each may be the one that looks
        found = list(threads.map(lambda row: corpus.read_passages([row])[0].id, [*range(5)] * 20))
    assert found == [name for name, _, _ in PASSAGES] * 20
    with patch.object(corpus_module, "digest_open_file", side_effect=AssertionError("read again")):
        assert corpus[0:1]


def test_a_file_that_changes_while_it_is_opened_is_said(corpus_file, monkeypatch):
    """Its offsets would be of other bytes than its fingerprint."""

    def slow(path):
        found = digest_file(path)
        path.write_bytes(path.read_bytes() + GOOD)
        return found

    monkeypatch.setattr("dlm_rag.retrieval.corpus.digest_file", slow)
    with pytest.raises(CorpusError, match="has changed while it was in use"):
        open_corpus(corpus_file)


def test_ids_that_agree_in_their_digests_are_still_different(tmp_path, monkeypatch):
    """Only 8 bytes of each are kept while a file is read."""
    path = write_jsonl_file(tmp_path / "many.jsonl", [{"id": n, "contents": "text"} for n in range(5)])
    monkeypatch.setattr(corpus_module, "blake3", lambda _: blake3(b""))
    assert [passage.id for passage in open_corpus(path)] == ["0", "1", "2", "3", "4"]
    with path.open("a") as file:
        file.write('{"id": "3", "contents": "again"}\n')
    with pytest.raises(CorpusError, match="line 6: the id '3' occurs a second time"):
        open_corpus(path)
