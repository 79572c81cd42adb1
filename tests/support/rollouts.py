"""Rollouts made by hand, and how two are compared."""

import math
from dataclasses import replace

from rich.console import Console

from dlm_rag.decode.rollout import CommittedToken, Rollout, RolloutStep


def strip_times_and_confidences(rollout):
    """A rollout without times and last bits: those depend on who shares the batch."""

    def plain(tokens):
        return tuple(replace(token, confidence=0.0, log_prob=None) for token in tokens)

    steps = [
        replace(s, seconds={}, guesses=None, committed=plain(s.committed), edited=plain(s.edited))
        for s in rollout.steps
    ]
    return replace(rollout, steps=steps, citations=[], evidence_texts={}, confidence=None)


def make_committed_token(position, token_id, text, confidence):
    return CommittedToken(position, token_id, text, confidence, round(math.log(confidence), 3))


def make_two_step_rollout():
    """Two forwards; position 1 is committed, masked again, and committed to another token."""
    first = make_committed_token(0, 5, "x", 0.9), make_committed_token(1, 6, "y", 0.8)
    other = make_committed_token(1, 7, "z", 0.7)
    steps = [
        RolloutStep(0, "Who?", ("a", "b"), True, seconds={"retrieve": 0.5}),
        RolloutStep(1, "Who? x", ("b", "c"), True, first),
        RolloutStep(2, "Who? x", ("b", "c"), False, (other,), remasked=(1,)),
    ]
    return Rollout("q1", "Who?", "joint", 3, steps, "x ### z", finished=True)


def render_to_text(thing, width=100):
    console = Console(width=width, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa
    console.print(thing)
    return console.export_text()


def canvases_of(rollout, mask_id):
    """The token ids of the canvas after each step, from step 0 (all masked) to the last."""
    for state in rollout.replay():
        yield [state[n].token_id if n in state else mask_id for n in range(rollout.canvas_length)]
