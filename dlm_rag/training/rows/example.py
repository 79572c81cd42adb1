"""A training row, and how its canvas and masks are drawn."""

import random
from dataclasses import dataclass

from dlm_rag.tokenizer import Prompt

FULL_CANVAS = 0.2  # share of rows with the whole canvas; others end soon after their response
UNIFORM_MASKS = 0.5  # share of rows masked at a uniform time; in others all after a cut is masked


@dataclass(frozen=True)
class Pointer:
    """A token of the response that can be copied: its canvas position and where it stands."""

    position: int
    fact: int  # index of the passage in the prompt
    token: int  # index of the token in that fact


@dataclass(frozen=True)
class Example:
    """One row: a prompt, the true canvas, which of it is masked, and where its names stand.

    In the loss of a step each masked token counts `weight`, and the row adds `divisor` to what the sum is
    divided by; None: what its masked tokens count.
    """

    prompt: Prompt
    target: tuple[int, ...]
    masked: tuple[bool, ...]
    pointers: tuple[Pointer, ...] = ()
    weight: float = 1.0
    divisor: float | None = None


def random_mask(rng: random.Random, used: int, length: int, stands: int) -> tuple[bool, ...]:
    """Which positions of a canvas are masked: each with the same probability, or all after a cut.

    used: tokens of the response. stands: how many of them stood when the evidence was found.
    """
    if rng.random() < UNIFORM_MASKS:
        time = rng.random()
        masked = [rng.random() < time for _ in range(length)]
    else:
        cut = rng.choice((0, rng.randrange(used)))
        if stands and rng.random() < 0.6:
            cut = stands
        masked = [position >= cut or rng.random() < 0.05 for position in range(length)]
    if not any(masked):
        masked[rng.randrange(length)] = True
    return tuple(masked)


def canvas_of(rng: random.Random, ids: list[int], longest: int, end_id: int | None) -> list[int]:
    """A response with end tokens behind it: a few, or now and then up to the whole canvas."""
    assert end_id is not None, "a tokenizer without an end token"
    length = longest if rng.random() < FULL_CANVAS else min(longest, len(ids) + rng.randint(1, 10))
    return (ids + [end_id] * length)[:length]
