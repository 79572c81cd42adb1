"""Random generators that depend on what they are for and on nothing else."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")


def make_keyed_generator(*key: object) -> torch.Generator:
    """A CPU generator seeded by a digest of `key`: no rank, batch or global state comes in.

    torch's CPU generator reads only the low 32 bits of a seed, so the key is hashed, not shifted.
    """
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


def sample_uniform(generator: torch.Generator, count: int, length: int) -> NDArray[np.float64]:
    """Numbers (count, length) in [0, 1)."""
    return torch.rand(count, length, generator=generator, dtype=torch.float64).numpy()


def pick_shuffled(items: Sequence[T], number: int, *key: object) -> T:
    """The item of that number in an endless series: all items, each time in another order, by `key`."""
    epoch, place = divmod(number, len(items))
    return items[int(_sample_permutation((*key, epoch), len(items))[place])]


@lru_cache(maxsize=16)
def _sample_permutation(key: tuple[object, ...], count: int) -> Tensor:
    return torch.randperm(count, generator=make_keyed_generator(*key))
