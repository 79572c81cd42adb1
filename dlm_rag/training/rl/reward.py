"""What a rollout is worth: exact match, and what is added to it and taken off."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlm_rag.config import TrainConfig
from dlm_rag.decode.rollout import Rollout
from dlm_rag.evaluation.metrics import compute_evidence_recall, compute_exact_match, compute_f1
from dlm_rag.questions import Question


@dataclass(frozen=True)
class RewardParts:
    """One rollout against its question: scores from 0 to 1, and what it took."""

    exact_match: float
    f1: float
    recall: float  # of the supporting passages, in the last evidence; 0 where none is known
    forwards: float
    searches: float
    unanswered: float  # 1 where the text has no answer in it


def compute_reward_parts(rollout: Rollout, question: Question) -> RewardParts:
    """The parts of the reward of a rollout without an error."""
    golden = question.golden_answers
    return RewardParts(
        exact_match=compute_exact_match(rollout.answer, golden),
        f1=compute_f1(rollout.answer, golden),
        recall=compute_evidence_recall(rollout.evidence, question.supporting_ids) or 0.0,
        forwards=float(rollout.forwards),
        searches=float(rollout.retrievals),
        unanswered=float(not rollout.answer),
    )


def compute_reward(found: RewardParts, train: TrainConfig, priced: bool) -> float:
    """R = EM + a F1 + b recall - c_f forwards - c_s searches, these last two where `priced`."""
    value = found.exact_match + train.f1_weight * found.f1 + train.recall_weight * found.recall
    prices = train.forward_cost * found.forwards + train.search_cost * found.searches
    return value - prices if priced else value


def compute_advantages(rewards: Sequence[float], priced: bool) -> NDArray[np.float64]:
    """Each reward (n,) less the mean of its group, by the group's deviation where no prices are in it.

    With prices a group that is all right would be ruled by the noise in them. All 0 for a group without
    differences. (GRPO, arXiv 2402.03300; on the deviation, arXiv 2503.20783.)
    """
    values = np.asarray(rewards, dtype=np.float64)
    apart = values - values.mean() if len(values) else values
    deviation = float(apart.std()) if len(values) else 0.0
    if deviation < 1e-9:
        return np.zeros_like(values)
    return apart if priced else apart / deviation
