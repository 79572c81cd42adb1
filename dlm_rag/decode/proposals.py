"""From logits to proposals: the token of each position, and how sure the denoiser is of it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Asked:
    """What is wanted of n positions; tensors lie on the device of the logits.

    spread: whether entropy and margin are wanted. written: (n,) the token that stands there now. mask_id:
    (1,), never proposed. temperature, uniform: (n,) float64, a temperature of 0 takes the most probable
    token; None where none samples.
    """

    spread: bool
    written: Tensor
    mask_id: Tensor
    temperature: Tensor | None = None
    uniform: Tensor | None = None

    def part(self, start: int, stop: int) -> "Asked":
        """The same of some of the positions."""
        temperature, uniform = (x if x is None else x[start:stop] for x in (self.temperature, self.uniform))
        return Asked(self.spread, self.written[start:stop], self.mask_id, temperature, uniform)


def read_proposals(logits: Tensor, asked: Asked) -> Tensor:
    """(6, n): token, confidence, log-probability, entropy, margin, and the probability of `written`.

    logits: (n, V) float32. The token is the most probable one, or with a temperature the one at the
    quantile `uniform` of softmax(logits / temperature); the mask itself is never proposed. Confidence is
    its probability at temperature 1. Entropy and margin cost a pass over the whole distribution: without
    `spread` they are 0.
    """
    # The largest weight is 1 and confidences near 1 stay apart, which log-sum-exp would round away.
    highest = logits.amax(-1, keepdim=True)
    weights = (logits - highest).exp_()
    total = weights.sum(-1)
    entropy = margin = torch.zeros_like(total)
    if asked.spread:
        probability = weights / total[:, None]
        entropy = torch.special.entr(probability).sum(-1)
        best = probability.topk(2, dim=-1).values
        margin = best[:, 0] - best[:, 1]
    allowed = logits.index_fill(1, asked.mask_id, -math.inf)
    token = allowed.argmax(-1)
    if asked.temperature is not None and asked.uniform is not None:
        sampled = _sample(allowed, asked.temperature.clamp(min=1e-300), asked.uniform)
        token = torch.where(asked.temperature > 0, sampled, token)
    at = (allowed.gather(1, token[:, None]) - highest).squeeze(1)
    log_prob = at - total.log()
    confidence, written = (
        weights.gather(1, ids[:, None]).squeeze(1) / total for ids in (token, asked.written)
    )
    # Token ids are exact in float32 below 2 ** 24; not every device has float64.
    return torch.stack([x.float() for x in (token, confidence, log_prob, entropy, margin, written)])


def _sample(allowed: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """The tokens (n,) at the quantiles `uniform` of the tempered distributions."""
    above = allowed.double() - allowed.amax(-1, keepdim=True)
    cumulative = (above / temperature[:, None]).softmax(-1).cumsum(-1)
    quantile = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, quantile).squeeze(1).clamp(max=allowed.shape[1] - 1)
