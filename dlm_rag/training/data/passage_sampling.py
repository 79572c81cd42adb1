"""The evidence of a training row: what is kept of what was found, and what the response copies from it."""

import random
from collections.abc import Collection, Sequence

from dlm_rag.retrieval.corpus import Passage
from dlm_rag.training.data.example import Pointer

MIN_COPY_TOKENS = 3  # tokens in a row that a response and a passage share


def sample_passages(
    rng: random.Random, found: Sequence[Passage], needed: Collection[str], count: int
) -> list[Passage]:
    """`count` of the passages that were found (all where they are fewer), in any order.

    needed: ids of those that are kept where they were found; the others are sampled.
    """
    kept = [passage for passage in found if passage.id in needed][-count:]
    others = [passage for passage in found if passage not in kept]
    rng.shuffle(others)
    evidence = kept + others[: count - len(kept)]
    rng.shuffle(evidence)
    return evidence


def find_copy_pointers(ids: Sequence[int], facts: Sequence[Sequence[int]]) -> tuple[Pointer, ...]:
    """Where a passage spells out the tokens `ids` of a response, run by run, each as long as can be.

    Of equally long runs the one in the first passage counts, there the first. Runs of fewer than
    `MIN_COPY_TOKENS` tokens may be chance and have no pointers.
    """
    places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for row, fact in enumerate(facts):
        for at in range(len(fact) - MIN_COPY_TOKENS + 1):
            places.setdefault(tuple(fact[at : at + MIN_COPY_TOKENS]), []).append((row, at))
    found: list[Pointer] = []
    position = 0
    while position < len(ids):
        starts = places.get(tuple(ids[position : position + MIN_COPY_TOKENS]), ())
        runs = [(_count_common_tokens(ids, position, facts[row], at), row, at) for row, at in starts]
        length, row, at = max(runs, key=lambda run: run[0], default=(1, 0, 0))
        if runs:
            found += [Pointer(position + n, row, at + n) for n in range(length)]
        position += length
    return tuple(found)


def _count_common_tokens(ids: Sequence[int], position: int, fact: Sequence[int], at: int) -> int:
    """How many tokens agree from there on."""
    pairs = enumerate(zip(ids[position:], fact[at:], strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(ids) - position, len(fact) - at))
