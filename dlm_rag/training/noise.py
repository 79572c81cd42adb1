"""The forward process of masks and the losses of denoising (NELBO).

A token is still untouched at time t in [0, 1] with probability alpha(t) = 1 - t (the linear schedule of
LLaDA, arXiv 2502.09992). The continuous-time NELBO weights a masked token at time t by
-alpha'(t) / (1 - alpha(t)) = 1 / t (MDLM, arXiv 2406.07524, eq. 10).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def alpha(t: Tensor) -> Tensor:
    """The probability that a token is untouched at time t (...)."""
    return 1 - t


def weigh_masked(t: Tensor) -> Tensor:
    """What a masked token at time t (...) counts in the NELBO."""
    return 1 / (1 - alpha(t))


def sample_antithetic_times(count: int, generator: torch.Generator, lowest: float = 1e-3) -> Tensor:
    """`count` times (count,) in [lowest, 1], one in each of `count` equal parts of the interval.

    One uniform offset shifts them all (VDM, arXiv 2107.00630, appendix I.1): each is uniform, and
    together they vary less than independent ones.
    """
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    parts = (offset + torch.arange(count, dtype=torch.float64) / count) % 1
    return lowest + (1 - lowest) * parts


def mask_tokens(ids: Tensor, t: Tensor, mask_id: int, generator: torch.Generator) -> Tensor:
    """The forward process q(x_t | x_0): ids (..., n) stay with probability alpha(t) (...,), else mask."""
    keep = torch.rand(ids.shape, generator=generator, dtype=torch.float64) < alpha(t)[..., None]
    return torch.where(keep, ids, mask_id)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats (n,) of logits (n, V) at supervised positions, computed in float32."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


def nelbo(losses: Tensor, t: Tensor) -> Tensor:
    """One Monte Carlo sample of the NELBO in nats of each sequence.

    losses: (rows, n) cross-entropies, 0 where a token was not masked; t: (rows,) the time at which
    each row was masked. Its mean over t uniform and masks is the bound on -log p(x), never below it.
    """
    return weigh_masked(t) * losses.sum(dim=-1)
