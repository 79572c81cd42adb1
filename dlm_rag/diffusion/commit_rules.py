"""Commit rules: which masked positions are written down at a step, as pure functions.

Every rule takes one value per candidate position (n,), n at least 1, in canvas order, and returns
the indices to commit, ascending and never empty. Ties go to the earlier position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.intp]


@dataclass(frozen=True)
class Proposals:
    """What the denoiser proposes at some canvas positions, in ascending order; arrays are (n,)."""

    positions: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    confidence: FloatArray  # probability of the proposed token
    log_prob: FloatArray  # nats; of the confidence, finite where that underflows
    entropy: FloatArray  # nats of the distribution at the position
    margin: FloatArray  # probability of the first minus that of the second token
    current_prob: FloatArray  # probability of the token that stands there now
    policy_draws: FloatArray | None = None  # (9, n) what `policy.drawn` says, where a policy decides by lot
    most_probable: "Proposals | None" = (
        None  # of the most probable tokens, where a step needs them beside those drawn
    )

    def subset(self, keep: NDArray[np.bool_] | IndexArray) -> "Proposals":
        """The proposals at a mask or at indices."""
        return Proposals(
            self.positions[keep], self.token_ids[keep], self.confidence[keep], self.log_prob[keep],
            self.entropy[keep], self.margin[keep], self.current_prob[keep],
            None if self.policy_draws is None else self.policy_draws[:, keep],
            None if self.most_probable is None else self.most_probable.subset(keep),
        )  # fmt: skip


def select_by_threshold(confidence: FloatArray, commit_threshold: float, least: int = 1) -> IndexArray:
    """All with confidence of at least `commit_threshold`; where they are fewer than `least`, so many of
    the most confident.

    Fast-dLLM (arXiv 2505.22618), SARDI, SDAR, LLaDA2. A threshold above 1 commits `least` a step.
    """
    clear = np.flatnonzero(confidence >= commit_threshold)
    return clear if len(clear) >= least else select_highest(confidence, least)


def select_highest(score: FloatArray, count: int) -> IndexArray:
    """The `count` highest scores: confidence for LLaDA, minus entropy or margin for Dream."""
    return np.sort(np.argsort(-score, kind="stable")[:count])


def select_by_entropy_bound(entropy: FloatArray, bound: float, least: int = 1) -> IndexArray:
    """The largest set of lowest entropies whose sum without its largest is at most `bound` nats; at least
    `least`.

    EB-Sampler (arXiv 2505.24857): this bounds the error of taking the positions as independent.
    """
    order = np.argsort(entropy, kind="stable")
    error_bound = np.concatenate(([0.0], np.cumsum(entropy[order])[:-1]))
    return np.sort(order[: max(least, int(np.searchsorted(error_bound, bound, side="right")))])


def select_grounded(
    confidence: FloatArray, held: Sequence[bool], commit_threshold: float, least: int = 1
) -> IndexArray:
    """`threshold` among the positions that are `held`: free words, and words the evidence holds.

    When too few of them clear, the most confident held ones; with none held, the most confident.
    """
    allowed = np.flatnonzero(np.asarray(held, dtype=bool))
    if not len(allowed):
        return select_highest(confidence, least)
    return allowed[select_by_threshold(confidence[allowed], commit_threshold, least)]


@lru_cache(maxsize=256)
def compute_step_sizes(length: int, steps: int, schedule: str) -> tuple[int, ...]:
    """How many positions each step commits of a block of `length` that is to be written in `steps`.

    `even`: the first steps take one more where it does not come out even (LLaDA, SDAR, LLaDA2). `rounded`:
    each takes its share of what is left, rounded, and steps whose share is none are left out (Tiny-A2D).
    Raises `ValueError` for another schedule.
    """
    if schedule == "even":
        return tuple(length // steps + (n < length % steps) for n in range(min(length, steps)))
    if schedule != "rounded":
        raise ValueError(f"'{schedule}' is not a schedule")
    sizes, left, one = [], length, np.float32(1)
    for n in range(steps, 0, -1):
        # A half goes up or down by the rounding of these shares in float32, as it does there.
        now, then = one - np.float32(n / steps), one - np.float32((n - 1) / steps)
        sizes.append(round(left * (1 - float((one - then) / (one - now)))))
        left -= sizes[-1]
    return tuple(size for size in sizes if size)


def select_commits(
    rule: str,
    proposals: Proposals,
    *,
    commit_threshold: float,
    tokens_per_step: int | None,
    bound: float,
    held: Sequence[bool] = (),
    least: int = 1,
) -> IndexArray:
    """The indices into `proposals` that the rule called `rule` commits (`DecodeConfig.commit_rule`).

    `top_k`, `entropy`, `margin` and `sequential` commit `tokens_per_step` positions (None: `least`). The
    other rules commit at least `least`, and at most `tokens_per_step`, the most confident of their choice
    (None: all of it).
    """
    count = tokens_per_step or least
    if rule == "sequential":
        return np.arange(min(count, len(proposals.positions)))
    if rule == "top_k":
        return select_highest(proposals.confidence, count)
    if rule == "entropy":
        return select_highest(-proposals.entropy, count)
    if rule == "margin":
        return select_highest(proposals.margin, count)
    if rule == "threshold":
        chosen = select_by_threshold(proposals.confidence, commit_threshold, least)
    elif rule == "entropy_bound":
        chosen = select_by_entropy_bound(proposals.entropy, bound, least)
    elif rule == "grounded":
        chosen = select_grounded(proposals.confidence, held, commit_threshold, least)
    else:
        raise ValueError(f"'{rule}' is not a commit rule")
    if tokens_per_step is None or len(chosen) <= tokens_per_step:
        return chosen
    return chosen[select_highest(proposals.confidence[chosen], tokens_per_step)]
