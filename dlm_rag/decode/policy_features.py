"""What policy heads see of a row, numbers that the loop knows anyway, and what they say of it."""

import math
from typing import Any

import numpy as np
import torch

from dlm_rag.decode.row import Row
from dlm_rag.diffusion.commit_rules import MAX_LOGIT, FloatArray, Proposals, log_sigmoid, open_gates
from dlm_rag.model.policy_heads import PolicyHead, PolicyHeads
from dlm_rag.text import split_words

# Of a fresh head: it keeps the evidence now and then, and so learns what that does.
INITIAL_SEARCH_LOGIT = 2.0
FEATURE_COUNT_SCALE = 8  # steps and words that features count up to, on a scale of logarithms


def ask_commit_head(candidates: Proposals, row: Row, heads: PolicyHeads) -> tuple[FloatArray, FloatArray]:
    """The features (n, F) of at least one candidate, and what the head adds (n,) to their logits."""
    features = compute_commit_features(candidates, row)
    return features, compute_head_logits(heads.commit, features)


def decide_search(row: Row, query: str, heads: PolicyHeads) -> tuple[bool, FloatArray, float]:
    """Whether the head searches with a query that has changed; its features, and the log-probability of
    that, in nats.
    """
    features = compute_search_features(row, query)
    logit = INITIAL_SEARCH_LOGIT + compute_head_logits(heads.search, features[None])
    opened = open_gates(logit, None if row.draws is None else row.draws[4, :1], row.settings.head_threshold)
    return bool(opened[0]), features, float(log_sigmoid(np.where(opened, logit, -logit))[0])


def compute_commit_features(candidates: Proposals, row: Row) -> FloatArray:
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


def compute_search_features(row: Row, query: str) -> FloatArray:
    """(F,) as `policy_heads.SEARCH_FEATURES` names them, of a query that has changed since the last
    search.
    """
    asked = split_words(query)
    new = sum(word not in row.searched_words for word in asked)
    steps = row.rollout.steps
    since = next((n for n, step in enumerate(reversed(steps)) if step.retrieved), len(steps))
    lowest = 1.0 if row.lowest_confidence is None else row.lowest_confidence
    return np.array(
        [_scaled(new), new / max(1, len(asked)), _scaled(len(row.record.committed)), _scaled(since), lowest,
         _scaled(row.step)]
    )  # fmt: skip


def compute_head_logits(head: PolicyHead, features: FloatArray) -> FloatArray:
    """What a head says (n,) of features (n, F)."""
    with torch.no_grad():
        found: FloatArray = head(torch.from_numpy(features)).numpy()
    return found


def _scaled(count: Any) -> Any:
    return np.log1p(count) / math.log1p(FEATURE_COUNT_SCALE)
