"""Commit rules: which masked positions are written down at a step, as pure functions.

Every rule takes one value per candidate position (n,), n at least 1, in canvas order, and returns
the indices to commit, ascending and never empty. Ties go to the earlier position. `RULES` names them:
a function of one's own, `decode.commit_rule=module:function`, takes what those of the table take.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm_rag.config import DecodeConfig
from dlm_rag.config.fields import resolve_or_import
from dlm_rag.errors import ConfigError

FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.intp]
ENTROPY_BOUND = 0.1  # nats, that a step of the rule entropy_bound commits together


def _field(name: str) -> Any:
    return property(lambda proposals: proposals.records[name])


@dataclass(slots=True, eq=False)
class Proposals:
    """What the denoiser proposes at n canvas positions, in ascending order. Arrays are (n,).

    records: (n,) with a field for each attribute, and for what is said of actions (`draw_actions`).
    """

    records: NDArray[Any]
    positions, token_ids = _field("positions"), _field("token_ids")
    confidence = _field("confidence")  # probability of the proposed token
    log_prob = _field("log_prob")  # nats; of the confidence, finite where that underflows
    entropy = _field("entropy")  # nats of the distribution at the position
    margin = _field("margin")  # probability of the first minus that of the second token

    @classmethod
    def from_arrays(cls, **fields: NDArray[Any]) -> "Proposals":
        """Proposals with these fields, all attributes among them."""
        kinds = [(name, np.float64 if x.dtype.kind == "f" else np.int64) for name, x in fields.items()]
        return cls(np.empty(len(fields["positions"]), kinds)).replace(**fields)

    def subset(self, keep: NDArray[np.bool_] | IndexArray) -> "Proposals":
        """The proposals selected by a mask or by indices."""
        return Proposals(self.records.compress(keep) if keep.dtype == bool else self.records.take(keep))

    def replace(self, **fields: NDArray[Any]) -> "Proposals":
        """The proposals with others of these fields."""
        found = self.records.copy()
        for name, values in fields.items():
            found[name] = values
        return Proposals(found)


@dataclass(frozen=True)
class RuleContext:
    """What a rule may look at besides the candidates.

    - least: number of positions that the schedule wants committed at this step; 0 in a block that may wait.
    - draws: (5, length) uniform numbers of the step by position, rows 2 and 3 for rules, if one samples.
    """

    settings: DecodeConfig
    least: int = 1
    draws: FloatArray | None = None

    @property
    def count(self) -> int:
        """Number of positions that a rule with a fixed number commits."""
        return self.settings.tokens_per_step or self.least


@dataclass(frozen=True)
class SampledCommits:
    """What a stochastic rule has drawn.

    - opened: (n,) which of the first n candidates are committed, at least one; the others were none.
    - log_prob: log-probability of this draw in nats.
    - forced: whether no candidate was drawn, and one had to be chosen.
    - tokens: the committed proposals, if they differ from the candidates' own.
    """

    opened: NDArray[np.bool_]
    log_prob: float
    forced: bool = False
    tokens: Proposals | None = None


@dataclass(frozen=True)
class Rule:
    """A commit rule.

    - choose: maps candidates to the indices to commit (ascending; none only where `least` is 0), or to
      `SampledCommits`.
    - statistics: what it needs that is computed on demand: "spread" (entropy and margin), "actions"
      (`draw_actions`).
    - settings: the settings of `decode` that affect it.
    - samples: whether it samples.
    - in_order: whether it commits from left to right, without gaps.
    - redraws: whether a later step may take back what it has committed in the current block.
    """

    choose: Callable[[Proposals, RuleContext], IndexArray | SampledCommits]
    statistics: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    samples: bool = False
    in_order: bool = False
    redraws: bool = False


def select_left_to_right(
    token_ids: NDArray[np.int64], confidence: FloatArray, threshold: float, least: int = 1
) -> IndexArray:
    """Returns the first candidates, up to the first one below the threshold; at least `least` of them.

    token_ids, confidence: (n,) by position. Where the end of a response is easy to guess and its middle is
    not, no end token is committed before what precedes it. A token that repeats the one right before it
    waits for the next step: guessed together, the second is often the first again ("Ewaldwald").
    """
    repeated = np.concatenate(([False], token_ids[1:] == token_ids[:-1]))
    unsure = ((confidence < threshold) | repeated).nonzero()[0]
    count = int(unsure[0]) if len(unsure) else len(confidence)
    return np.arange(min(len(confidence), max(count, least)))


def select_by_threshold(confidence: FloatArray, commit_threshold: float, least: int = 1) -> IndexArray:
    """All with confidence of at least `commit_threshold`; where they are fewer than `least`, so many of
    the most confident.

    Fast-dLLM (arXiv 2505.22618), SARDI, SDAR, LLaDA2. A threshold above 1 commits `least` a step.
    """
    clear = (confidence >= commit_threshold).nonzero()[0]
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


@lru_cache(maxsize=256)
def compute_step_sizes(length: int, steps: int, schedule: str) -> tuple[int, ...]:
    """How many positions each step commits of a block of `length` that is to be written in `steps`.

    `even`: the first steps take one more where it does not come out even (LLaDA, SDAR, LLaDA2). `rounded`:
    each takes its share of what is left, rounded, and steps whose share is none are left out (Tiny-A2D).
    """
    if schedule == "even":
        return tuple(length // steps + (n < length % steps) for n in range(min(length, steps)))
    sizes, left, one = [], length, np.float32(1)
    for n in range(steps, 0, -1):
        # A half goes up or down by the rounding of these shares in float32, as it does there.
        now, then = one - np.float32(n / steps), one - np.float32((n - 1) / steps)
        sizes.append(round(left * (1 - float((one - then) / (one - now)))))
        left -= sizes[-1]
    return tuple(size for size in sizes if size)


def sample_commits(candidates: Proposals, context: RuleContext, in_order: bool = False) -> SampledCommits:
    """Commits by a soft threshold on what the denoiser says (`engine/policy.py`).

    in_order: from left to right, also repeated tokens, up to the first that stays, the last candidate.
    """
    assert context.draws is not None
    *_, gates, places, _ = context.draws
    opened = gates[candidates.positions] < candidates.records["gate"]
    if in_order and not opened.all():
        opened = opened[: opened.argmin() + 1]
        candidates = candidates.subset(np.arange(len(opened)))
    found = candidates.records
    log_prob = float(np.where(opened, found["log_commit"], found["log_stay"]).sum())
    forced = not opened.any()
    if forced:
        urge = np.exp(found["forced_logit"] - found["forced_logit"].max())
        ends = urge.cumsum()
        at = min(int(np.searchsorted(ends, places[0] * ends[-1], side="right")), len(urge) - 1)
        opened[at] = True
        log_prob += float(found["forced_log_prob"][at] + math.log(urge[at] / ends[-1]))
    kind = "forced" if forced else "drawn"
    ids, sure = (found[f"{kind}_{name}"][opened] for name in ("token_ids", "log_confidence"))
    tokens = candidates.subset(opened).replace(token_ids=ids, confidence=np.exp(sure), log_prob=sure)
    return SampledCommits(opened, log_prob, forced, tokens)


_SCHEDULED = ("tokens_per_step", "steps_per_block", "schedule")
_sample_in_order = partial(sample_commits, in_order=True)
_SOFT = ("commit_threshold", "gate_temperature")
RULES = {
    "threshold": Rule(
        lambda p, c: select_by_threshold(p.confidence, c.settings.commit_threshold, c.least),
        settings=("commit_threshold", *_SCHEDULED),
    ),
    "left_to_right": Rule(
        lambda p, c: select_left_to_right(p.token_ids, p.confidence, c.settings.commit_threshold, c.least),
        settings=("commit_threshold", "copy_words", *_SCHEDULED),
        in_order=True,
    ),
    "top_k": Rule(lambda p, c: select_highest(p.confidence, c.count), settings=_SCHEDULED),
    "entropy": Rule(lambda p, c: select_highest(-p.entropy, c.count), ("spread",), _SCHEDULED),
    "margin": Rule(lambda p, c: select_highest(p.margin, c.count), ("spread",), _SCHEDULED),
    "entropy_bound": Rule(
        lambda p, c: select_by_entropy_bound(p.entropy, ENTROPY_BOUND, c.least), ("spread",), _SCHEDULED
    ),
    "sequential": Rule(lambda p, c: np.arange(min(c.count, len(p.positions))), settings=_SCHEDULED),
    "sampled": Rule(sample_commits, ("actions",), _SOFT, samples=True),
    "sampled_left_to_right": Rule(
        _sample_in_order, ("actions",), (*_SOFT, "copy_words"), samples=True, in_order=True
    ),
}


@cache
def find_rule(name: str | None) -> Rule:
    """The rule of that name (None: threshold), or at `module:name`: a `Rule`, or its `choose` alone.

    Raises `ConfigError` where there is none.
    """
    found = resolve_or_import(RULES, name or "threshold", "decode.commit_rule", 2)
    return found if isinstance(found, Rule) else Rule(found, ("spread",))


def choose_commits(candidates: Proposals, context: RuleContext) -> tuple[Proposals, SampledCommits | None]:
    """What the rule of the settings commits of at least one candidate, and how, where it was drawn.

    Of those a deterministic rule chose, at most `tokens_per_step`: the most confident, in order the first.
    """
    rule = find_rule(context.settings.commit_rule)
    chosen = rule.choose(candidates, context)
    if isinstance(chosen, SampledCommits):
        return chosen.tokens or candidates.subset(chosen.opened), chosen
    if context.settings.commit_rule not in RULES:
        chosen = check_chosen(chosen, len(candidates.positions), context)
    most = context.settings.tokens_per_step
    if most is not None and len(chosen) > most:
        best = slice(most) if rule.in_order else select_highest(candidates.confidence[chosen], most)
        chosen = chosen[best]
    return candidates.subset(chosen), None


def check_chosen(chosen: Any, count: int, context: RuleContext) -> IndexArray:
    """What a rule of one's own returned for `count` candidates, as ascending indices.

    Raises `ConfigError` for all but their indices or a mask of them; none only in a block that may wait.
    """
    found, least, rule = np.asarray(chosen), min(1, context.least), context.settings.commit_rule
    if found.dtype == bool and found.shape == (count,):
        found = np.flatnonzero(found)
    if found.shape == (0,):
        found = found.astype(np.intp)
    whole = found.ndim == 1 and found.size >= least and np.issubdtype(found.dtype, np.integer)
    if not whole or (found < 0).any() or (found >= count).any():
        raise ConfigError(
            f"decode.commit_rule={rule} returned {chosen!r:.60}, not the indices of at least {least} of "
            f"{count} candidates"
        )
    return np.unique(found)
