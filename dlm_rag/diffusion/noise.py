"""Forward processes of masks and of uniform noise, their schedules, and the losses of both (NELBO).

alpha(t) is the probability that a token is still untouched at time t in [0, 1]; it falls from 1 to 0.
Of masks the continuous-time NELBO weights a masked token at time t by -alpha'(t) / (1 - alpha(t)) (MDLM,
arXiv 2406.07524, eq. 10; LLaDA's 1 / t for the linear schedule).

Of uniform noise a token is drawn from the whole vocabulary of V instead, and looks like any other:

    q(x_t | x_0) = alpha(t) x_0 + (1 - alpha(t)) / V

so every position is denoised. A denoiser may predict what was there first given all that is there now (the
minimum of `token_losses` at every position, with the same weight at every time), or given the other
positions alone (the minimum of `uniform_nelbo`). By Bayes the first gives the token that is there now
1 + V alpha / (1 - alpha) times the odds that the second gives it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class NoiseSchedule:
    """alpha and its derivative, both functions of t (...) in [0, 1], elementwise."""

    alpha: Callable[[Tensor], Tensor]
    dalpha: Callable[[Tensor], Tensor]

    def weight(self, t: Tensor) -> Tensor:
        """-alpha'(t) / (1 - alpha(t)): what a masked token at time t counts in the NELBO."""
        return -self.dalpha(t) / (1 - self.alpha(t))


LOG_LINEAR_END = 1e-3  # alpha(1) of MDLM's schedule; its sigma(t) = -log(1 - (1 - 1e-3) t)

NOISE_SCHEDULES = {
    # LLaDA (arXiv 2502.09992): alpha = 1 - t.
    "linear": NoiseSchedule(lambda t: 1 - t, lambda t: torch.full_like(t, -1.0)),
    # MDLM's log-linear: alpha = exp(-sigma(t)), which is linear but ends at 1e-3.
    "log_linear": NoiseSchedule(
        lambda t: 1 - (1 - LOG_LINEAR_END) * t, lambda t: torch.full_like(t, LOG_LINEAR_END - 1)
    ),
    # Slow at first, fast at the end: alpha = cos(pi t / 2).
    "cosine": NoiseSchedule(
        lambda t: torch.cos(math.pi / 2 * t), lambda t: -math.pi / 2 * torch.sin(math.pi / 2 * t)
    ),
}


def sample_antithetic_times(count: int, generator: torch.Generator, lowest: float = 1e-3) -> Tensor:
    """`count` times (count,) in [lowest, 1], one in each of `count` equal parts of the interval.

    One uniform offset shifts them all (VDM, arXiv 2107.00630, appendix I.1): each is uniform, and
    together they vary less than independent ones.
    """
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    parts = (offset + torch.arange(count, dtype=torch.float64) / count) % 1
    return lowest + (1 - lowest) * parts


def mask_tokens(ids: Tensor, alpha: Tensor, mask_id: int, generator: torch.Generator) -> Tensor:
    """The forward process q(x_t | x_0): ids (..., n) stay with probability alpha (...,), else mask."""
    keep = torch.rand(ids.shape, generator=generator, dtype=torch.float64) < alpha[..., None]
    return torch.where(keep, ids, mask_id)


def add_uniform_noise(ids: Tensor, alpha: Tensor, vocabulary: int, generator: torch.Generator) -> Tensor:
    """The second forward process: ids (..., n) stay with probability alpha (...,), else any of `vocabulary`
    tokens is drawn, maybe the same one.
    """
    keep = torch.rand(ids.shape, generator=generator, dtype=torch.float64) < alpha[..., None]
    return torch.where(keep, ids, torch.randint(vocabulary, ids.shape, generator=generator))


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats (n,) of logits (n, V) at supervised positions, computed in float32."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


def nelbo(losses: Tensor, t: Tensor, schedule: NoiseSchedule) -> Tensor:
    """One Monte Carlo sample of the NELBO in nats of each sequence.

    losses: (rows, n) cross-entropies, 0 where a token was not masked; t: (rows,) the time at which
    each row was masked. Its mean over t uniform and masks is the bound on -log p(x), never below it.
    """
    return schedule.weight(t) * losses.sum(dim=-1)


def leave_one_out_logits(logits: Tensor, noisy: Tensor, t: Tensor, schedule: NoiseSchedule) -> Tensor:
    """Logits (..., n, V) given the other positions alone, from logits given all of them.

    noisy, t (..., n): the token that stands there, and its time.
    """
    alpha = schedule.alpha(t)
    known = torch.log1p(logits.shape[-1] * alpha / (1 - alpha)).to(logits.dtype)
    return logits.scatter_add(-1, noisy[..., None], -known[..., None])


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
