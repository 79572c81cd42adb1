"""Very long rows on several processes: each runs a stretch of every row and sees the keys of all.

Attention without direction needs no ring and no balancing: queries stay, keys and values are gathered
layer by layer, and their gradients are summed on the way back. Exact, up to the order of additions.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class SequenceShare:
    """Which process of those that share rows; `group` is theirs, None where nothing is sent (a plan)."""

    rank: int
    count: int
    group: Any

    def stretch(self, length: int, rank: int | None = None) -> range:
        """The tokens of a row of that length which are this process's, or another's."""
        size = -(-length // self.count)
        at = (self.rank if rank is None else rank) * size
        return range(min(at, length), min(at + size, length))


@dataclass(frozen=True)
class Stretches:
    """The packed rows of one call, `lengths` tokens each, of which every process has a part."""

    share: SequenceShare
    lengths: tuple[int, ...]

    @cached_property
    def own(self) -> list[int]:
        """Tokens of each row that this process has."""
        return [len(self.share.stretch(length)) for length in self.lengths]

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Where the tokens of all rows stand in what is gathered, row by row."""
        share = self.share
        starts = []
        for rank in range(share.count):
            at, found = rank * self._padded, []
            for length in self.lengths:
                found.append(at)
                at += len(share.stretch(length, rank))
            starts.append(found)
        return np.array(
            [
                starts[rank][row] + n
                for row, length in enumerate(self.lengths)
                for rank in range(share.count)
                for n in range(len(share.stretch(length, rank)))
            ],
            dtype=np.int64,
        )

    @property
    def _padded(self) -> int:
        """Tokens that every process sends: as many as the first has, which are the most."""
        return sum(-(-length // self.share.count) for length in self.lengths)

    def gather(self, own: Tensor, order: Tensor) -> Tensor:
        """own (tokens here, ...) -> (tokens of all rows, ...), in order; gradients flow back to all.

        order: `self.order` on the device.
        """
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        padding = own.new_zeros((self._padded - len(own), *own.shape[1:]))
        sent = torch.cat((own, padding))
        if self.share.group is None:
            gathered = sent.repeat(self.share.count, *[1] * (sent.dim() - 1))
        else:
            gathered = all_gather_tensor_autograd(sent, 0, self.share.group)
        return gathered[order]
