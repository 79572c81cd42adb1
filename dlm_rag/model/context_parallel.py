"""Rows of which each process has a part: in every layer the keys and values of all parts are gathered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.model.ranges import concatenate_ranges


@dataclass(frozen=True)
class ContextParallel:
    """Which process of those that each have a part of every row; `group` is theirs, None in a plan.

    Attention that is not causal needs no ring and no balancing: queries stay, keys and values are gathered
    layer by layer, and their gradients are summed on the way back. Exact, up to the order of additions.
    """

    rank: int
    size: int
    group: Any

    def local_token_range(self, length: int, rank: int | None = None) -> range:
        """The tokens of a row of that length which are this process's, or another's."""
        size = -(-length // self.size)
        at = (self.rank if rank is None else rank) * size
        return range(min(at, length), min(at + size, length))

    def gather_order(self, lengths: Sequence[int]) -> NDArray[np.int64]:
        """Where the tokens of whole rows of `lengths` are in what is gathered, row by row."""
        ranks = range(self.size)
        # (ranks, rows): tokens of each row at each rank, and where they begin in what is gathered
        counts = np.array([[len(self.local_token_range(n, rank)) for n in lengths] for rank in ranks])
        starts = counts.cumsum(1) - counts + counts[0].sum() * np.array(ranks)[:, None]
        return concatenate_ranges(starts.T.flatten(), counts.T.flatten().tolist())

    def gather(self, own: Tensor, lengths: Sequence[int], order: Tensor) -> Tensor:
        """own (tokens here, ...) -> (tokens of whole rows of `lengths`, ...); gradients flow back to all.

        order: `gather_order` on the device.
        """
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        sent = sum(-(-length // self.size) for length in lengths)  # by everybody: as the first one has
        own = torch.cat((own, own.new_zeros((sent - len(own), *own.shape[1:]))))
        if self.group is None:
            return own.repeat(self.size, *[1] * (own.dim() - 1))[order]
        return all_gather_tensor_autograd(own, 0, self.group)[order]


@dataclass(frozen=True)
class GatheredRows:
    """What the rows of a call see where this process has a part of each; lengths: of the whole rows."""

    share: ContextParallel
    lengths: Sequence[int]

    @property
    def context_lengths(self) -> list[int]:
        """Tokens that each row sees besides its own."""
        return [length - len(self.share.local_token_range(length)) for length in self.lengths]

    def build_arrays(self, lengths: Sequence[int], keys: Sequence[int]) -> dict[str, NDArray[Any]]:
        """order: as `ContextParallel.gather_order`."""
        return {"order": self.share.gather_order(self.lengths)}

    def extend(self, layer: int, k: Tensor, v: Tensor, at: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole rows, their own k and v (T, Hk, D) in their places."""
        k, v = self.share.gather(torch.stack((k, v), 1), self.lengths, at["order"]).unbind(1)
        return k, v
