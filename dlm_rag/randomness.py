"""Random generators that depend on what they are for and on nothing else."""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor


def keyed_generator(*key: object) -> torch.Generator:
    """A CPU generator seeded by a digest of `key`: no rank, batch or global state comes in.

    torch's CPU generator reads only the low 32 bits of a seed, so the key is hashed, not shifted.
    """
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


@lru_cache(maxsize=16)
def permutation(key: tuple[object, ...], count: int) -> Tensor:
    """The numbers (count,) from 0 in an order that depends on `key`."""
    return torch.randperm(count, generator=keyed_generator(*key))
