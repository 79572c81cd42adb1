"""A training row, and how its canvas and masks are drawn."""

import random
from dataclasses import dataclass
from functools import cached_property

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
    """One row: a prompt, the true canvas, what of it the denoiser does not see, what counts in the loss.

    In the loss of a step each supervised token counts `weight`, and the row adds `divisor` to what the sum
    is divided by; None: what its supervised tokens count.
    """

    prompt: Prompt
    target: tuple[int, ...]
    hidden: tuple[bool, ...]  # shown as the mask token
    pointers: tuple[Pointer, ...] = ()
    weight: float = 1.0
    divisor: float | None = None
    supervised: tuple[bool, ...] | None = None  # None: what is hidden

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The supervised canvas positions, ascending."""
        counted = self.hidden if self.supervised is None else self.supervised
        return tuple(place for place, counts in enumerate(counted) if counts)

    @property
    def pointed(self) -> list[Pointer]:
        """The pointers of supervised positions."""
        places = set(self.places)
        return [pointer for pointer in self.pointers if pointer.position in places]

    def canvas(self, mask_id: int) -> list[int]:
        """What the denoiser sees of the target."""
        return [mask_id if hide else token for token, hide in zip(self.target, self.hidden, strict=True)]


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
