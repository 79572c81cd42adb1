"""Corpus files: what a passage is, and every bad line by file and line number."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
from blake3 import blake3

from dlm_rag.errors import CorpusError
from dlm_rag.files.digest import digest_file
from dlm_rag.retrieval import corpus as corpus_module
from dlm_rag.retrieval.corpus import Passage, open_corpus
from tests.support.passages import PASSAGES, write_jsonl_file

GOOD = b'{"id": "a", "contents": "text"}\n'


def test_rows_are_the_passages_in_order(corpus):
    assert [passage.id for passage in corpus] == [name for name, _, _ in PASSAGES]
    assert corpus[-1].title == "Frank Herbert" and len(corpus[1:3]) == 2
    with pytest.raises(IndexError):
        corpus[5]


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


def test_text_is_accepted_for_contents_and_a_number_for_an_id(tmp_path):
    path = write_jsonl_file(tmp_path / "c.jsonl", [{"id": 7, "text": "Zoë’s “name”\u2028is odd"}])
    assert open_corpus(path)[0] == Passage("7", "", "Zoë’s “name”\u2028is odd")


def test_blank_lines_windows_line_ends_and_a_byte_order_mark_do_no_harm(tmp_path):
    text = (
        b"\n\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + b"  \n\n" + GOOD.replace(b'"a"', b'"b"') + b"\n"
    )
    (tmp_path / "c.jsonl").write_bytes(text)
    assert [p.id for p in open_corpus(tmp_path / "c.jsonl")] == ["a", "b"]


def test_a_last_line_without_its_end_counts(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(GOOD + GOOD.replace(b'"a"', b'"b"').rstrip())
    assert [p.id for p in open_corpus(tmp_path / "c.jsonl")] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{not json}\n", "line 2: the line is not JSON"),
        (b"[1]\n", "line 2: the line is not a JSON object"),
        (b'{"id": "b", "content": "x"}\n', "line 2: the passage has no 'contents' (nearest: 'content')"),
        (b'{"id": "b", "contents": " "}\n', "line 2: 'contents' must be a text that is not empty"),
        (b'{"id": "b", "contents": 3}\n', "line 2: 'contents' must be a text"),
        (b'{"contents": "x"}\n', "line 2: the passage has no 'id'"),
        (GOOD, "line 2: the id 'a' occurs a second time"),
        (b'{"id": "b", "contents": "\xff"}\n', "line 2: the line is not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    (tmp_path / "c.jsonl").write_bytes(GOOD + line)
    with pytest.raises(CorpusError) as error:
        open_corpus(tmp_path / "c.jsonl")
    assert str(error.value).startswith(f"{tmp_path / 'c.jsonl'}, {says}")


def test_no_passages_and_no_file(tmp_path):
    (tmp_path / "c.jsonl").touch()
    with pytest.raises(CorpusError, match="holds no passages"):
        open_corpus(tmp_path / "c.jsonl")
    with pytest.raises(CorpusError, match="was not found"):
        open_corpus(tmp_path / "d.jsonl")


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
    assert all(len(passage.contents) <= 1200 for passage in passages)
    assert sum(len(passage.contents.replace(" ", "").replace("\n", "")) for passage in passages) == len(
        text.rpartition("\n")[2].replace(" ", "")
    )


def test_an_index_folder_stands_for_its_corpus_until_the_file_changes(corpus_file):
    corpus = open_corpus(corpus_file)
    again = open_corpus(corpus.folder)
    assert (again.fingerprint, again.folder) == (corpus.fingerprint, corpus.folder)
    with corpus_file.open("a") as file:
        file.write(json.dumps({"id": "new", "contents": "new"}) + "\n")
    with pytest.raises(CorpusError, match="has changed since that index was built"):
        open_corpus(corpus.folder)
    with pytest.raises(CorpusError, match="is not an index folder"):
        open_corpus(corpus_file.parent)


def cut_short(path):
    with path.open("r+b") as file:
        file.truncate(100)


def overwrite(path):
    path.write_bytes(path.read_bytes().replace(b"Austen", b"Bronte"))


def append(path):
    with path.open("ab") as file:
        file.write(GOOD)


@pytest.mark.parametrize("change", [cut_short, overwrite, append, lambda path: path.write_bytes(b"")])
def test_a_file_that_changes_while_it_is_in_use_is_said(corpus_file, change):
    """Not a signal that ends the process, and no passage that the index is not of."""
    corpus = open_corpus(corpus_file)
    assert corpus[4].id == "herbert"
    change(corpus_file)
    os.utime(corpus_file, ns=(0, 1))  # the clock of a file may be too slow to tell a test's steps apart
    for read in (lambda: corpus.read_passages([0]), lambda: corpus[4:], lambda: list(corpus)):
        with pytest.raises(CorpusError, match="has changed while it was in use"):
            read()


def test_a_byte_that_changes_is_seen_though_size_and_time_are_put_back(corpus_file):
    corpus, known = open_corpus(corpus_file), corpus_file.stat()
    time.sleep(0.02)  # longer than a tick of the clock that files have
    overwrite(corpus_file)
    os.utime(corpus_file, ns=(known.st_atime_ns, known.st_mtime_ns))
    assert corpus_file.stat().st_mtime_ns == known.st_mtime_ns
    with pytest.raises(CorpusError, match="has changed while it was in use"):
        corpus.read_passages([0])


def touch(path):
    os.utime(path, ns=(0, 1))


def rewrite(path):
    path.write_bytes(path.read_bytes())


@pytest.mark.parametrize("change", [touch, rewrite, lambda path: path.chmod(0o600)])
def test_the_same_bytes_are_the_same_corpus(corpus_file, change):
    """Read once more after the change, and not again."""
    corpus = open_corpus(corpus_file)
    change(corpus_file)
    with ThreadPoolExecutor(4) as threads:  # of which each may be the one that looks
        found = list(threads.map(lambda row: corpus.read_passages([row])[0].id, [*range(5)] * 20))
    assert found == [name for name, _, _ in PASSAGES] * 20
    with patch.object(corpus_module, "digest_open_file", side_effect=AssertionError("read again")):
        assert corpus[0:1]


def test_a_file_that_another_takes_the_name_of_is_read_on(corpus_file):
    corpus = open_corpus(corpus_file)
    corpus_file.with_name("new").write_bytes(GOOD)
    corpus_file.with_name("new").replace(corpus_file)
    assert [passage.id for passage in corpus] == [name for name, _, _ in PASSAGES]
    corpus_file.unlink()
    assert corpus[0].id == "emma"


def test_a_file_that_changes_while_it_is_opened_is_said(corpus_file, monkeypatch):
    """Its offsets would be of other bytes than its fingerprint."""

    def slow(path):
        found = digest_file(path)
        append(path)
        return found

    monkeypatch.setattr("dlm_rag.retrieval.corpus.digest_file", slow)
    with pytest.raises(CorpusError, match="has changed while it was in use"):
        open_corpus(corpus_file)


def test_real_corpora_are_read_whole(real):
    for name, passages in (("hotpotqa", 2960), ("2wikimultihopqa", 7005)):
        corpus = open_corpus(real / name / "corpus.jsonl")
        assert len(corpus) == passages == len({passage.id for passage in corpus})
        assert all(passage.text.count(passage.title) >= 1 for passage in corpus)


def test_ids_that_agree_in_their_digests_are_still_different(tmp_path, monkeypatch):
    """Only 8 bytes of each are kept while a file is read."""
    path = write_jsonl_file(tmp_path / "many.jsonl", [{"id": n, "contents": "text"} for n in range(5)])
    monkeypatch.setattr(corpus_module, "blake3", lambda _: blake3(b""))
    assert [passage.id for passage in open_corpus(path)] == ["0", "1", "2", "3", "4"]
    with path.open("a") as file:
        file.write('{"id": "3", "contents": "again"}\n')
    with pytest.raises(CorpusError, match="line 6: the id '3' occurs a second time"):
        open_corpus(path)
