"""The golden traces that are in the repository, and the tiny checkpoints that they were made on."""

import json
from pathlib import Path

import pytest
from golden.tiny import CONFIGS, END, MASK, MASKS, fingerprint, write_checkpoint

from dlm_rag.tokenizer import read_tokenizer

FILES = sorted((Path(__file__).parent / "golden").glob("*.json"))
TRACES = {path.stem: json.loads(path.read_text()) for path in FILES}
OURS = [name for name, trace in TRACES.items() if trace["checkpoint"] in CONFIGS]


@pytest.mark.parametrize("name", OURS)
def test_a_trace_was_made_on_these_weights(name):
    assert TRACES[name]["weights"] == fingerprint(TRACES[name]["checkpoint"])


@pytest.mark.parametrize("name", OURS)
def test_a_trace_commits_each_token_once(name):
    """And has steps of one token and of several, but where the rule says one."""
    sizes = set()
    for case in TRACES[name]["cases"]:
        places = [place for step in case["steps"] for place in step["pos"]]
        assert len(places) == len(set(places))
        assert case["forwards"]["denoise"] == sum("store" not in step for step in case["steps"])
        sizes |= {len(step["pos"]) for step in case["steps"]}
    assert max(sizes) > 1 or name == "sdar-sequential"


@pytest.mark.parametrize("family", CONFIGS)
def test_tokenizer_of_a_tiny_checkpoint(tmp_path, family):
    write_checkpoint(family, tmp_path)
    inner = read_tokenizer(tmp_path)
    assert inner.decode(inner.encode("Who wrote Emma?")) == "Who wrote Emma?"
    assert inner.convert_tokens_to_ids([MASKS[family], "<|im_end|>"]) == [MASK, END]
