"""A step from uniform noise: how hot it is, what noise comes back, when a canvas has settled.

Of a canvas of random tokens a step proposes all positions. It accepts those that
`select_by_entropy_bound` chooses and draws the others anew, also where the step before had accepted.
DiffusionGemma's sampler, in pure functions.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int64]


def anneal_temperature(taken: int, steps: int, high: float, low: float) -> float:
    """Of the step after `taken` steps of at most `steps`: `high` at first, then linear towards `low`.

    In float32, as `transformers` reckons it: a model that feeds on its own logits makes much of a last bit.
    """
    share = np.float32(steps - taken) / np.float32(steps)
    return float(np.float32(low) + np.float32(high - low) * share)


def uniform_tokens(numbers: NDArray[np.float64], vocabulary: int) -> TokenIds:
    """Token ids (n,), each as likely as any, from numbers (n,) in [0, 1)."""
    return np.minimum((numbers * vocabulary).astype(np.int64), vocabulary - 1)


def has_converged(before: Sequence[TokenIds], best: TokenIds, convergence_steps: int) -> bool:
    """Whether the most probable tokens are those of each of the last `convergence_steps` steps.

    before: those of the steps before, oldest first.
    """
    last = before[len(before) - convergence_steps :] if convergence_steps <= len(before) else None
    return last is not None and all(np.array_equal(ids, best) for ids in last)
