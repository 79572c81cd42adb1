"""What a rollout is worth."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm_rag.config.fields import resolve_or_import
from dlm_rag.decode.rollout import Rollout
from dlm_rag.errors import ConfigError
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


def compute_reward_parts(rollout: Rollout, question: Question, reward: str) -> dict[str, float]:
    """Every entry of `REWARDS`, and as `reward` the one of that name, of a rollout without an error."""
    found = {name: float(score(rollout, question)) for name, score in REWARDS.items()}
    worth: Any = resolve_or_import(REWARDS, reward, "train.reward")(rollout, question)
    with suppress(TypeError, ValueError):
        if math.isfinite(worth):
            return found | {"reward": float(worth)}
    raise ConfigError(f"train.reward={reward} returned {worth!r:.60}, not a finite number")


def compute_advantages(rewards: Sequence[float]) -> NDArray[np.float64]:
    """Each reward (n,) less the mean of its group, by their deviation (GRPO, arXiv 2402.03300), or 0."""
    values = np.asarray(rewards, dtype=np.float64)
    apart = values - values.mean() if len(values) else values
    deviation = float(apart.std()) if len(values) else 0.0
    return apart / deviation if deviation > 1e-9 else np.zeros_like(values)
