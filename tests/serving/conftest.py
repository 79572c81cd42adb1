"""A server that the tests of a file share."""

import pytest

from dlm_rag.retrieval.corpus import open_corpus
from tests.support.passages import PASSAGES, write_jsonl_file
from tests.support.serving import made_decoder, serve_decoder


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    path = tmp_path_factory.mktemp("shared") / "corpus.jsonl"
    write_jsonl_file(path, [{"id": i, "title": t, "contents": c} for i, t, c in PASSAGES])
    with serve_decoder(made_decoder(open_corpus(path))) as service:
        yield service
