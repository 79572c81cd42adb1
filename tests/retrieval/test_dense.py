"""A build of passage vectors that was stopped goes on; of nobody else's."""

import hashlib
import io
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import CorpusError
from dlm_rag.retrieval import dense
from dlm_rag.retrieval import encoder as encoder_module
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.retrieval.dense import PassageVectors, open_faiss_flat_index
from dlm_rag.retrieval.query import build_query
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

    def opened(corpus, encoder, **more):
        monkeypatch.setattr(encoder_module, "load_sentence_transformer", lambda *_: encoder)
        monkeypatch.setattr(dense, "BATCH_SIZE", 1)
        config = RetrievalConfig(embedding_model="model", **more)
        dense.open_dense_retriever(config, corpus)
        return {path.parent.name: path.read_bytes() for path in corpus.folder.glob("*/vectors.npy")}

    return opened


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt():
    raise KeyboardInterrupt


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
    "left",
    [
        lambda data: b"x",
        lambda data: data.replace(b"(64, 32)", b"(63, 32)"),
        lambda data: data[:-7],
        lambda data: data[: -BLOCK * 100] + bytes(BLOCK * 100),
    ],
)
def test_what_a_build_left_is_taken_as_far_as_it_is_whole(corpus, build, left):
    with pytest.raises(KeyboardInterrupt):
        build(corpus, Encoder(die=(100, interrupt)))
    (path,) = corpus.folder.glob(f"*.building/parts/{BLOCK}-{2 * BLOCK}/vectors.npy")
    path.write_bytes(left(path.read_bytes()))
    second = Encoder()
    build(corpus, second)
    assert second.embedded == [f"passage {n}" for n in range(BLOCK, PASSAGES)]
    (path,) = corpus.folder.glob("*/vectors.npy")
    expected = Encoder().encode([passage.text for passage in corpus]).numpy()
    assert np.array_equal(np.load(path), expected)


class UnitEncoder(Encoder):
    def encode(self, texts, **_):
        return torch.nn.functional.normalize(super().encode(texts))


def nearest(retriever, text):
    ((first, *_),) = retriever.search([build_query("question", text)])
    return first.id


@pytest.mark.parametrize(("dtype", "share"), [("float16", 2), ("int8", 4)])
def test_smaller_vectors_resume_alike_and_find_nearly_the_same(corpus, build, dtype, share):
    with pytest.raises(KeyboardInterrupt):
        build(corpus, UnitEncoder(die=(150, interrupt)), embedding_dtype=dtype)
    second = UnitEncoder()
    (small,) = build(corpus, second, embedding_dtype=dtype).values()
    assert 0 < len(second.embedded) < PASSAGES
    names = build(corpus, UnitEncoder())
    whole = max(names.values(), key=len)
    assert len(names) == 2 and len(small) < len(whole) / share * 1.2
    unit = UnitEncoder().encode([passage.text for passage in corpus])
    vectors = PassageVectors(np.load(io.BytesIO(small)), torch.device("cpu"))
    found = vectors.read(0, PASSAGES)
    step = {"float16": 2.0**-11, "int8": 1 / 254}[dtype] * unit.abs().amax(1, keepdim=True)
    assert ((found - unit).abs() <= step * 1.001).all()
    assert torch.equal(found[70:90], vectors.read(70, 90))


@pytest.mark.parametrize("kind", ["ip", "l2"])
def test_a_flat_index_of_faiss_is_read_as_it_is(tmp_path, monkeypatch, kind):
    """faiss 1.15.1 wrote them: `IndexFlatIP(32)`, or L2, of the vectors of `passage 0` to `passage 5`."""
    lines = [{"id": str(n), "contents": f"passage {n}"} for n in range(6)]
    corpus = open_corpus(write_jsonl_file(tmp_path / "c.jsonl", lines), tmp_path / "indexes")
    encoder = UnitEncoder()
    monkeypatch.setattr(encoder_module, "load_sentence_transformer", lambda *_: encoder)
    path = Path(__file__).with_name(f"flat_{kind}.faiss")
    config = RetrievalConfig(method="dense", embedding_model="model", faiss_index=str(path), top_k=2)
    retriever = dense.open_dense_retriever(config, corpus)
    assert [nearest(retriever, f"passage {n}") for n in range(6)] == [str(n) for n in range(6)]
    assert encoder.embedded == [f"passage {n}" for n in range(6)], "the questions alone"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"IwFl" + data[4:],
        lambda data: data[:-4],
        lambda data: data[:45] + bytes(len(data) - 45),
    ],
    ids=["another kind", "the end is missing", "no unit vectors"],
)
def test_what_is_no_flat_index_of_these_passages_is_refused(tmp_path, damage):
    path = tmp_path / "index"
    path.write_bytes(damage(Path(__file__).with_name("flat_ip.faiss").read_bytes()))
    with pytest.raises(CorpusError):
        open_faiss_flat_index(str(path), 32, 6)
    with pytest.raises(CorpusError):
        open_faiss_flat_index(str(Path(__file__).with_name("flat_ip.faiss")), 32, 7)
