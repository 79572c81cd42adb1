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

import numpy as np
import torch
from numpy.typing import NDArray

from dlm_rag.config.inference import LikelihoodConfig
from dlm_rag.engine.sampling import LOGITS_CHUNK_POSITIONS
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.evidence.encode_segments import encode_canvases, encode_contexts
from dlm_rag.evidence.prompt_segments import LaidOutPrompt, LaidOutRow, lay_out_prompt
from dlm_rag.evidence.truncation import ContextBudget, truncate_evidence
from dlm_rag.model.denoiser import AnyDenoiser, Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.device_io import to_device, to_host
from dlm_rag.progress import report_progress
from dlm_rag.randomness import make_keyed_generator, sample_uniform
from dlm_rag.tokenizer import Prompt

FloatArray = NDArray[np.float64]
Span = tuple[int, int]  # positions of a continuation, from and up to


@dataclass(frozen=True)
class LogLikelihood:
    """What a denoiser says of a continuation.

    nats: its log-likelihood given the context, or an estimate of the bound. standard_error: of that
    estimate, in nats; 0 where nothing was drawn by lot. exact: whether it is the likelihood, not a bound.
    greedy: whether writing the most probable token (by diffusion, at the most confident position of the
    first block with a mask) at every step gives the continuation.
    """

    nats: float
    standard_error: float
    exact: bool
    greedy: bool

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the bound, by the normal distribution."""
        return self.nats - 1.96 * self.standard_error, self.nats + 1.96 * self.standard_error


@dataclass
class _Text:
    """A continuation to be scored: what is predicted from what is before, and what by masks."""

    laid: LaidOutPrompt
    target: list[int]
    from_before: list[int] = field(default_factory=list)  # positions that the state before them predicts
    masked_spans: list[Span] = field(default_factory=list)  # what is masked of each block
    nats: float = 0.0
    variance: float = 0.0
    greedy: bool = True

    def count_rows(self, samples: int) -> int:
        """How many rows it takes."""
        return bool(self.from_before) + sum(min(samples, 2 ** (b - a) - 1) for a, b in self.masked_spans)

    def make_row(self, shape: DenoiserConfig, span: Span, masked: Sequence[int]) -> "_Row":
        """The row in which these positions of a span are masked; what is after its block is not there."""
        begin, end = max(0, self.laid.block_bounds(span[0])[0]), self.laid.round_up_canvas(span[1])
        assert shape.mask_token_id is not None
        canvas = self.target[: span[1]] + [shape.mask_token_id] * (end - span[1])
        for place in masked:
            canvas[place] = shape.mask_token_id
        return _Row(self, self.laid.build_row(canvas, begin, shape.shifted), masked)

    def make_row_from_before(self) -> "_Row":
        """The row in which nothing is masked, and states predict what is after them."""
        count = len(self.target)
        return _Row(self, self.laid.build_row(self.target, count, shifted=True), self.from_before)


@dataclass(frozen=True)
class _Row:
    """A row for the denoiser, and the positions, ascending, at which it is asked for the target."""

    text: _Text
    laid: LaidOutRow
    positions: Sequence[int]


@dataclass
class _Estimate:
    """The mean over masks of a span; weights (k,) of the sums over what each of k rows has masked."""

    text: _Text
    weights: FloatArray
    drawn: bool  # by lot
    sums: list[float] = field(default_factory=list)

    def add(self, log_probs: FloatArray) -> None:
        """Takes the next row; the last one ends the estimate."""
        self.sums.append(float(log_probs.sum()))
        if len(self.sums) < len(self.weights):
            return
        values = self.weights * np.array(self.sums)
        self.text.nats += float(values.sum())
        if self.drawn:  # as of independent rows: strata can only make it smaller
            self.text.variance += len(values) * float(values.var(ddof=1))


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
    jobs = (
        job
        for text, key in zip(texts, keys, strict=True)
        for job in _list_jobs(shape, text, settings, ("likelihood", settings.seed, key))
    )
    total = sum(text.count_rows(settings.samples) for text in texts)
    with report_progress("log-likelihoods, rows", total) as advance:
        while part := list(islice(jobs, settings.batch_size)):
            found = _predict_targets(denoiser, [row for _, row in part])
            for (estimate, row), (log_probs, right, _) in zip(part, found, strict=True):
                if estimate is None:
                    row.text.nats += float(log_probs.sum())
                    row.text.greedy &= bool(right.all())
                else:
                    estimate.add(log_probs)
            advance(len(part))
    _write_greedily(denoiser, texts, settings.batch_size)
    return [
        LogLikelihood(
            text.nats, math.sqrt(text.variance), all(a + 1 == b for a, b in text.masked_spans), text.greedy
        )
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


def _list_jobs(
    shape: DenoiserConfig, text: _Text, settings: LikelihoodConfig, key: tuple[object, ...]
) -> Iterator[tuple[_Estimate | None, _Row]]:
    """The rows of a text, each with the estimate that it is a part of, if it is not the whole."""
    if text.from_before:
        yield None, text.make_row_from_before()
    for number, (begin, end) in enumerate(text.masked_spans):
        masks, weights, drawn = choose_masks(end - begin, settings.samples, (*key, number))
        estimate = _Estimate(text, weights, drawn)
        for mask in masks:
            yield estimate, text.make_row(shape, (begin, end), (begin + np.flatnonzero(mask)).tolist())


def choose_masks(
    length: int, samples: int, key: tuple[object, ...]
) -> tuple[NDArray[np.bool_], FloatArray, bool]:
    """Which of `length` positions are masked in each of k rows, (k, length), and the weight (k,) of each.

    The weighted sum over rows of the log-probabilities of what is masked is the bound, or in the mean over
    keys, where masks are drawn: which is the third value. These are `samples`, at least 2, in ascending
    order of how many positions are masked: one in each of as many equal parts of 1 to `length`.
    """
    if 2**length - 1 <= samples:
        masks = np.array(list(product((False, True), repeat=length))[1:])
        return masks, np.array([1 / (n * math.comb(length, n)) for n in masks.sum(1)]), False
    generator = make_keyed_generator(*key)
    parts = (np.arange(samples) + float(sample_uniform(generator, 1, 1)[0, 0])) / samples
    counts = np.minimum((parts * length).astype(np.int64) + 1, length)
    order = sample_uniform(generator, length, samples).T  # by position: a longer text has the same in front
    ranks = order.argsort(1).argsort(1)
    return ranks < counts[:, None], length / counts / samples, True


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
