"""Random generators that depend on what they are for and on nothing else."""

import hashlib

import torch


def keyed_generator(*key: object) -> torch.Generator:
    """A CPU generator seeded by a digest of `key`: no rank, batch or global state comes in.

    torch's CPU generator reads only the low 32 bits of a seed, so the key is hashed, not shifted.
    """
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
