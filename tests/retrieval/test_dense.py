"""A build of passage vectors that was stopped goes on; of nobody else's."""

import hashlib
import logging
import multiprocessing
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dlm_rag.errors import CorpusError, RunError
from dlm_rag.retrieval import dense
from dlm_rag.retrieval import encoder as encoder_module
from dlm_rag.retrieval.corpus import open_corpus
from tests.support.passages import write_jsonl_file

PASSAGES, BLOCK = 300, 64  # with a batch size of 1


class Encoder:
    """Vectors that follow from the texts; counts what it embeds, and is killed where it is told to."""

    device = torch.device("cpu")

    def __init__(self, weights=0.0, die=None):
        self.embedded, self.weights, self._die = [], weights, die
        self.tokenizer = SimpleNamespace(backend_tokenizer=None)

    def __str__(self):
        return "Encoder"

    def state_dict(self):
        return {"weights": torch.tensor([self.weights])}

    def encode(self, texts, **_):
        if self._die is not None and len(self.embedded) > self._die[0]:
            self._die[1]()
        self.embedded += [text for text in texts if text != "width"]
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        return torch.tensor([[*digest] for digest in digests]) + self.weights


@pytest.fixture
def corpus(tmp_path):
    lines = [{"id": str(n), "contents": f"passage {n}"} for n in range(PASSAGES)]
    return open_corpus(write_jsonl_file(tmp_path / "corpus.jsonl", lines), tmp_path / "indexes")


@pytest.fixture
def build(monkeypatch):
    """Opens the index with this encoder; the vectors' file as bytes."""
    monkeypatch.setattr(dense, "FLUSH_INTERVAL_SECONDS", 0.0)

    def opened(corpus, encoder):
        monkeypatch.setattr(encoder_module, "load_sentence_transformer", lambda *_: encoder)
        dense.open_dense_retriever(corpus, 3, encoder_module.TextEncoder("model", batch_size=1))
        return {path.parent.name: path.read_bytes() for path in corpus.folder.glob("*/vectors.npy")}

    return opened


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt():
    raise KeyboardInterrupt


def test_a_build_that_was_killed_goes_on_and_gives_the_same_bytes(corpus, build):
    encoder = Encoder(die=(150, kill))
    worker = multiprocessing.get_context("fork").Process(target=build, args=(corpus, encoder))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    second = Encoder()
    ((name, resumed),) = build(corpus, second).items()
    assert second.embedded == [f"passage {n}" for n in range(3 * BLOCK, PASSAGES)]
    for path in (corpus.folder / name).iterdir():
        path.unlink()
    (corpus.folder / name).rmdir()
    whole = Encoder()
    assert build(corpus, whole)[name] == resumed and len(whole.embedded) == PASSAGES


def test_ctrl_c_keeps_what_is_finished_and_says_so(corpus, build, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(dense, "FLUSH_INTERVAL_SECONDS", 1e9)
    with pytest.raises(KeyboardInterrupt):
        build(corpus, Encoder(die=(100, interrupt)))
    assert "128 passages are embedded: the same command resumes" in caplog.text
    second = Encoder()
    build(corpus, second)
    assert len(second.embedded) == PASSAGES - 2 * BLOCK


def test_another_encoder_or_corpus_begins_anew(corpus, build, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build(corpus, Encoder(die=(100, interrupt)))
    other = Encoder(weights=1.0)
    build(corpus, other)
    assert len(other.embedded) == PASSAGES
    lines = [{"id": str(n), "contents": f"other {n}"} for n in range(PASSAGES)]
    theirs = open_corpus(write_jsonl_file(tmp_path / "corpus.jsonl", lines), tmp_path / "indexes")
    again = Encoder()
    build(theirs, again)
    assert len(again.embedded) == PASSAGES


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("finished", "abc"),
        ("finished", "-1"),
        ("finished", "99999"),
        ("vectors.npy", "x"),
        ("vectors.npy", None),
    ],
)
def test_what_a_build_left_and_is_damaged_is_begun_anew(corpus, build, name, left):
    with pytest.raises(KeyboardInterrupt):
        build(corpus, Encoder(die=(100, interrupt)))
    (path,) = corpus.folder.glob(f"*.building/{name}")
    path.unlink() if left is None else path.write_text(left)
    second = Encoder()
    build(corpus, second)
    assert len(second.embedded) == PASSAGES


def test_vectors_that_are_no_numbers_are_refused(corpus, build):
    with pytest.raises(RunError, match="vectors that are not finite"):
        build(corpus, Encoder(weights=float("nan")))


def test_a_long_build_says_what_it_takes_before(corpus, build, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    now = iter(range(0, 100_000, 1000))
    monkeypatch.setattr(dense, "perf_counter", lambda: next(now))
    build(corpus, Encoder())
    (said,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("embedding takes")]
    # 64 of 300 passages in 1,000 seconds; 300 vectors of 32 numbers.
    assert "about 61 min, and 38 kB on disk" in said


def test_a_full_disk_is_found_before_anything_is_embedded(corpus, build, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    encoder = Encoder()
    with pytest.raises(CorpusError, match="No space left on device"):
        build(corpus, encoder)
    assert not encoder.embedded
    assert not list(corpus.folder.glob("*/vectors.npy"))


def test_the_vectors_are_those_of_the_passages_in_order(corpus, build):
    build(corpus, encoder := Encoder())
    (path,) = corpus.folder.glob("*/vectors.npy")
    assert np.array_equal(np.load(path), encoder.encode([passage.text for passage in corpus]).numpy())
