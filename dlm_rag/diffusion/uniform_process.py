"""Uniform noise, the second process: a token is drawn anew from the whole vocabulary instead of masked.

With the schedules of `noise.py` a token of V that was drawn anew looks like any other:

    q(x_t | x_0) = alpha(t) x_0 + (1 - alpha(t)) / V

so every position is denoised. There are two things that a denoiser may say at one: what stood there first,
given all that stands now (the best under `nelbo.token_losses` at every position, with the same weight at
every time), and the same given the other positions alone (the best under the NELBO here). By Bayes the
first gives the token that stands there 1 + V alpha / (1 - alpha) times the odds that the second gives it.
"""

import torch
from torch import Tensor

from dlm_rag.diffusion.noise import NoiseSchedule


def add_uniform_noise(ids: Tensor, alpha: Tensor, vocabulary: int, generator: torch.Generator) -> Tensor:
    """The forward process: ids (..., n) stay with probability alpha (...,), else any of `vocabulary`
    tokens stands there, the same one too.
    """
    keep = torch.rand(ids.shape, generator=generator, dtype=torch.float64) < alpha[..., None]
    return torch.where(keep, ids, torch.randint(vocabulary, ids.shape, generator=generator))


def leave_one_out_logits(logits: Tensor, noisy: Tensor, t: Tensor, schedule: NoiseSchedule) -> Tensor:
    """Logits (..., n, V) given the other positions alone, made of such as go by the noisy token too.

    noisy, t (..., n): the token that stands there, and its time.
    """
    alpha = schedule.alpha(t)
    told = torch.log1p(logits.shape[-1] * alpha / (1 - alpha)).to(logits.dtype)
    return logits.scatter_add(-1, noisy[..., None], -told[..., None])


def uniform_nelbo(
    logits: Tensor, noisy: Tensor, targets: Tensor, t: Tensor, schedule: NoiseSchedule
) -> Tensor:
    """One Monte Carlo sample of the NELBO in nats of each token (..., n), but for rounding never below 0.

    logits (..., n, V) of what stood first where `noisy` (..., n) stands now and `targets` did; t (..., n):
    the time of each, below 1. The sum over a sequence has, over t uniform and noise, a mean that is never
    below -log p(x); under a schedule that does not end at 0 the divergence of q(x_1 | x_0) from uniform
    noise comes on top. Computed in float32 or more.

    Backward in time the noisy token i changes to j at a rate in proportion to q(j) / q(i); the bound
    compares these ratios under x_0, q, with those under the denoiser's probabilities, p. It is that of UDLM
    in continuous time (arXiv 2412.10193; also Duo, arXiv 2506.10892, and with scores SEDD, arXiv
    2310.16834), its sum over j rearranged so that large numbers do not cancel:

        -alpha' / (alpha V q(i)) * (KL(q || p) + q(i) / p(i) - 1 - log(q(i) / p(i)))
    """
    vocabulary, alpha, same = logits.shape[-1], schedule.alpha(t), noisy == targets
    probability = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    # q and p times V / (1 - alpha): 1 for a token that noise alone brings, 1 + odds for the first one.
    odds = (vocabulary * alpha / (1 - alpha)).to(probability.dtype)

    def of(tokens: Tensor) -> Tensor:
        return probability.gather(-1, tokens[..., None]).squeeze(-1)

    divergence = torch.special.xlog1py(1 + odds, odds) - odds * torch.log1p(odds * of(targets))
    divergence = divergence - torch.log1p(odds[..., None] * probability).sum(-1)
    excess = odds * (same.to(odds.dtype) - of(noisy)) / (1 + odds * of(noisy))  # q(i) / p(i) - 1
    scaled = divergence + vocabulary / (1 - alpha) * (excess - torch.log1p(excess))
    return -schedule.dalpha(t) / (vocabulary * alpha) / (1 + odds * same) * scaled
