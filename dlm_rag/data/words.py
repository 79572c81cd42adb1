"""Words and names of invented worlds, and the split that words and paths of relations belong to."""

import hashlib
import random
from collections.abc import Sequence

from dlm_rag.data.templates import CODAS, NAME_PATTERN_WORDS, NAME_PATTERNS, ONSETS, VOWELS


def get_word_split(word: str) -> str:
    """The split that an invented word belongs to: a fifth of all words are for tests."""
    return "test" if hashlib.sha256(word.encode()).digest()[0] % 5 == 0 else "train"


def is_held_out_path(relations: Sequence[str]) -> bool:
    """Whether training never asks along this path; an eighth of the paths of two hops and more."""
    digest = hashlib.sha256("/".join(relations).encode()).digest()
    return len(relations) > 1 and digest[0] % 8 == 0


def make_word(rng: random.Random, split: str) -> str:
    """A pronounceable word of two syllables that belongs to `split`."""
    while True:
        parts = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(2)]
        word = ("".join(parts) + rng.choice(CODAS)).capitalize()
        if get_word_split(word) == split:
            return word


def is_name_in_split(name: str, split: str) -> bool:
    """Whether every invented word of a name belongs to the split ("Mabesland" is a word of its own)."""
    return all(get_word_split(word) == split for word in name.split() if word not in NAME_PATTERN_WORDS)


def make_name(rng: random.Random, kind: str, pool: list[str]) -> str:
    """A name for an entity of this kind."""
    one, two = rng.sample(pool, 2)
    return rng.choice(NAME_PATTERNS[kind]).format(one, two)
