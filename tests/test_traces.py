"""The golden traces of public samplers hold together: weights, steps, tokens and rules (see golden/)."""

import json
from pathlib import Path

import pytest
from golden.tiny_experts import FAMILIES, MASK, fingerprint

TRACES = {
    path.stem: trace
    for path in sorted((Path(__file__).parent / "golden").glob("*.json"))
    if (trace := json.loads(path.read_text()))["checkpoint"] in FAMILIES
}


@pytest.mark.parametrize("name", TRACES)
def test_the_weights_are_those_of_the_trace(name):
    assert fingerprint(TRACES[name]["checkpoint"]) == TRACES[name]["weights"]


@pytest.mark.parametrize("name", TRACES)
def test_the_steps_lead_to_the_tokens(name):
    """Only masks are filled, only written tokens edited, and every call has its step."""
    for case in TRACES[name]["cases"]:
        canvas = [MASK] * len(case["tokens"])
        for step in case["steps"]:
            edited = step.get("edited", {"pos": [], "tok": []})
            assert all(canvas[place] == MASK for place in step["pos"])
            assert all(canvas[place] != MASK for place in edited["pos"])
            for part in (step, edited):
                for place, token in zip(part["pos"], part["tok"], strict=True):
                    assert canvas[place] != token
                    canvas[place] = token
        assert canvas == case["tokens"]
        assert case["forwards"]["denoise"] == len(case["steps"])


@pytest.mark.parametrize("name", ["llada2", "llada2-generate", "llada21"])
def test_what_is_written_clears_the_threshold_or_is_the_least_that_must_be(name):
    for case in TRACES[name]["cases"]:
        settings = {**TRACES[name]["settings"], **case.get("settings", {})}
        block = settings.get("block_size") or settings["block_length"]
        steps = settings.get("steps_per_block") or settings.get("steps")
        least = -(-block // steps) if steps else settings["num_to_transfer"]
        for step in case["steps"]:
            clear = all(confidence > settings["threshold"] for confidence in step["conf"])
            assert clear or len(step["pos"]) <= least
            assert all(c > settings["editing_threshold"] for c in step.get("edited", {}).get("conf", []))
