"""A build of passage vectors that was stopped goes on; of nobody else's."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dlm_rag.config import RetrievalConfig
from dlm_rag.retrieval import dense
from dlm_rag.retrieval.corpus import open_corpus
from tests.support.passages import write_jsonl_file

PASSAGES, BLOCK = 300, 64  # with a batch size of 1


class Encoder:
    """Vectors that follow from the texts; counts what it embeds, and is killed where it is told to."""

    device, max_seq_length = torch.device("cpu"), None

    def __init__(self, die=None):
        self.embedded, self._die = [], die
        self.tokenizer = SimpleNamespace(backend_tokenizer=None)

    def __str__(self):
        return "Encoder"

    def state_dict(self):
        return {}

    def encode(self, texts, **_):
        if self._die is not None and len(self.embedded) > self._die[0]:
            self._die[1]()
        self.embedded += texts
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        return torch.tensor([[*digest] for digest in digests]).float()


@pytest.fixture
def corpus(tmp_path):
    lines = [{"id": str(n), "contents": f"passage {n}"} for n in range(PASSAGES)]
    return open_corpus(write_jsonl_file(tmp_path / "corpus.jsonl", lines), tmp_path / "indexes")


@pytest.fixture
def build(monkeypatch):
    """Opens the index with this encoder; the vectors' file as bytes."""

    def opened(corpus, encoder, **more):
        monkeypatch.setattr(dense, "load_sentence_transformer", lambda *_: encoder)
        monkeypatch.setattr(dense, "BATCH_SIZE", 1)
        config = RetrievalConfig(embedding_model="model", **more)
        dense.open_dense_retriever(config, corpus)
        return {path.parent.name: path.read_bytes() for path in corpus.folder.glob("*/vectors.npy")}

    return opened


def interrupt():
    raise KeyboardInterrupt


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
