"""Facts of the theory of uniform noise: the forward process, and a bound that an exact denoiser meets.

Everything here is held against Bayes on all sequences of a tiny language: what `uniform_nelbo` says about
two tokens of three is summed over all canvases and integrated over time.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from dlm_rag.diffusion.noise import (
    NOISE_SCHEDULES,
    add_uniform_noise,
    leave_one_out_logits,
    sample_antithetic_times,
    token_losses,
    uniform_nelbo,
)
from dlm_rag.randomness import make_keyed_generator

V, N = 3, 2
CANVASES = torch.tensor(list(itertools.product(range(V), repeat=N)))  # (9, N), all that there are
# p(x) of each, of a language whose tokens depend on one another and in which some things are rare.
LANGUAGE = torch.tensor([0.30, 0.01, 0.14, 0.05, 0.02, 0.08, 0.20, 0.19, 0.01], dtype=torch.float64)
LINEAR = NOISE_SCHEDULES["linear"]
POOR = torch.randn(9, N, V, generator=torch.Generator().manual_seed(5), dtype=torch.float64).softmax(-1)


def forward(alpha):
    """q(z | x) (9 of x, 9 of z), token by token as the process is defined."""
    one = alpha * torch.eye(V, dtype=torch.float64) + (1 - alpha) / V
    return one[CANVASES[:, None], CANVASES[None]].prod(-1)


HERE = torch.nn.functional.one_hot(CANVASES, V).double()  # (9, N, V)


def posterior(alpha):
    """p(x_0 at a position | z) (9 of z, N, V) by Bayes: what cross-entropy learns."""
    joint = LANGUAGE[:, None] * forward(alpha)
    return torch.einsum("xz,xnv->znv", joint / joint.sum(0), HERE)


def exact_denoiser(alpha):
    """The same given the other position alone, of which there is one: what the NELBO learns."""
    one = alpha * torch.eye(V, dtype=torch.float64) + (1 - alpha) / V
    pairs = LANGUAGE.view(V, V)
    first, second = (pairs @ one).t(), pairs.t() @ one  # (z of the second, x of the first); (x, z)
    both = torch.stack([first[CANVASES[:, 1]], second.t()[CANVASES[:, 0]]], dim=1)
    return both / both.sum(-1, keepdim=True)


def poor_denoiser(alpha):
    """One that knows nothing of language and time."""
    return POOR


def bounds(denoiser, schedule):
    """The NELBO (9,) of each sequence: over all canvases exactly, over time by Gauss and Legendre."""
    shape, total = (len(CANVASES), len(CANVASES), N), 0.0  # x, z, position
    noisy, first = CANVASES.expand(shape), CANVASES[:, None].expand(shape)
    for point, weight in zip(*np.polynomial.legendre.leggauss(100), strict=True):
        t = torch.tensor((point + 1) / 2, dtype=torch.float64)
        alpha = schedule.alpha(t)
        logits = denoiser(alpha).log().expand(*shape, V)
        found = uniform_nelbo(logits, noisy, first, t.expand(shape), schedule)
        total = total + weight / 2 * (forward(alpha) * found.sum(-1)).sum(1)
    return total


def prior_divergence(alpha):
    """KL of q(x_1 | x_0) from uniform noise, of a sequence: 0 where the schedule ends at 0."""
    q = forward(alpha)[0]
    return float((q * (q * len(CANVASES)).log()).sum())


@pytest.mark.parametrize("name", NOISE_SCHEDULES)
def test_an_exact_denoiser_meets_the_likelihood_of_every_sequence(name):
    schedule = NOISE_SCHEDULES[name]
    end = prior_divergence(schedule.alpha(torch.ones((), dtype=torch.float64)))
    found = bounds(exact_denoiser, schedule)
    torch.testing.assert_close(found + end, -LANGUAGE.log(), atol=2e-3, rtol=0)


def test_the_bound_is_a_bound():
    """Whatever the denoiser: what it claims of all sequences is together at most 1, so no language is
    described with fewer nats than its entropy.
    """
    claimed = (-bounds(poor_denoiser, LINEAR)).exp()
    assert 0.5 < float(claimed.sum()) < 1
    assert float((-bounds(exact_denoiser, LINEAR)).exp().sum()) == pytest.approx(1, abs=1e-3)


def discrete_bound(denoiser, steps):
    """The ELBO of `steps` steps (9,): KLs between reverse transitions made of matrices alone.

    Nothing of the continuous one is in it: q(z_s | z_t, x_0) by Bayes on single tokens (D3PM, arXiv
    2107.03006, eq. 3), with what the denoiser says in place of x_0; the last step is read out.
    """
    eye, grid = torch.eye(V, dtype=torch.float64), torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    total = torch.zeros(len(CANVASES), dtype=torch.float64)
    for s, t in itertools.pairwise(grid):
        alpha_s, alpha_t = LINEAR.alpha(s), LINEAR.alpha(t)
        between = alpha_t / alpha_s  # of one token from s to t
        step = between * eye + (1 - between) / V  # z_s -> z_t
        until = alpha_s * eye + (1 - alpha_s) / V  # x_0 -> z_s

        def reverse(x, step=step, until=until):  # of x_0 (..., V) -> (..., z_t, z_s)
            joint = (x @ until)[..., None, :] * step.t()
            return joint / joint.sum(-1, keepdim=True)

        here = CANVASES[:, :, None, None].expand(-1, -1, 1, V)
        believed = reverse(denoiser(alpha_t)).gather(2, here).squeeze(2)  # (z, N, V of z_s)
        true = reverse(eye)[CANVASES[:, None], CANVASES[None]]  # (x, z, N, V of z_s)
        if s == 0:
            read = believed.expand_as(true).gather(-1, CANVASES[:, None, :, None].expand(-1, 9, -1, 1))
            lost = -read.log().sum((-1, -2))
        else:
            lost = (true * (true / believed).log()).sum((-1, -2))
        total = total + (forward(alpha_t) * lost).sum(1)
    return total


@pytest.mark.parametrize("denoiser", [exact_denoiser, poor_denoiser])
def test_the_elbo_of_many_steps_comes_down_to_it(denoiser):
    """Its distance is in proportion to one over the number of steps."""
    limit = bounds(denoiser, LINEAR)
    few, many = ((discrete_bound(denoiser, steps) - limit).abs() for steps in (100, 800))
    assert float(many.max()) < 0.03 and float(many.sum()) < float(few.sum()) / 5


def test_its_gradient_is_that_of_the_elbo_of_many_steps():
    logits = poor_denoiser(0).log().requires_grad_()

    def gradient(bound):
        total = (LANGUAGE * bound(lambda alpha: logits.softmax(-1))).sum()
        return torch.autograd.grad(total, logits)[0]

    found, discrete = gradient(lambda d: bounds(d, LINEAR)), gradient(lambda d: discrete_bound(d, 800))
    torch.testing.assert_close(found, discrete, atol=0.01 * float(discrete.abs().max()), rtol=0)


def test_at_the_exact_denoiser_the_mean_gradient_is_zero():
    """In each canvas at each time: what makes the exact denoiser the best there is."""
    for alpha in torch.tensor([0.02, 0.5, 0.9, 0.999], dtype=torch.float64):
        logits = exact_denoiser(alpha).log().requires_grad_()
        shape = (len(CANVASES), len(CANVASES), N)
        found = uniform_nelbo(
            logits.expand(*shape, V), CANVASES.expand(shape), CANVASES[:, None].expand(shape),
            (1 - alpha).expand(shape), LINEAR,
        )  # fmt: skip
        (slope,) = torch.autograd.grad(
            (LANGUAGE[:, None, None] * forward(alpha)[..., None] * found).sum(), logits
        )
        assert float(slope.abs().max()) < 1e-12


@pytest.mark.parametrize("name", NOISE_SCHEDULES)
def test_a_uniform_denoiser_has_a_nelbo_of_log_v_per_token(name):
    """As under masks, by sampling: times, then noise, then the mean."""
    schedule, count, vocabulary = NOISE_SCHEDULES[name], 100_000, 50
    generator = make_keyed_generator(0, 0)
    t, targets = sample_antithetic_times(count, generator), torch.zeros(count, dtype=torch.long)
    noisy = add_uniform_noise(targets[:, None], schedule.alpha(t), vocabulary, generator).squeeze(1)
    found = uniform_nelbo(torch.zeros(count, vocabulary), noisy, targets, t, schedule)
    assert (found >= -1e-5).all()
    assert float(found.mean()) == pytest.approx(math.log(vocabulary), rel=0.02)


def test_numbers_at_the_ends_of_time_are_those_of_float64():
    """A large vocabulary, almost no noise and almost nothing else, in float32."""
    vocabulary, generator = 4096, torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(6, vocabulary, generator=generator)
    targets = torch.arange(6)
    noisy = torch.tensor([0, 1, 2, 100, 101, 102])
    for time in (1e-3, 1 - 1e-3, 1 - 1e-7):
        t = torch.full((6,), time, dtype=torch.float64)
        low, high = (uniform_nelbo(x, noisy, targets, t, LINEAR) for x in (logits, logits.double()))
        torch.testing.assert_close(low.double(), high, rtol=1e-3, atol=1e-3)
        assert (low >= -1e-3).all()


def test_the_forward_process_draws_anew_with_probability_one_minus_alpha():
    ids = torch.full((3, 100_000), 7)
    found = add_uniform_noise(ids, torch.tensor([1.0, 0.7, 0.0]), 10, make_keyed_generator(0, 0))
    counts = torch.stack([row.bincount(minlength=10) for row in found]) / 100_000
    drawn = (torch.tensor([0.0, 0.3, 1.0]) / 10)[:, None].expand(3, 10).clone()
    drawn[:, 7] += torch.tensor([1.0, 0.7, 0.0])
    torch.testing.assert_close(counts, drawn, atol=0.005, rtol=0)
    again = add_uniform_noise(ids, torch.tensor([1.0, 0.7, 0.0]), 10, make_keyed_generator(0, 0))
    assert torch.equal(found, again)


def test_cross_entropy_is_least_at_the_posterior():
    """At every position, changed or not, of canvases at one time."""
    alpha = torch.tensor(0.6, dtype=torch.float64)
    weights = LANGUAGE[:, None] * forward(alpha)  # (x, z)
    logits = posterior(alpha).log().requires_grad_()
    every = logits.expand(9, 9, N, V).reshape(-1, V)
    losses = token_losses(every, CANVASES[:, None].expand(9, 9, N).reshape(-1)).view(9, 9, N)
    (slope,) = torch.autograd.grad((weights[..., None] * losses).sum(), logits)
    assert float(slope.abs().max()) < 1e-6


def test_what_the_others_tell_is_made_of_the_posterior():
    """Two ways to the same denoiser: by Bayes from all positions, and from the other one alone."""
    for t in torch.tensor([0.01, 0.4, 0.9], dtype=torch.float64):
        alpha = LINEAR.alpha(t)
        made = leave_one_out_logits(posterior(alpha).log(), CANVASES, t.expand(CANVASES.shape), LINEAR)
        torch.testing.assert_close(made.softmax(-1), exact_denoiser(alpha))
