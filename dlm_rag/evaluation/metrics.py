"""Scores of one rollout against its question; everything is read from the record, no model needed."""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from dlm_rag.decode.rollout import Rollout
from dlm_rag.files.record_readers import normalize_title
from dlm_rag.nvtx_ranges import drop_nested_stages
from dlm_rag.questions import Question
from dlm_rag.retrieval.corpus import get_row_id
from dlm_rag.text import normalize_whitespace

BOOTSTRAP_RESAMPLES = 4000
Z_SCORE_95 = 1.959964  # standard deviations on either side of a normal mean that hold 95 %

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
CLOSED_ANSWERS = {"yes", "no", "noanswer"}  # answers that are right or wrong as a whole


def compute_exact_match(prediction: str, golden_answers: Iterable[str]) -> float:
    """1.0 if a golden answer equals the prediction as `_normalize` has them; empty never matches."""
    pairs = (_normalize(prediction, answer) for answer in golden_answers)
    return float(any(ours == theirs != "" for ours, theirs in pairs))


def compute_cover_match(prediction: str, golden_answers: Iterable[str]) -> float:
    """Cover-EM: 1.0 if a golden answer is in the prediction, be it part of a word (FlashRAG's `acc`)."""
    pairs = (_normalize(prediction, answer) for answer in golden_answers)
    return float(any(theirs and theirs in ours for ours, theirs in pairs))


def compute_f1(prediction: str, golden_answers: Iterable[str], rule: str = "squad") -> float:
    """The best word-level F1 over the golden answers, as `_normalize` has them.

    rule: "squad" (Rajpurkar et al. 2016), or "hotpotqa": 0 where one side is yes, no or noanswer and the
    other is not, as the scripts of HotpotQA (Yang et al. 2018) and 2WikiMultiHopQA (Ho et al. 2020) do.
    """
    best = 0.0
    for ours, theirs in (_normalize(prediction, answer) for answer in golden_answers):
        if rule == "hotpotqa" and ours != theirs and {ours, theirs} & CLOSED_ANSWERS:
            continue
        predicted, golden = ours.split(), theirs.split()
        if shared := sum((Counter(predicted) & Counter(golden)).values()):
            best = max(best, 2 * shared / (len(predicted) + len(golden)))
    return best


def _normalize(prediction: str, answer: str) -> tuple[str, str]:
    """Both by SQuAD's rule (Rajpurkar et al. 2016): lower case, no punctuation, blanks folded, no articles
    but where nothing else is left of either: "The The" would equal every text of articles."""
    kept = [text.lower().translate(_NO_PUNCTUATION) for text in (prediction, answer)]
    bare = [_ARTICLE.sub(" ", text) for text in kept]
    ours, theirs = bare if any(map(str.strip, bare)) else kept
    return normalize_whitespace(ours), normalize_whitespace(theirs)


def choose_f1_rule(questions: str) -> str:
    """The rule of `f1` for a file of questions, by its name and that of its folder."""
    path = Path(questions).absolute()
    said = f"{path.parent.name}/{path.name}".lower()
    return "hotpotqa" if "hotpot" in said or "2wiki" in said else "squad"


def compute_evidence_recall(evidence: Iterable[str], supporting_ids: Sequence[str]) -> float | None:
    """Share of the supporting passages (of cut rows by any part) in the evidence; None if none is known."""
    needed, found = set(supporting_ids), set(evidence)
    found |= {get_row_id(name) for name in found}
    return len(needed & found) / len(needed) if needed else None


def compute_support_recall(
    evidence: Sequence[str], texts: Mapping[str, str], question: Question
) -> float | None:
    """`compute_evidence_recall` by ids where the question has some, else by titles; None without either.

    evidence: ids. texts: of passages by id, each beginning with its title; any passage of a title counts.
    """
    if question.supporting_ids or not question.supporting_titles:
        return compute_evidence_recall(evidence, question.supporting_ids)
    found = [normalize_title(texts.get(name, "").partition("\n")[0]) for name in evidence]
    return compute_evidence_recall(found, [normalize_title(title) for title in question.supporting_titles])


@dataclass(frozen=True)
class Score:
    """What one rollout achieved (0 to 1) and what it took."""

    exact_match: float
    f1: float
    recall_first: float | None  # evidence recall after the search with the question alone
    recall_last: float | None  # and after the last step; None when no support is known
    forwards: float
    searches: float
    tokens: float  # positions that hold a token at the end
    seconds: float  # this question's share of all stages
    cover_match: float  # a golden answer is part of the answer
    # Of a model behind a server, whose `tokens` are those of its replies.
    requests: float | None = None
    prompt_tokens: float | None = None
    cut_replies: float | None = None
    abstained: float = 0.0
    answered_match: float | None = None  # exact match; None where no answer is given
    failed: float = 0.0  # 1 where it ended in an error: what it took is in no mean


SCORE_METRICS = tuple(field.name for field in fields(Score))
# between 0 and 1 for every question
SHARE_METRICS = ("exact_match", "cover_match", "f1", "recall_first", "recall_last", "abstained",
                 "answered_match", "failed")  # fmt: skip


def score_rollout(rollout: Rollout, question: Question, f1_rule: str = "squad") -> Score:
    """Scores a finished rollout, fresh or read back from a trace; one that failed has no answer."""
    first = rollout.steps[0].passage_ids if rollout.steps else ()
    exact_match = compute_exact_match(rollout.answer, question.golden_answers)
    return Score(
        exact_match=exact_match,
        f1=compute_f1(rollout.answer, question.golden_answers, f1_rule),
        recall_first=compute_support_recall(first, rollout.passages, question),
        recall_last=compute_support_recall(rollout.evidence, rollout.passages, question),
        forwards=rollout.forwards,
        searches=rollout.retrievals,
        tokens=rollout.tokens_committed,
        seconds=sum(drop_nested_stages(rollout.seconds).values()),
        cover_match=compute_cover_match(rollout.answer, question.golden_answers),
        requests=rollout.usage.get("requests"),
        prompt_tokens=rollout.usage.get("prompt_tokens"),
        cut_replies=rollout.usage.get("cut_replies"),
        abstained=float(bool(rollout.abstain_reason)),
        answered_match=exact_match if rollout.answer else None,
        failed=float(bool(rollout.error)),
    )


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def estimate_share(values: Iterable[float | None]) -> Estimate | None:
    """The mean of numbers from 0 to 1, as are proportions; None where none is known.

    Agresti and Coull (1998): the normal interval once about two successes and two failures are added. It
    also holds near 0 and 1, where Wilson's may hold 84 % of the time only (Brown, Cai and DasGupta 2001).
    """
    return _adjusted_wald(values, 0.0, Z_SCORE_95 * Z_SCORE_95 / 2)


def estimate_difference(values: Iterable[float | None]) -> Estimate | None:
    """The mean of paired differences, numbers from -1 to 1; None where there are none.

    Bonett and Price (2012): the normal interval once a question is added that either setting alone answers.
    """
    return _adjusted_wald(values, -1.0, 1.0)


def _adjusted_wald(values: Iterable[float | None], low: float, added: float) -> Estimate | None:
    """The normal interval of a mean, after `added` observations of `low` and as many of 1."""
    known = np.array([value for value in values if value is not None], float)
    if not known.size:
        return None
    count = known.size + 2 * added
    centre = (known.sum() + added * (low + 1)) / count
    variance = (np.square(known).sum() + added * (low * low + 1)) / count - centre**2
    half = Z_SCORE_95 * (variance / count) ** 0.5
    return Estimate(float(known.mean()), float(max(centre - half, low)), float(min(centre + half, 1.0)))


def bootstrap_mean(values: Sequence[float | None]) -> Estimate | None:
    """The mean of what is known, with percentiles of resampled means (Efron 1979); seeded."""
    known = [float(value) for value in values if value is not None]
    return bootstrap_ratio(known, [1.0] * len(known))


def bootstrap_ratio(values: Sequence[float], counts: Sequence[float]) -> Estimate | None:
    """The sum of the values by the sum of the counts, resampled in pairs; None where all counts are 0."""
    from scipy import stats

    pairs = np.array([pair for pair in zip(values, counts, strict=True) if pair[1]], float)
    if not len(pairs):
        return None
    above, below = pairs.T
    ratio = float(above.sum() / below.sum())
    if len({*(above / below)}) == 1:
        return Estimate(ratio, ratio, ratio)
    found = stats.bootstrap(
        (above, below), lambda above, below, axis: above.sum(axis) / below.sum(axis), paired=True,
        n_resamples=BOOTSTRAP_RESAMPLES, batch=200, vectorized=True, method="percentile", rng=0,
    ).confidence_interval  # fmt: skip
    return Estimate(ratio, float(found.low), float(found.high))
