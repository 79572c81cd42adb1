"""The golden traces that are in the repository, and the tiny checkpoints that they were made on."""

import json
from pathlib import Path

import pytest
from golden.tiny import CONFIGS, END, MASK, fingerprint, write_checkpoint

from dlm_rag.tokenizer import read_tokenizer

TRACES = sorted((Path(__file__).parent / "golden").glob("*.json"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_trace_was_made_on_these_weights(path):
    trace = json.loads(path.read_text())
    assert trace["weights"] == fingerprint(trace["checkpoint"])


@pytest.mark.parametrize("family", CONFIGS)
def test_tokenizer_of_a_tiny_checkpoint(tmp_path, family):
    write_checkpoint(family, tmp_path)
    inner = read_tokenizer(tmp_path)
    assert inner.decode(inner.encode("Who wrote Emma?")) == "Who wrote Emma?"
    assert (inner.mask_token_id, inner.convert_tokens_to_ids("<|im_end|>")) == (MASK, END)
