"""Guesses that are not committed: recorded where somebody looks, small, and never in the way."""

import json
from dataclasses import replace

import numpy as np
import pytest
import test_blocks
from conftest import in_tokens
from test_trace import ASKED, header_for, make_decoder, write

from dlm_rag.decode.guesses import Guess, Guesses, Recorder, are_sound, replay
from dlm_rag.decode.trace import read_trace
from dlm_rag.diffusion.commit import Proposals
from dlm_rag.retrieval.query import build_query


def proposals(found):
    """Of token ids and confidences by position."""
    tokens, sure = ([pair[n] for pair in found.values()] for n in (0, 1))
    unknown = [np.zeros(len(found))] * 4
    return Proposals(np.array([*found], dtype=np.int64), np.array(tokens), np.array(sure), *unknown)


# Position: token, confidence. 0 is committed before the second step, masked again before the third.
SEEN = [
    {0: (7, 0.999), 1: (8, 0.5), 3: (7, 0.051)},
    {1: (8, 0.7), 3: (9, 0.0)},
    {},
    {0: (7, 1.0), 3: (7, 0.25)},
]


def test_a_step_holds_what_is_new_in_it():
    recorder = Recorder(lambda token: f"t{token}")
    steps = [recorder.take(proposals(found)) for found in SEEN]
    assert steps == [
        Guesses("9950  05", (0, 7, 1, 8, 3, 7), ((7, "t7"), (8, "t8"))),
        Guesses("  70  00", (3, 9), ((9, "t9"),)),
        Guesses(),
        Guesses("99    25", (3, 7)),
    ]
    assert [*replay([None, *steps])][1:] == [
        {0: Guess(0, 7, "t7", 0.99), 1: Guess(1, 8, "t8", 0.5), 3: Guess(3, 7, "t7", 0.05)},
        {1: Guess(1, 8, "t8", 0.7), 3: Guess(3, 9, "t9", 0.0)},
        {},
        {0: Guess(0, 7, "t7", 0.99), 3: Guess(3, 7, "t7", 0.25)},
    ]
    assert are_sound([None, *steps], 4)


def bare(rollout):
    """Without guesses, and without what the clock says."""
    steps = [replace(step, guesses=None, seconds={}) for step in rollout.steps]
    return replace(rollout, steps=steps)


WAYS = {
    "plain": {},
    "revision": {"revision_threshold": 0.6},
    "stale": {"overlap": "stale"},
    "pipeline": {"overlap": "pipeline", "batch_size": 2},
    "sampled": {"temperature": 1.0},
    "to the end": {"stop_early": False, "block_length": 4},
}
BLOCKS = {
    "blocks": ({}, {"lookahead": 0}),
    "blocks, looking ahead": ({}, {"lookahead": 6}),
    "blocks, led": ({"block_grid": "prompt", "shifted": True}, {"lookahead": 100}),
    "edits": ({}, {"edit_threshold": 0.2}),
}


@pytest.mark.parametrize("way", [*WAYS, *BLOCKS])
def test_guesses_are_those_that_the_queries_are_made_of(corpus, corpus_file, way):
    """With what is committed they make every query again; all else is what it is without them."""
    if way in WAYS:
        decoder = make_decoder(corpus, "joint", **WAYS[way])
    else:
        shape, settings = BLOCKS[way]
        decoder = test_blocks.make_decoder(corpus_file, "joint", shape=shape, **settings)
    without = decoder.decode(ASKED)
    assert not any(step.guesses for rollout in without for step in rollout.steps)
    decoder.guesses = True
    rollouts = decoder.decode(ASKED)
    assert [*map(bare, rollouts)] == [*map(bare, without)]
    tokenizer, seen = decoder.tokenizer, 0
    for rollout in rollouts:
        canvases = rollout.canvases(tokenizer.mask_id)
        for step, canvas, guesses in zip(rollout.steps, canvases, rollout.guesses(), strict=True):
            assert (step.guesses is None) == (step.step == 0)
            for position, guess in guesses.items():
                assert canvas[position] == tokenizer.mask_id, "what is committed is no guess"
                assert guess.token == tokenizer.token_text(guess.token_id)
                canvas[position] = guess.token_id
            if step.query is not None and step.step:
                query = build_query("proxy", rollout.question, tokenizer.query_text(canvas))
                assert step.query == query.text
            seen += len(guesses)
        assert are_sound((step.guesses for step in rollout.steps), rollout.canvas_length)
    assert seen


def test_a_row_records_guesses_beside_one_that_does_not(corpus):
    decoder = make_decoder(corpus, "joint", batch_size=2)
    with decoder.new_engine() as engine:
        tickets = [engine.submit(ASKED[0], guesses=wanted) for wanted in (True, False)]
        found = {}
        while engine.busy:
            found |= {event.ticket: event.rollout for event in engine.step()}
    one, other = (found[ticket] for ticket in tickets)
    assert any(step.guesses for step in one.steps) and not any(step.guesses for step in other.steps)
    assert in_tokens(one) == in_tokens(other)
    sure = [[c.confidence for step in r.steps for c in step.committed] for r in (one, other)]
    assert sure[0] == pytest.approx(sure[1], abs=1e-5)


def test_a_trace_with_guesses_is_one_without_for_who_does_not_know_them(corpus, tmp_path):
    """Of the same version, with one more key in a step: readers pass over those that they do not know."""
    decoder = make_decoder(corpus, "joint")
    decoder.guesses = True
    rollouts = decoder.decode(ASKED)
    path = write(tmp_path / "with.jsonl", header_for(decoder), rollouts)
    plain = [replace(r, steps=[replace(s, guesses=None) for s in r.steps]) for r in rollouts]
    other = write(tmp_path / "without.jsonl", header_for(decoder), plain)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    held = [step.pop("guesses") for line in lines for step in line.get("steps", ()) if "guesses" in step]
    assert held and lines == [json.loads(line) for line in other.read_text().splitlines()]
    assert [*read_trace(path)] == [replace(rollout, evidence_texts={}) for rollout in rollouts]


@pytest.mark.parametrize(
    "wrong",
    [
        Guesses("9"),
        Guesses("5 ", (0, 7), ((7, "a"),)),
        Guesses("\u0661\u0662", (0, 7), ((7, "a"),)),
        Guesses("505050", (0, 7, 1, 7, 2, 7), ((7, "a"),)),
        Guesses("50"),
        Guesses("50", (0, 7)),
        Guesses("", (0,)),
        Guesses("", (2, 7)),
        Guesses("", (-1, 7)),
    ],
    ids=str,
)
def test_what_no_decode_has_written_is_not_sound(wrong):
    """On a canvas of two."""
    assert are_sound([None, Guesses("5099", (0, 7, 1, 7), ((7, "a"),))], 2) and not are_sound([wrong], 2)
