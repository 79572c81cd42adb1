"""What a rollout is worth: a reward, less its prices."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dlm_rag.config import TrainConfig
from dlm_rag.config.fields import resolve_or_import
from dlm_rag.decode.rollout import Rollout
from dlm_rag.evaluation.metrics import compute_exact_match, compute_f1, compute_support_recall
from dlm_rag.questions import Question

Reward = Callable[[Rollout, Question], float]
REWARDS: dict[str, Reward] = {  # each is logged as `rollout_NAME`; `train.reward` names one of them
    "exact_match": lambda rollout, question: compute_exact_match(rollout.answer, question.golden_answers),
    "f1": lambda rollout, question: compute_f1(rollout.answer, question.golden_answers),
    # of the supporting passages, in the last evidence; 0 where none is known
    "recall": lambda rollout, question: (
        compute_support_recall(rollout.evidence, rollout.passages, question) or 0.0
    ),
    "forwards": lambda rollout, _: float(rollout.forwards),
    "searches": lambda rollout, _: float(rollout.retrievals),
    "unanswered": lambda rollout, _: float(not rollout.answer),
}
PRICES = {"forwards": "forward_cost", "searches": "search_cost"}  # subtracted, by setting


def compute_reward_parts(rollout: Rollout, question: Question, reward: str) -> dict[str, float]:
    """Every entry of `REWARDS`, and as `base` the one called `reward`, of a rollout without an error."""
    found = {name: float(score(rollout, question)) for name, score in REWARDS.items()}
    base = resolve_or_import(REWARDS, reward, "train.reward")
    return found | {"base": float(base(rollout, question))}


def compute_reward(parts: Mapping[str, float], train: TrainConfig, priced: bool) -> float:
    """R = base - c_f forwards - c_s searches, the prices only where `priced`."""
    prices = sum(getattr(train, price) * parts[name] for name, price in PRICES.items())
    return parts["base"] - prices if priced else parts["base"]


def has_prices(train: TrainConfig) -> bool:
    """Whether rollouts pay for anything."""
    return any(getattr(train, price) for price in PRICES.values())


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
