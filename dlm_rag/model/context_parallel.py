"""Very long rows on several processes: each runs a part of every row and sees the keys of all.

Attention that is not causal needs no ring and no balancing: queries stay, keys and values are gathered
layer by layer, and their gradients are summed on the way back. Exact, up to the order of additions.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.model.kv_store import concatenate_ranges


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
    """The packed rows of one call, `lengths` tokens each; every process has a part of each."""

    context_parallel: ContextParallel
    lengths: tuple[int, ...]

    @cached_property
    def local_lengths(self) -> list[int]:
        """Tokens of each row that this process has."""
        return [len(self.context_parallel.local_token_range(length)) for length in self.lengths]

    @cached_property
    def gather_order(self) -> NDArray[np.int64]:
        """Where the tokens of all rows are in what is gathered, row by row."""
        share, ranks = self.context_parallel, range(self.context_parallel.size)
        # (ranks, rows): tokens of each row at each rank, and where they begin in what is gathered
        counts = np.array([[len(share.local_token_range(n, rank)) for n in self.lengths] for rank in ranks])
        starts = counts.cumsum(1) - counts + self._padded * np.array(ranks)[:, None]
        return concatenate_ranges(starts.T.flatten(), counts.T.flatten().tolist())

    @property
    def _padded(self) -> int:
        """Tokens that every process sends: as many as the first one has."""
        return sum(-(-length // self.context_parallel.size) for length in self.lengths)

    def gather(self, own: Tensor, order: Tensor) -> Tensor:
        """own (tokens here, ...) -> (tokens of all rows, ...), in order; gradients flow back to all.

        order: `gather_order` on the device.
        """
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        padding = own.new_zeros((self._padded - len(own), *own.shape[1:]))
        sent = torch.cat((own, padding))
        if self.context_parallel.group is None:
            gathered = sent.repeat(self.context_parallel.size, *[1] * (sent.dim() - 1))
        else:
            gathered = all_gather_tensor_autograd(sent, 0, self.context_parallel.group)
        return gathered[order]
