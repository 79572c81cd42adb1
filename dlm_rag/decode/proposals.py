"""From logits to proposals: the token of each position, and how sure the denoiser is of it."""

import math

import torch
from torch import Tensor


def read_proposals(
    logits: Tensor, uniform: Tensor | None, temperature: float, written: Tensor, mask_id: int, spread: bool
) -> Tensor:
    """(6, n): token, confidence, entropy, margin, probability of `written`, log-probability of the token.

    logits: (n, V) float32. The token is the most probable one, or with `temperature` the one at the
    quantile `uniform` (n,) of softmax(logits / temperature); the mask itself is never proposed. Its
    confidence is its probability at temperature 1; the log-probability is that in nats, finite where the
    probability underflows. Entropy and margin cost a pass over the whole distribution: without `spread`
    they are 0.
    """
    # The largest weight is 1 and confidences near 1 stay apart, which log-sum-exp would round away.
    highest = logits.amax(-1, keepdim=True)
    weights = (logits - highest).exp_()
    total = weights.sum(-1)
    entropy = margin = torch.zeros_like(total)
    if spread:
        probability = weights / total[:, None]
        entropy = torch.special.entr(probability).sum(-1)
        best = probability.topk(2, dim=-1).values
        margin = best[:, 0] - best[:, 1]
    allowed = logits.index_fill(1, torch.tensor([mask_id], device=logits.device), -math.inf)
    token = allowed.argmax(-1)
    if uniform is not None:
        above = allowed.double() - allowed.amax(-1, keepdim=True)
        cumulative = (above / temperature).softmax(-1).cumsum(-1)
        quantile = uniform.to(logits.device)[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, quantile).squeeze(1).clamp(max=logits.shape[1] - 1)
    confidence, old = (
        weights.gather(1, ids[:, None]).squeeze(1) / total for ids in (token, written.to(logits.device))
    )
    log_prob = logits.gather(1, token[:, None]).squeeze(1) - highest.squeeze(1) - total.log()
    # Token ids are exact in float32 below 2 ** 24; not every device has float64.
    return torch.stack([x.float() for x in (token, confidence, entropy, margin, old, log_prob)])
