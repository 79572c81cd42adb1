"""From logits to proposals: the token of each position, and how sure the denoiser is of it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_rag.diffusion.commit_rules import ACTION_STATISTICS, STATISTICS
from dlm_rag.diffusion.policy import SoftThreshold, draw_actions, sample_at_quantile


@dataclass(frozen=True)
class SamplingMetadata:
    """What is wanted of n positions; tensors lie on the device of the logits.

    mask_id: (1,), never proposed. current_ids: (n,) the token that stands there now. sampled_index: (m,)
    which positions take a token at random, at the quantile `quantiles` (m,) of the distribution at
    `temperature` (m,), above 0; the others take the most probable one. entropy_index: (s,) of which
    positions entropy and margin are wanted. policy_index: (k,) for which positions a policy draws, None
    where there is none in the call; policy_params: (5, k) its temperature, threshold and width, and the
    two quantiles that it draws at.
    """

    mask_id: Tensor
    current_ids: Tensor
    sampled_index: Tensor
    temperature: Tensor
    quantiles: Tensor
    entropy_index: Tensor
    policy_index: Tensor | None = None
    policy_params: Tensor | None = None


def sample_proposals(logits: Tensor, wanted: SamplingMetadata) -> Tensor:
    """A row (n,) for each of `STATISTICS`, then, where a policy draws, for each of `ACTION_STATISTICS`.

    logits: (n, V) float32. The mask itself is never proposed. Confidence is a token's probability at
    temperature 1, whatever it was sampled at; the log-probability is finite where that underflows. Entropy
    and margin cost a pass over the whole distribution, and are 0 where nobody wants them.
    """
    # The largest weight is 1 and confidences near 1 stay apart, which log-sum-exp would round away.
    highest = logits.amax(-1, keepdim=True)
    weights = (logits - highest).exp_()
    total = weights.sum(-1)
    entropy, margin = torch.zeros_like(total), torch.zeros_like(total)
    if len(wanted.entropy_index):
        probability = weights[wanted.entropy_index] / total[wanted.entropy_index, None]
        best = probability.topk(2, dim=-1).values
        entropy.index_copy_(0, wanted.entropy_index, torch.special.entr(probability).sum(-1))
        margin.index_copy_(0, wanted.entropy_index, best[:, 0] - best[:, 1])
    allowed = logits.index_fill(1, wanted.mask_id, -math.inf)
    token = allowed.argmax(-1)
    if len(wanted.sampled_index):
        found = _sample(allowed[wanted.sampled_index], wanted.temperature, wanted.quantiles)
        token = token.index_copy(0, wanted.sampled_index, found)
    log_prob = (allowed.gather(1, token[:, None]) - highest).squeeze(1) - total.log()
    confidence, written = (
        weights.gather(1, ids[:, None]).squeeze(1) / total for ids in (token, wanted.current_ids)
    )
    # Token ids are exact in float32 below 2 ** 24; not every device has float64.
    rows = {"token_ids": token, "confidence": confidence, "log_prob": log_prob, "entropy": entropy}
    rows |= {"margin": margin, "current_prob": written}
    found = torch.stack([rows[name].float() for name in STATISTICS])
    if wanted.policy_index is None or wanted.policy_params is None:
        return found
    draws = found.new_zeros(len(ACTION_STATISTICS), len(logits))
    if len(wanted.policy_index):
        temperature, threshold, width, uniform, forced = wanted.policy_params
        soft = SoftThreshold(temperature, threshold, width)
        draws[:, wanted.policy_index] = draw_actions(
            logits[wanted.policy_index], wanted.mask_id, soft, uniform, forced
        )
    return torch.cat((found, draws))


def _sample(allowed: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """The tokens (m,) at the quantiles `uniform` of the tempered distributions."""
    above = allowed - allowed.amax(-1, keepdim=True)
    exact = above if above.device.type == "mps" else above.double()
    return sample_at_quantile(exact / temperature[:, None].to(exact.dtype), uniform)
