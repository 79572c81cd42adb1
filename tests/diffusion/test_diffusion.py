"""Facts of the theory: the weight of a masked token, the forward process, the bound."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch

from dlm_rag.tokenizer import Prompt
from dlm_rag.training.batches import mask_at_time, mask_blocks_at_time
from dlm_rag.training.sources import sum_losses
from tests.support.tiny_models import tiny_denoiser

MASK = 256
NO_PROMPT = Prompt((), (), ())


def exact_nelbo(ids, mask_id, log_probs):
    """The NELBO in nats of one short sequence ids (n,), summed over all 2^n - 1 mask patterns.

    The same under every schedule with alpha from 1 to 0. With k of n tokens masked the integral over
    time of weight * (1 - alpha)^k alpha^(n - k) is the Beta function B(k, n - k + 1), by substitution
    of alpha for t. log_probs: ids (patterns, n) -> log-probabilities (patterns, n, V).
    """
    n = len(ids)
    patterns = torch.tensor(list(itertools.product((False, True), repeat=n))[1:])
    masked = torch.where(patterns, mask_id, ids)
    found = log_probs(masked).gather(-1, ids.expand_as(masked)[..., None]).squeeze(-1)
    counts = patterns.sum(-1).double()
    beta = (torch.lgamma(counts) + torch.lgamma(n - counts + 1) - torch.lgamma(torch.tensor(n + 1.0))).exp()
    return float(-(beta[:, None] * found.double() * patterns).sum())


def draw_rows(target, count):
    """Rows at times that are spread over the interval, one in each of its equal parts."""
    rng = np.random.default_rng(0)
    return [mask_at_time(NO_PROMPT, target, (n + rng.random()) / count, rng) for n in range(count)]


def test_a_token_is_masked_with_the_probability_of_its_time_and_weighted_by_its_inverse():
    for time in (0.0, 0.3, 0.999):
        row, t = mask_at_time(NO_PROMPT, [0] * 100_000, time, np.random.default_rng(0)), max(time, 1e-3)
        assert np.mean(row.masked) == pytest.approx(t, abs=0.01)
        assert row.weight == pytest.approx(1 / t, rel=0.01) and row.divisor == 100_000


def test_exact_nelbo_of_a_uniform_denoiser_is_n_log_v():
    uniform = lambda ids: torch.full((*ids.shape, 7), -math.log(7))  # noqa: E731
    assert exact_nelbo(torch.tensor([1, 2, 3, 4]), MASK, uniform) == pytest.approx(4 * math.log(7))


def test_monte_carlo_agrees_with_exact_enumeration():
    """Four tokens under a small random denoiser; 6,000 samples against all 15 mask patterns."""
    denoiser, ids = tiny_denoiser(), torch.tensor([5, 77, 200, 33])
    rows = draw_rows(ids.tolist(), 6000)
    with torch.no_grad():
        exact = exact_nelbo(ids, MASK, lambda x: denoiser(x).log_softmax(-1))
        means = torch.tensor([sum_losses(denoiser, rows[n::60], "joint") / 100 for n in range(60)])
    error = float(means.std()) / math.sqrt(len(means))
    assert float(means.mean()) == pytest.approx(exact, abs=4 * error) and error < 0.03 * exact


def predict_behind(denoiser, shown, block):
    """Log-probabilities (n, length, V) of blocks (n, length), each behind the tokens `shown`."""
    return denoiser(torch.cat((shown.expand(len(block), -1), block), 1))[:, len(shown) :].log_softmax(-1)


def test_the_bound_of_blocks_is_the_sum_over_blocks_each_given_those_before():
    """Five tokens in blocks of two, the last one short; against all mask patterns of each block."""
    denoiser, ids = tiny_denoiser(block_size=2), torch.tensor([5, 77, 200, 33, 9])
    rng = np.random.default_rng(0)
    with torch.no_grad():
        exact = 0.0
        for begin in range(0, 5, 2):
            shown = ids[:begin]
            exact += exact_nelbo(ids[begin : begin + 2], MASK, partial(predict_behind, denoiser, shown))
        means = []
        for part in range(60):
            times = ((part * 50 + n + rng.random()) / 3000 for n in range(50))
            rows = [
                r
                for time in times
                for r in mask_blocks_at_time(NO_PROMPT, ids.tolist(), time, rng, denoiser.config)
            ]
            means.append(sum_losses(denoiser, rows, "joint") / 50)
    error = float(np.std(means)) / math.sqrt(60)
    assert np.mean(means) == pytest.approx(exact, abs=4 * error) and error < 0.05 * exact
