"""Ranges of consecutive tokens."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray


def concatenate_ranges(starts: NDArray[np.int64], lengths: Sequence[int]) -> NDArray[np.int64]:
    """(sum of lengths,) for each row the numbers from its start on, as many as its length."""
    before = np.cumsum(lengths) - lengths
    return np.arange(sum(lengths)) + np.repeat(starts - before, lengths)


def make_consecutive_ranges(lengths: Sequence[int]) -> list[range]:
    """The places of consecutive pieces of `lengths`, from 0 on."""
    return [range(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
