"""A reward for `dlm-rag train`: the mean of F1 and exact match, so that a word too many costs more."""

from dlm_rag.decode.rollout import Rollout
from dlm_rag.evaluation.metrics import compute_exact_match, compute_f1
from dlm_rag.questions import Question


def score_answer(rollout: Rollout, question: Question) -> float:
    answers = question.golden_answers
    return (compute_f1(rollout.answer, answers) + compute_exact_match(rollout.answer, answers)) / 2
