"""Log-probabilities of the tokens of an answer, and of others in their places.

By SGLang's definition (its `dllm/README.md`): the log-softmax of the logits over the whole vocabulary, at
temperature 1, at the last active denoising step. A masked position is active until it is written. With
edits, and of uniform noise, a position is active until its block is finished, whatever it holds before.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from dlm_rag.decode.canvas import Canvas
from dlm_rag.decode.rollout import CommittedToken, Rollout, RolloutStep, TopLogprob
from dlm_rag.diffusion.commit_rules import Proposals

TokenText = Callable[[int], str]


class ScoredToken(NamedTuple):
    """A token as its last active step sees it, and the most probable ones in its place, if asked for."""

    token: CommittedToken
    top: tuple[TopLogprob, ...]


def record_tokens(written: Proposals | None, text: TokenText) -> tuple[CommittedToken, ...]:
    """Proposals as a step records them."""
    if written is None:
        return ()
    arrays = (written.positions, written.token_ids, written.confidence, written.log_prob)
    rows = zip(*(array.tolist() for array in arrays), strict=True)
    return tuple(CommittedToken(position, token, text(token), *sure) for position, token, *sure in rows)


def record_logprobs(
    record: RolloutStep, canvas: Canvas, frozen: int | None, proposals: Proposals, text: TokenText
) -> None:
    """Fills in `kept` and `top_logprobs` of a step that has written on the canvas what was proposed.

    frozen: `canvas.frozen_length` before it.
    """
    at, last = proposals.positions, canvas.frozen_length
    settled = np.zeros(len(at), dtype=bool)
    if frozen is not None and last is not None:
        written = [token.position for token in record.written_tokens]
        settled = (at >= frozen) & (at < last) & ~np.isin(at, written)
    kept, nats = proposals.subset(settled), proposals.current_log_prob[settled]
    kept = replace(kept, token_ids=canvas.ids[kept.positions], confidence=np.exp(nats), log_prob=nats)
    record.kept = record_tokens(kept, text)
    if proposals.likeliest is not None:
        scored = np.array([token.position for token in (*record.written_tokens, *record.kept)], np.int64)
        ids, others = proposals.likeliest[..., np.searchsorted(at, scored)]
        record.top_logprobs = tuple(
            tuple((int(n), text(int(n)), value) for n, value in zip(*columns, strict=True))
            for columns in zip(ids.T.tolist(), others.T.tolist(), strict=True)
        )


def score_tokens(step: RolloutStep, before: dict[int, ScoredToken]) -> dict[int, ScoredToken]:
    """By position, what stands on the canvas after a step, as it was last scored."""
    tokens = (*step.written_tokens, *step.kept)
    pairs = zip(tokens, step.top_logprobs or ((),) * len(tokens), strict=True)
    return step.apply(before, {token.position: ScoredToken(token, top) for token, top in pairs})


def collect_logprobs(rollout: Rollout) -> dict[int, ScoredToken]:
    """By position, what stands there at last, with its log-probability in nats at its last active step.

    Where a model edits, or denoises uniform noise, without `decode.top_logprobs` a rollout has only that of
    the step that wrote the token. It is None in traces of version 1.
    """
    return reduce(lambda scores, step: score_tokens(step, scores), rollout.steps, {})
