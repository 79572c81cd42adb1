"""The forward process of masks, its schedules, and the losses of denoising (NELBO).

alpha(t) is the probability that a token is still untouched at time t in [0, 1]; it falls from 1 to 0.
The continuous-time NELBO weights a masked token at time t by -alpha'(t) / (1 - alpha(t)) (MDLM,
arXiv 2406.07524, eq. 10; LLaDA's 1 / t for the linear schedule).
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


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats (n,) of logits (n, V) at supervised positions, computed in float32."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


def nelbo(losses: Tensor, t: Tensor, schedule: NoiseSchedule) -> Tensor:
    """One Monte Carlo sample of the NELBO in nats of each sequence.

    losses: (rows, n) cross-entropies, 0 where a token was not masked; t: (rows,) the time at which
    each row was masked. Its mean over t uniform and masks is the bound on -log p(x), never below it.
    """
    return schedule.weight(t) * losses.sum(dim=-1)
