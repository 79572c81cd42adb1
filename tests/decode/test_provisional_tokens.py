"""Guesses that are not committed: recorded where somebody looks, small, and never in the way."""

import json
from dataclasses import replace

import pytest

from dlm_rag.decode.provisional_log import (
    ProvisionalDelta,
    ProvisionalRecorder,
    ProvisionalToken,
    are_deltas_valid,
    replay_provisional,
)
from dlm_rag.decode.trace_file import read_trace
from dlm_rag.retrieval.base import build_query
from tests.support import block_attention
from tests.support.rollouts import canvases_of
from tests.support.traces import TRACE_QUESTIONS, make_decoder, make_trace_header, write_rollouts

# Position: token, confidence. 0 is committed before the second step, masked again before the third.
SEEN = [
    {0: (7, 0.999), 1: (8, 0.5), 3: (7, 0.051)},
    {1: (8, 0.7), 3: (9, 0.0)},
    {},
    {0: (7, 1.0), 3: (7, 0.25)},
]


def test_a_step_holds_what_is_new_in_it():
    recorder = ProvisionalRecorder(lambda token: f"t{token}")
    given = [([*found], [t for t, _ in found.values()], [c for _, c in found.values()]) for found in SEEN]
    steps = [recorder.record_step(*each) for each in given]
    assert steps == [
        ProvisionalDelta("9950  05", (0, 7, 1, 8, 3, 7), ((7, "t7"), (8, "t8"))),
        ProvisionalDelta("  70  00", (3, 9), ((9, "t9"),)),
        ProvisionalDelta(),
        ProvisionalDelta("99    25", (3, 7)),
    ]
    assert [*replay_provisional([None, *steps])][1:] == [
        {
            0: ProvisionalToken(0, 7, "t7", 0.99),
            1: ProvisionalToken(1, 8, "t8", 0.5),
            3: ProvisionalToken(3, 7, "t7", 0.05),
        },
        {1: ProvisionalToken(1, 8, "t8", 0.7), 3: ProvisionalToken(3, 9, "t9", 0.0)},
        {},
        {0: ProvisionalToken(0, 7, "t7", 0.99), 3: ProvisionalToken(3, 7, "t7", 0.25)},
    ]
    assert are_deltas_valid([None, *steps], 4)


def bare(rollout):
    """Without guesses, and without what the clock says."""
    steps = [replace(step, guesses=None, seconds={}) for step in rollout.steps]
    return replace(rollout, steps=steps)


WAYS = {
    "plain": {},
    "pipeline": {"overlap": "pipeline", "batch_size": 2},
    "sampled": {"temperature": 1.0},
    "to the end": {"early_stopping": False, "block_length": 4},
}
BLOCKS = {
    "blocks": ({}, {"query_window": 0}),
    "blocks, looking ahead": ({}, {"query_window": 6}),
    "blocks, led": ({"block_grid": "prompt", "shifted": True}, {"query_window": 100}),
    "edits": ({}, {"edit_threshold": 0.2}),
}


@pytest.mark.parametrize("way", [*WAYS, *BLOCKS])
def test_guesses_are_those_that_the_queries_are_made_of(corpus, corpus_file, way):
    """With what is committed they make every query again; all else is what it is without them."""
    if way in WAYS:
        decoder = make_decoder(corpus, "joint", **WAYS[way])
    else:
        shape, settings = BLOCKS[way]
        decoder = block_attention.make_decoder(corpus_file, "joint", shape=shape, **settings)
    without = decoder.decode(TRACE_QUESTIONS)
    assert not any(step.guesses for rollout in without for step in rollout.steps)
    decoder.record_provisional = True
    rollouts = decoder.decode(TRACE_QUESTIONS)
    assert [*map(bare, rollouts)] == [*map(bare, without)]
    tokenizer, seen = decoder.tokenizer, 0
    for rollout in rollouts:
        canvases, guessed = canvases_of(rollout, tokenizer.mask_id), rollout.provisional_tokens()
        for step, canvas, guesses in zip(rollout.steps, canvases, guessed, strict=True):
            assert (step.guesses is None) == (step.step == 0)
            for position, guess in guesses.items():
                assert canvas[position] == tokenizer.mask_id, "what is committed is no guess"
                assert guess.token == tokenizer.token_text(guess.token_id).strip("\ufffd")
                canvas[position] = guess.token_id
            if step.query is not None and step.step:
                query = build_query("proxy", rollout.question, tokenizer.query_text(canvas))
                assert step.query == query.text
            seen += len(guesses)
        assert are_deltas_valid((step.guesses for step in rollout.steps), rollout.canvas_length)
    assert seen


def test_a_trace_with_guesses_is_one_without_for_who_does_not_know_them(corpus, tmp_path):
    """Of the same version, with one more key in a step: readers pass over those that they do not know."""
    decoder = make_decoder(corpus, "joint")
    decoder.record_provisional = True
    rollouts = decoder.decode(TRACE_QUESTIONS)
    path = write_rollouts(tmp_path / "with.jsonl", make_trace_header(decoder), rollouts)
    plain = [replace(r, steps=[replace(s, guesses=None) for s in r.steps]) for r in rollouts]
    other = write_rollouts(tmp_path / "without.jsonl", make_trace_header(decoder), plain)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    held = [step.pop("guesses") for line in lines for step in line.get("steps", ()) if "guesses" in step]
    assert held and lines == [json.loads(line) for line in other.read_text().splitlines()]
    assert [*read_trace(path)] == [replace(rollout, evidence_texts={}) for rollout in rollouts]


@pytest.mark.parametrize(
    "wrong",
    [
        ProvisionalDelta("9"),
        ProvisionalDelta("\u0661\u0662", (0, 7), ((7, "a"),)),
        ProvisionalDelta("505050", (0, 7, 1, 7, 2, 7), ((7, "a"),)),
        ProvisionalDelta("50", (0, 7)),
        ProvisionalDelta("", (2, 7)),
    ],
    ids=str,
)
def test_what_no_decode_has_written_is_not_sound(wrong):
    """On a canvas of two."""
    right = ProvisionalDelta("5099", (0, 7, 1, 7), ((7, "a"),))
    assert are_deltas_valid([None, right], 2) and not are_deltas_valid([wrong], 2)
