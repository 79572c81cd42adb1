"""The loss of masked diffusion: a bound on the negative log-likelihood, and its exact value."""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dlm_rag.diffusion.noise import NoiseSchedule


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats (n,) of logits (n, V) at supervised positions, computed in float32."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


def nelbo(losses: Tensor, t: Tensor, schedule: NoiseSchedule) -> Tensor:
    """One Monte Carlo sample of the NELBO in nats of each sequence.

    losses: (rows, n) cross-entropies, 0 where a token was not masked; t: (rows,) the time at which
    each row was masked. Its mean over t uniform and masks is the bound on -log p(x), never below it.
    """
    return schedule.weight(t) * losses.sum(dim=-1)


def exact_nelbo(ids: Tensor, mask_id: int, log_probs: Callable[[Tensor], Tensor]) -> float:
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
