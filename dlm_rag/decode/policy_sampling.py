"""What a policy decides by lot: which candidates to commit, whether to search; and the record of it.

A soft threshold draws from what the model says (`diffusion/policy.py`); heads open gates before the most
probable tokens, by the features below, which are numbers that the loop knows anyway.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dlm_rag.config import DecodeConfig
from dlm_rag.decode.rollout import Action
from dlm_rag.decode.row import Row
from dlm_rag.diffusion.commit_rules import Proposals, select_highest
from dlm_rag.model.policy_heads import PolicyHead, PolicyHeads
from dlm_rag.text import split_words

Features = NDArray[np.float64]
# rows of `policy.drawn`
TOKEN, LOG_C, GATE, LOG_COMMIT, LOG_STAY, FORCED_LOGIT, FORCED_TOKEN, LOG_C_FORCED, LOG_FORCED = range(9)
STOCHASTIC_RULES = ("sampled", "policy_head")  # the commit rules whose steps have an `Action`
MAX_LOGIT = 14.0  # a logit of a confidence beyond it is rounding
FEATURE_COUNT_SCALE = 8  # steps and words that features count up to, on a scale of logarithms


def sample_commits(candidates: Proposals, lots: Features) -> tuple[Proposals, Action]:
    """What a soft threshold commits of at least one candidate.

    lots (5, length): row 2 for the gates, the first number of row 3 for the position that is forced where
    every candidate stays.
    """
    draws = candidates.policy_draws
    assert draws is not None
    opened = lots[2, candidates.positions] < draws[GATE]
    log_prob = float(np.where(opened, draws[LOG_COMMIT], draws[LOG_STAY]).sum())
    forced = not opened.any()
    if forced:
        urge = np.exp(draws[FORCED_LOGIT] - draws[FORCED_LOGIT].max())
        ends = urge.cumsum()
        at = min(int(np.searchsorted(ends, lots[3, 0] * ends[-1], side="right")), len(urge) - 1)
        opened[at] = True
        log_prob += float(draws[LOG_FORCED, at] + math.log(urge[at] / ends[-1]))
    token, log_c = draws[[FORCED_TOKEN, LOG_C_FORCED] if forced else [TOKEN, LOG_C]][:, opened]
    chosen = replace(
        candidates.subset(opened),
        token_ids=token.astype(np.int64),
        confidence=np.exp(log_c),
        log_prob=log_c,
    )
    return chosen, Action(tuple(candidates.positions.tolist()), forced, log_prob)


def commit_by_head(candidates: Proposals, row: Row, heads: PolicyHeads) -> tuple[Proposals, Action]:
    """What the head commits of at least one candidate: by the row's lots, else what it gives
    `decode.head_threshold` or more; where that is none, the most confident.
    """
    settings = row.settings
    features = compute_commit_features(candidates, row)
    logit = base_gate_logit(features, settings) + compute_head_logits(heads.commit, features)
    lots = None if row.uniform_draws is None else row.uniform_draws[2, candidates.positions]
    opened = _open_gates(logit, lots, settings.head_threshold)
    log_prob = float(log_sigmoid(np.where(opened, logit, -logit)).sum())
    forced = not opened.any()
    if forced:
        opened[select_highest(candidates.confidence, 1)] = True
    record = tuple(map(tuple, features.tolist()))
    return candidates.subset(opened), Action(tuple(candidates.positions.tolist()), forced, log_prob, record)


def decide_search(row: Row, query: str, heads: PolicyHeads) -> tuple[bool, Features, float]:
    """Whether the head searches with a query that has changed; its features, and the log-probability of
    that, in nats.
    """
    features = compute_search_features(row, query)
    logit = INITIAL_SEARCH_LOGIT + compute_head_logits(heads.search, features[None])
    opened = _open_gates(
        logit, None if row.uniform_draws is None else row.uniform_draws[4, :1], row.settings.head_threshold
    )
    return bool(opened[0]), features, float(log_sigmoid(np.where(opened, logit, -logit))[0])


INITIAL_SEARCH_LOGIT = (
    2.0  # of a fresh head: it keeps the evidence now and then, and so learns what that does
)


def base_gate_logit(features: Any, settings: DecodeConfig) -> Any:
    """The logit (n,) of the gates of a fresh head, from features (n, F): that of the soft threshold."""
    tau = min(max(settings.commit_threshold, 1e-6), 1 - 1e-6)
    return (features[:, 0] * MAX_LOGIT - math.log(tau / (1 - tau))) / settings.gate_temperature


def compute_commit_features(candidates: Proposals, row: Row) -> Features:
    """(n, F) as `policy_heads.COMMIT_FEATURES` names them; in canvas order, each about between -1 and 1."""
    positions, n = candidates.positions, len(candidates.positions)
    confidence = np.clip(candidates.confidence, 0.0, 1.0)
    odds = np.clip(candidates.log_prob - np.log(np.maximum(1 - confidence, 1e-9)), -MAX_LOGIT, MAX_LOGIT)
    odds = odds / MAX_LOGIT
    lowest = np.concatenate(([1.0], np.minimum.accumulate(odds)[:-1]))
    doubt = np.concatenate(([0.0], np.cumsum(1 - confidence)[:-1]))
    left = np.where(positions > 0, ~row.canvas.masked[positions - 1], True)
    last = row.rollout.steps[-1]
    return np.stack([
        odds,
        _scaled(positions - row.canvas.first_masked),
        lowest,
        _scaled(doubt),
        left.astype(np.float64),
        np.isin(candidates.token_ids, list(row.end_ids)).astype(np.float64),
        np.full(n, float(last.retrieved)),
        np.full(n, _scaled(row.step)),
    ], axis=1)  # fmt: skip


def compute_search_features(row: Row, query: str) -> Features:
    """(F,) as `policy_heads.SEARCH_FEATURES` names them, of a query that has changed since the last
    search.
    """
    asked = split_words(query)
    new = sum(word not in row.searched_words for word in asked)
    steps = row.rollout.steps
    since = next((n for n, step in enumerate(reversed(steps)) if step.retrieved), len(steps))
    lowest = 1.0 if row.lowest_confidence is None else row.lowest_confidence
    return np.array(
        [_scaled(new), new / max(1, len(asked)), _scaled(len(row.committed)), _scaled(since), lowest,
         _scaled(row.step)]
    )  # fmt: skip


def compute_head_logits(head: PolicyHead, features: Features) -> Features:
    """What a head says (n,) of features (n, F)."""
    with torch.no_grad():
        found: Features = head(torch.from_numpy(features)).numpy()
    return found


def log_sigmoid(x: Features) -> Features:
    """log(1 / (1 + exp(-x)))."""
    return -np.logaddexp(0.0, -x)


def _open_gates(logit: Features, lots: Features | None, cut: float | None) -> NDArray[np.bool_]:
    """Which gates open: those whose lot falls under their probability, without lots those at the cut."""
    probability = np.exp(log_sigmoid(logit))
    found: NDArray[np.bool_] = probability >= cut if lots is None else lots < probability
    return found


def _scaled(count: Any) -> Any:
    return np.log1p(count) / math.log1p(FEATURE_COUNT_SCALE)
