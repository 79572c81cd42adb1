"""Facts of the theory: the weight of a masked token, the forward process, the bound."""

import itertools
import math

import pytest
import torch

from dlm_rag.randomness import make_keyed_generator
from dlm_rag.training.losses import (
    mask_tokens,
    nelbo,
    sample_antithetic_times,
    token_losses,
    weigh_masked,
)
from tests.support.tiny_models import tiny_denoiser

MASK = 256


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


def test_the_linear_weight_is_one_over_t():
    t = torch.tensor([0.1, 0.5, 1.0])
    torch.testing.assert_close(weigh_masked(t), 1 / t)


def test_a_uniform_denoiser_has_a_nelbo_of_log_v_per_token():
    """Each token is masked with probability 1 - alpha, so the weighted mean is the integral of -alpha'."""
    rows, n, vocabulary = 40_000, 8, 50
    generator = make_keyed_generator(0, 0)
    t = sample_antithetic_times(rows, generator)
    masked = mask_tokens(torch.zeros(rows, n, dtype=torch.long), t, MASK, generator) == MASK
    losses = masked * math.log(vocabulary)
    per_token = float(nelbo(losses, t).mean()) / n
    assert per_token == pytest.approx(math.log(vocabulary), rel=0.02)


def test_exact_nelbo_of_a_uniform_denoiser_is_n_log_v():
    uniform = lambda ids: torch.full((*ids.shape, 7), -math.log(7))  # noqa: E731
    assert exact_nelbo(torch.tensor([1, 2, 3, 4]), MASK, uniform) == pytest.approx(4 * math.log(7))


def test_monte_carlo_agrees_with_exact_enumeration():
    """Four tokens under a small random denoiser; 6,000 samples against all 15 mask patterns."""
    denoiser = tiny_denoiser()
    ids, rows = torch.tensor([5, 77, 200, 33]), 6000
    with torch.no_grad():
        exact = exact_nelbo(ids, MASK, lambda x: denoiser(x).log_softmax(-1))
        generator = make_keyed_generator(1, 0)
        t = sample_antithetic_times(rows, generator)
        x = mask_tokens(ids.expand(rows, -1), t, MASK, generator)
        losses = token_losses(denoiser(x).flatten(0, 1), ids.repeat(rows)).view(rows, -1) * (x == MASK)
    samples = nelbo(losses, t)
    error = float(samples.std()) / math.sqrt(rows)
    assert float(samples.mean()) == pytest.approx(exact, abs=4 * error) and error < 0.03 * exact


def test_the_bound_is_a_bound():
    """A denoiser that gives an autoregressive model's probabilities cannot beat -log p."""
    ids = torch.tensor([0, 1])
    joint = torch.tensor([[0.5, 0.2], [0.1, 0.2]])  # p(a, b), the model's p_theta from its conditionals

    def log_probs(x):
        out = torch.zeros(len(x), 2, 2)
        for row, (a, b) in enumerate(x.tolist()):
            out[row, 0] = joint.sum(1) if b == MASK else joint[:, b] / joint[:, b].sum()
            out[row, 1] = joint.sum(0) if a == MASK else joint[a] / joint[a].sum()
        return out.log()

    assert exact_nelbo(ids, MASK, log_probs) == pytest.approx(-math.log(0.2), rel=1e-5), "tight: consistent"


def test_antithetic_times_cover_the_interval_and_each_is_uniform():
    times = sample_antithetic_times(10, make_keyed_generator(0, 3), lowest=0.0)
    assert sorted((times * 10).long().tolist()) == list(range(10))
    first = torch.stack(
        [sample_antithetic_times(4, make_keyed_generator(0, n), 0.0)[0] for n in range(2000)]
    )
    assert float(first.mean()) == pytest.approx(0.5, abs=0.03)


def test_antithetic_times_estimate_with_less_variance():
    def estimates(draw):
        return torch.stack([draw(make_keyed_generator(0, n)).cos().mean() for n in range(500)]).var()

    assert estimates(lambda g: sample_antithetic_times(8, g)) < 0.2 * estimates(
        lambda g: torch.rand(8, generator=g)
    )


def test_noise_depends_on_the_sample_alone():
    ids, time = torch.arange(20), torch.tensor(0.5)
    first = mask_tokens(ids, time, MASK, make_keyed_generator(3, 17))
    torch.manual_seed(99)
    assert torch.equal(first, mask_tokens(ids, time, MASK, make_keyed_generator(3, 17)))
    assert not torch.equal(first, mask_tokens(ids, time, MASK, make_keyed_generator(3, 18)))
    assert not torch.equal(first, mask_tokens(ids, time, MASK, make_keyed_generator(4, 17)))


def test_the_forward_process_masks_with_the_probability_of_its_time():
    ids = torch.zeros(3, 100_000, dtype=torch.long)
    masked = mask_tokens(ids, torch.tensor([0.0, 0.3, 1.0]), MASK, make_keyed_generator(0, 0)) == MASK
    assert masked.float().mean(-1).tolist() == pytest.approx([0.0, 0.3, 1.0], abs=0.01)
