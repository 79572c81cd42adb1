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
class ContextParallel:
    """Which process of those that share rows; `group` is theirs, None where nothing is sent (a plan)."""

    rank: int
    size: int
    group: Any

    def local_token_range(self, length: int, rank: int | None = None) -> range:
        """The tokens of a row of that length which are this process's, or another's."""
        size = -(-length // self.size)
        at = (self.rank if rank is None else rank) * size
        return range(min(at, length), min(at + size, length))


@dataclass(frozen=True)
class ShardedRows:
    """The packed rows of one call, `lengths` tokens each, of which every process has a part."""

    context_parallel: ContextParallel
    lengths: tuple[int, ...]

    @cached_property
    def local_lengths(self) -> list[int]:
        """Tokens of each row that this process has."""
        return [len(self.context_parallel.local_token_range(length)) for length in self.lengths]

    @cached_property
    def gather_order(self) -> NDArray[np.int64]:
        """Where the tokens of all rows stand in what is gathered, row by row."""
        share = self.context_parallel
        starts = []
        for rank in range(share.size):
            at, found = rank * self._padded, []
            for length in self.lengths:
                found.append(at)
                at += len(share.local_token_range(length, rank))
            starts.append(found)
        return np.array(
            [
                starts[rank][row] + n
                for row, length in enumerate(self.lengths)
                for rank in range(share.size)
                for n in range(len(share.local_token_range(length, rank)))
            ],
            dtype=np.int64,
        )

    @property
    def _padded(self) -> int:
        """Tokens that every process sends: as many as the first has, which are the most."""
        return sum(-(-length // self.context_parallel.size) for length in self.lengths)

    def gather(self, own: Tensor, order: Tensor) -> Tensor:
        """own (tokens here, ...) -> (tokens of all rows, ...), in order; gradients flow back to all.

        order: `self.order` on the device.
        """
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        padding = own.new_zeros((self._padded - len(own), *own.shape[1:]))
        sent = torch.cat((own, padding))
        if self.context_parallel.group is None:
            gathered = sent.repeat(self.context_parallel.size, *[1] * (sent.dim() - 1))
        else:
            gathered = all_gather_tensor_autograd(sent, 0, self.context_parallel.group)
        return gathered[order]
