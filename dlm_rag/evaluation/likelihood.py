"""Log-likelihoods of texts under a denoiser: exact from left to right, else a bound.

Read from left to right (`mode=autoregressive`, all that Qwen and Llama folders have) a text has the sum of
its tokens' log-probabilities, which is exact. By diffusion a text of L tokens has the bound that LLaDA is
evaluated by (arXiv 2502.09992, eq. 6 and algorithm 3): with l of 1 to L tokens masked, all l and all
choices of these equally likely,

    log p(x | context) >= E [ L / l * sum over masked i of log p(x_i | what is shown, context) ]

the mean over all orders in which the tokens may be written. Attention in blocks makes it a sum over blocks,
each given what is before it, which is tighter. Where the state before a block predicts its first token,
this one is exact, and the rest of the block is given it.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from dlm_rag.config.sections import LikelihoodConfig
from dlm_rag.engine.runner import LOGITS_CHUNK_POSITIONS
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.evidence.encode_segments import encode_canvases
from dlm_rag.evidence.prompt_segments import ContextBudget, lay_out_prompt, truncate_evidence
from dlm_rag.model.denoiser import AnyDenoiser, Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.packed_batch import LaidOutRow, to_host
from dlm_rag.progress import track_progress
from dlm_rag.randomness import make_keyed_generator, sample_uniform
from dlm_rag.tokenizer import Prompt

FloatArray = NDArray[np.float64]
Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context and of its continuation


class LogLikelihood(NamedTuple):
    """What a denoiser says of a continuation."""

    nats: float  # its log-likelihood given the context, or an estimate of the bound
    exact: bool  # whether it is the likelihood, not a bound
    greedy: bool  # whether it is what greedy decoding writes; of a text read by diffusion False: not told


class _Row(NamedTuple):
    """A row for the denoiser: of pair `pair`, `targets` are asked for at `positions` of the canvas."""

    pair: int
    laid: LaidOutRow
    positions: Sequence[int]
    targets: NDArray[np.int64]
    weight: float  # of their log-probabilities


def estimate_log_likelihoods(
    denoiser: AnyDenoiser, pairs: Sequence[Pair], settings: LikelihoodConfig | None = None,
    keys: Sequence[object] | None = None,
) -> list[LogLikelihood]:  # fmt: skip
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
            "a model of uniform noise is not scored here: its logits go by the token at their position, "
            "which a bound must not see"
        )
    modes = denoiser.config.decode_modes
    if (mode := settings.mode or modes[0]) not in modes:
        raise ConfigError(f"mode={mode}: the model was trained for {' and '.join(modes)}")
    keys = [tuple(context) for context, _ in pairs] if keys is None else keys
    rows = _list_rows(denoiser.config, mode, settings, pairs, keys)
    nats, exact = [0.0] * len(pairs), [True] * len(pairs)
    greedy = [mode == "autoregressive"] * len(pairs)
    while part := list(islice(rows, settings.batch_size)):
        for row, (log_probs, right) in zip(part, _predict_targets(denoiser, part), strict=True):
            nats[row.pair] += row.weight * float(log_probs.sum())
            exact[row.pair] &= row.weight == 1.0  # the one way to mask a single token
            greedy[row.pair] &= bool(right.all())
    return [LogLikelihood(*each) for each in zip(nats, exact, greedy, strict=True)]


def _list_rows(
    shape: DenoiserConfig, mode: str, settings: LikelihoodConfig, pairs: Sequence[Pair], keys: Sequence[Any]
) -> Iterator[_Row]:
    """Rows of each pair: of every block with parts of it masked, then of all that states before predict."""
    for number, (context, continuation) in enumerate(track_progress(pairs, "log-likelihoods")):
        ids = np.array(continuation, np.int64)
        from_before = [*range(len(ids))] if mode == "autoregressive" else []
        if not len(ids) or ((from_before or shape.predicts_next_block) and not context):
            raise QuestionError("a log-likelihood needs a context and a continuation of at least one token")
        prompt = Prompt(tuple(context), (), ())
        laid = lay_out_prompt(prompt, shape)
        truncate_evidence(prompt, ContextBudget.from_config(shape, canvas=laid.round_up_canvas(len(ids))))
        begin, block = len(from_before), 0
        while begin < len(ids):
            first, end = laid.block_bounds(begin)
            if laid.predicts_next_block and first == begin:
                from_before.append(begin)
                begin += 1
            stop, key = min(end, len(ids)), ("likelihood", settings.seed, keys[number], block)
            canvas = np.full(laid.round_up_canvas(stop), shape.mask_token_id)
            for mask, weight in choose_masks(stop - begin, settings.samples, key):
                masked = begin + np.flatnonzero(mask)
                canvas[:stop] = ids[:stop]
                canvas[masked] = shape.mask_token_id
                row = laid.build_row(canvas.tolist(), max(0, first), shape.shifted)
                yield _Row(number, row, masked.tolist(), ids[masked], weight)
            begin, block = end, block + 1
        if from_before:
            row = laid.build_row(ids.tolist(), len(ids), shifted=True)
            yield _Row(number, row, from_before, ids[from_before], 1.0)


def choose_masks(
    length: int, samples: int, key: tuple[object, ...]
) -> Iterator[tuple[NDArray[np.bool_], float]]:
    """Yields which of `length` positions are masked, (length,), and the weight of each such choice.

    The weighted sum over choices of the log-probabilities of what is masked is the bound, or in the mean
    over keys where masks are drawn: at least 2 `samples`, in ascending order of how many positions are
    masked, one in each of as many equal parts of 1 to `length`.
    """
    if 2**length - 1 <= samples:
        for choice in list(product((False, True), repeat=length))[1:]:
            yield np.array(choice), 1 / (sum(choice) * math.comb(length, sum(choice)))
        return
    generator = make_keyed_generator(*key)
    begin = float(sample_uniform(generator, 1, 1)[0, 0])
    order = sample_uniform(generator, length, samples).T  # by position: a longer text has the same in front
    for n, ranks in enumerate(order.argsort(1).argsort(1)):
        count = min(int((n + begin) / samples * length) + 1, length)
        yield ranks < count, length / count / samples


def _predict_targets(denoiser: Denoiser, rows: Sequence[_Row]) -> list[FloatArray]:
    """For each row (2, n): log-probabilities of its targets in nats, and whether each is most likely."""
    shape, parts = denoiser.config, list[torch.Tensor]()
    never = [n for n in (shape.mask_token_id, *shape.excluded_token_ids) if n is not None]
    asked = [np.concatenate([row.targets for row in rows]), np.array(never, np.int64)]
    with torch.inference_mode():
        hidden, (targets, not_text) = encode_canvases(
            denoiser, [row.laid for row in rows], [row.positions for row in rows], asked
        )
        chunks = (hidden.split(LOGITS_CHUNK_POSITIONS), targets.split(LOGITS_CHUNK_POSITIONS))
        for states, wanted in zip(*chunks, strict=True):
            logits = denoiser.compute_token_logits(states).float()
            own = -cross_entropy(logits, wanted, reduction="none")
            token = logits.index_fill_(1, not_text, -math.inf).argmax(-1)
            parts.append(torch.stack([own, (token == wanted).float()]))
        values: FloatArray = to_host(torch.cat(parts, dim=1)).astype(np.float64)
    return np.split(values, np.cumsum([len(row.positions) for row in rows])[:-1], axis=1)
