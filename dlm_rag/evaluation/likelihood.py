"""Log-likelihoods of texts under a denoiser: exact from left to right, else a bound.

Read from left to right (`mode=autoregressive`, all that Qwen and Llama folders have) a text has the sum of
its tokens' log-probabilities, which is exact. By diffusion a text of L tokens has the bound that LLaDA is
evaluated by (arXiv 2502.09992, eq. 6 and algorithm 3): with l of 1 to L tokens masked, all l and all
choices of these equally likely,

    log p(x | context) >= E [ L / l * sum over masked i of log p(x_i | what is shown, context) ]

the mean over all orders in which the tokens may be written. Attention in blocks makes it a sum over blocks,
each given what is before it, which is tighter: exact for blocks of 1. Where the state before a block
predicts its first token, this one is exact, and the rest of the block is given it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dlm_rag.config.sections import LikelihoodConfig
from dlm_rag.engine.runner import LOGITS_CHUNK_POSITIONS
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.evidence.encode_segments import encode_canvases, encode_contexts
from dlm_rag.evidence.prompt_segments import (
    ContextBudget,
    LaidOutPrompt,
    LaidOutRow,
    lay_out_prompt,
    truncate_evidence,
)
from dlm_rag.model.denoiser import AnyDenoiser, Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.packed_batch import to_device, to_host
from dlm_rag.progress import track_progress
from dlm_rag.randomness import make_keyed_generator, sample_uniform
from dlm_rag.tokenizer import Prompt

FloatArray = NDArray[np.float64]
Span = tuple[int, int]  # positions of a continuation, from and up to


@dataclass(frozen=True)
class LogLikelihood:
    """What a denoiser says of a continuation.

    nats: its log-likelihood given the context, or an estimate of the bound. exact: whether it is the
    likelihood, not a bound. greedy: whether writing the most probable token (by diffusion, at the most
    confident position of the first block with a mask) at every step gives the continuation.
    """

    nats: float
    exact: bool
    greedy: bool


@dataclass
class _Text:
    """A continuation to be scored: what is predicted from what is before, and what by masks."""

    laid: LaidOutPrompt
    target: list[int]
    from_before: list[int] = field(default_factory=list)  # positions that the state before them predicts
    masked_spans: list[Span] = field(default_factory=list)  # what is masked of each block
    nats: float = 0.0
    greedy: bool = True

    def make_row(
        self, shape: DenoiserConfig, span: Span, masked: Sequence[int], weight: float = 0.0
    ) -> "_Row":
        """The row in which these positions of a span are masked; what is after its block is not there."""
        begin, end = max(0, self.laid.block_bounds(span[0])[0]), self.laid.round_up_canvas(span[1])
        assert shape.mask_token_id is not None
        canvas = self.target[: span[1]] + [shape.mask_token_id] * (end - span[1])
        for place in masked:
            canvas[place] = shape.mask_token_id
        return _Row(self, self.laid.build_row(canvas, begin, shape.shifted), masked, weight)


class _Row(NamedTuple):
    """A row for the denoiser: the positions, ascending, at which it is asked for the target, and the weight
    of their log-probabilities."""

    text: _Text
    laid: LaidOutRow
    positions: Sequence[int]
    weight: float


def estimate_log_likelihoods(
    denoiser: AnyDenoiser,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    settings: LikelihoodConfig | None = None,
    keys: Sequence[object] | None = None,
) -> list[LogLikelihood]:
    """Log-likelihoods in nats of continuations, given contexts, one for each of the `pairs` of token ids.

    What is masked is drawn by `settings.seed` and the pair's key (by default its context), position by
    position: of continuations with one key nearly the same is masked, so that their differences vary less
    than they do. Where all ways to mask a block are no more than `settings.samples`, each of them is taken,
    and nothing is drawn. The same whatever the other pairs are, but for rounding.

    Raises `ConfigError` for a model of uniform noise and for a mode that the model was not trained for,
    `QuestionError` for a pair that is empty or too long.
    """
    settings = settings or LikelihoodConfig()
    if not isinstance(denoiser, Denoiser):
        raise ConfigError(
            "a model of uniform noise is not scored here: its logits go by the token that stands at a "
            "position, which a bound on the log-likelihood must not see"
        )
    shape, modes = denoiser.config, denoiser.config.decode_modes
    if (mode := settings.mode or modes[0]) not in modes:
        raise ConfigError(f"mode={mode}: the model was trained for {' and '.join(modes)}")
    keys = [tuple(context) for context, _ in pairs] if keys is None else keys
    texts = [_lay_out(shape, mode, *pair) for pair in pairs]
    rows = (
        row
        for text, key in zip(track_progress(texts, "log-likelihoods"), keys, strict=True)
        for row in _list_rows(shape, text, settings.samples, ("likelihood", settings.seed, key))
    )
    while part := list(islice(rows, settings.batch_size)):
        for row, (log_probs, right, _) in zip(part, _predict_targets(denoiser, part), strict=True):
            row.text.nats += row.weight * float(log_probs.sum())
            row.text.greedy &= row.positions is not row.text.from_before or bool(right.all())
    _write_greedily(denoiser, texts, settings.batch_size)
    return [
        LogLikelihood(text.nats, all(a + 1 == b for a, b in text.masked_spans), text.greedy)
        for text in texts
    ]


def _lay_out(shape: DenoiserConfig, mode: str, context: Sequence[int], target: Sequence[int]) -> _Text:
    prompt, ids = Prompt(tuple(context), (), ()), list(target)
    before = mode == "autoregressive" or shape.predicts_next_block
    if not ids or (before and not context):
        raise QuestionError(
            "a log-likelihood needs a continuation and a context of at least one token each"
        )
    text = _Text(lay_out_prompt(prompt, shape), ids)
    if mode == "autoregressive":
        text.from_before = list(range(len(ids)))
    else:
        begin = 0
        while begin < len(ids):
            first, end = text.laid.block_bounds(begin)
            if text.laid.predicts_next_block and first == begin:
                text.from_before.append(begin)
                begin += 1
            if begin < (end := min(end, len(ids))):
                text.masked_spans.append((begin, end))
            begin = end
    room = ContextBudget.from_config(shape, canvas=text.laid.round_up_canvas(len(ids)))
    truncate_evidence(prompt, room)
    return text


def _list_rows(shape: DenoiserConfig, text: _Text, samples: int, key: tuple[object, ...]) -> Iterator[_Row]:
    if text.from_before:
        yield _Row(text, text.laid.build_row(text.target, len(text.target), True), text.from_before, 1.0)
    for number, (begin, end) in enumerate(text.masked_spans):
        masks, weights = choose_masks(end - begin, samples, (*key, number))
        for mask, weight in zip(masks, weights, strict=True):
            masked = (begin + np.flatnonzero(mask)).tolist()
            yield text.make_row(shape, (begin, end), masked, float(weight))


def choose_masks(
    length: int, samples: int, key: tuple[object, ...]
) -> tuple[NDArray[np.bool_], FloatArray]:
    """Which of `length` positions are masked in each of k rows, (k, length), and the weight (k,) of each.

    The weighted sum over rows of the log-probabilities of what is masked is the bound, or in the mean over
    keys where masks are drawn: at least 2 `samples`, in ascending order of how many positions are masked,
    one in each of as many equal parts of 1 to `length`.
    """
    if 2**length - 1 <= samples:
        masks = np.array(list(product((False, True), repeat=length))[1:])
        return masks, np.array([1 / (n * math.comb(length, n)) for n in masks.sum(1)])
    generator = make_keyed_generator(*key)
    parts = (np.arange(samples) + float(sample_uniform(generator, 1, 1)[0, 0])) / samples
    counts = np.minimum((parts * length).astype(np.int64) + 1, length)
    order = sample_uniform(generator, length, samples).T  # by position: a longer text has the same in front
    ranks = order.argsort(1).argsort(1)
    return ranks < counts[:, None], length / counts / samples


def _predict_targets(denoiser: Denoiser, rows: Sequence[_Row]) -> list[FloatArray]:
    """For each row (3, n), at its positions: the log-probability of the target in nats, whether it is the
    most probable token that may be written, and the log-probability of the one that is.
    """
    shape = denoiser.config
    with torch.inference_mode():
        states = [row.laid for row in rows]
        positions = [row.positions for row in rows]
        hidden = encode_canvases(denoiser, states, encode_contexts(denoiser, states), positions)
        wanted = np.array([row.text.target[place] for row in rows for place in row.positions])
        never = [n for n in (shape.mask_token_id, *shape.excluded_token_ids) if n is not None]
        targets, not_text = to_device([wanted, np.array(never, np.int64)], hidden.device)
        parts = []
        chunks = zip(
            hidden.split(LOGITS_CHUNK_POSITIONS), targets.split(LOGITS_CHUNK_POSITIONS), strict=True
        )
        for states_of_chunk, ids in chunks:
            found = denoiser.compute_token_logits(states_of_chunk).float().log_softmax(-1)
            own = found.gather(1, ids[:, None]).squeeze(1)
            best, token = found.index_fill_(1, not_text, -math.inf).max(-1)
            parts.append(torch.stack([own, (token == ids).float(), best]))
        values: FloatArray = to_host(torch.cat(parts, dim=1)).astype(np.float64)
    return np.split(values, np.cumsum([len(row.positions) for row in rows])[:-1], axis=1)


def _write_greedily(denoiser: Denoiser, texts: Sequence[_Text], batch_size: int) -> None:
    """Finds for which texts the most probable tokens are the target, written one a step in each block.

    A text leaves with its first other token, so that all before is the target's.
    """
    open_spans = [(text, span, [*range(*span)]) for text in texts for span in text.masked_spans]
    while open_spans := [each for each in open_spans if each[0].greedy and each[2]]:
        for start in range(0, len(open_spans), batch_size):
            part = open_spans[start : start + batch_size]
            rows = [text.make_row(denoiser.config, span, masked) for text, span, masked in part]
            for (text, _, masked), (_, right, best) in zip(
                part, _predict_targets(denoiser, rows), strict=True
            ):
                at = int(best.argmax())
                text.greedy &= bool(right[at])
                del masked[at]
