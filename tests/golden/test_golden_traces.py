"""The golden traces that are in the repository, and the tiny checkpoints that they were made on."""

import json
from pathlib import Path

import pytest

from dlm_rag.tokenizer import load_tokenizer
from tests.golden.tiny_checkpoints import CONFIGS, MASK, digest_checkpoint, special_tokens, write_checkpoint

FILES = sorted(Path(__file__).parent.glob("*.json"))
TRACES = {path.stem: json.loads(path.read_text()) for path in FILES}
OURS = [name for name, trace in TRACES.items() if trace["checkpoint"] in CONFIGS]


@pytest.mark.parametrize("name", OURS)
def test_a_trace_was_made_on_these_weights(name):
    assert TRACES[name]["weights"] == digest_checkpoint(TRACES[name]["checkpoint"])


@pytest.mark.parametrize("name", OURS)
def test_a_trace_follows_its_rule(name):
    """Each token is committed once, by a threshold or as the least; what is edited was another token, and
    what is returned is what the steps lead to, masks included.
    """
    sizes = set()
    for case in TRACES[name]["cases"]:
        settings, canvas = TRACES[name]["settings"] | case.get("settings", {}), dict[int, int]()
        assert case["forwards"]["denoise"] == sum("store" not in step for step in case["steps"])
        for step in case["steps"]:
            assert canvas.keys().isdisjoint(step["pos"]) and len(set(step["pos"])) == len(step["pos"])
            sizes.add(len(step["pos"]))
            if name.startswith("llada2"):
                block = settings.get("block_size") or settings["block_length"]
                steps = settings.get("steps_per_block") or settings.get("steps")
                least = -(-block // steps) if steps else settings["num_to_transfer"]
                clear = all(confidence > settings["threshold"] for confidence in step["conf"])
                assert clear or len(step["pos"]) <= least
            edited = step.get("edited", {"pos": [], "tok": [], "conf": []})
            for place, token in zip(edited["pos"], edited["tok"], strict=True):
                assert canvas[place] != token
            assert all(confidence > settings["editing_threshold"] for confidence in edited["conf"])
            for part in (step, edited):
                canvas |= zip(part["pos"], part["tok"], strict=True)
        if name.startswith("llada"):  # others cut or pad after the end
            assert case["tokens"] == [canvas.get(place, MASK) for place in range(len(case["tokens"]))]
    assert max(sizes) > 1 or name.endswith(("sequential", "autoregressive"))


@pytest.mark.parametrize("family", CONFIGS)
def test_tokenizer_of_a_tiny_checkpoint(tmp_path, family):
    write_checkpoint(family, tmp_path)
    inner = load_tokenizer(tmp_path)
    assert inner.decode(inner.encode("Who wrote Emma?")) == "Who wrote Emma?"
    ids, texts = zip(*special_tokens(family).items(), strict=True)
    assert inner.convert_tokens_to_ids(list(texts)) == list(ids)
