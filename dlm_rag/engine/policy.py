"""Stochastic policies over a denoising step: how likely it is to stay masked, or to commit a token.

An action of a step is, at each of its candidate positions by themselves, to stay or to commit token y:

    P(commit y) = pi(y) g(y)        pi = softmax(z / T)                       z: the logits
    P(stay) = sum_y pi(y) (1 - g(y))    g(y) = sigmoid((logit c(y) - logit tau) / w),  c = softmax(z)

If all stay, one position is drawn by softmax of logit c_max / w, and its token by pi: that is forced. For
w, T -> 0 this is `select_by_threshold`, ties aside. Everything is exact: outcomes sum to 1, so the mean
of the score is 0 (REINFORCE, Williams 1992).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

# log-probabilities above this are that of a token that is certain: 1 - c is rounding there
MAX_LOG_CONFIDENCE = -1e-6


@dataclass(frozen=True)
class SoftThreshold:
    """The numbers of a soft threshold: floats, or (n,) one for each position."""

    temperature: Tensor | float  # T, above 0
    threshold: Tensor | float  # tau, between 0 and 1
    width: Tensor | float  # w, above 0, in units of the logit


@dataclass(frozen=True)
class ActionDistribution:
    """What may happen at n positions, in nats."""

    log_pi: Tensor  # (n, V) of the token alone: minus infinity for the mask
    log_commit: Tensor  # (n, V)
    log_stay: Tensor  # (n,)
    forced_logit: Tensor  # (n,) logit c_max / w: by its softmax the forced position is drawn

    def entropy(self) -> Tensor:
        """Entropy (n,) over the V + 1 outcomes of each position."""
        return torch.special.entr(self.log_commit.exp()).sum(-1) + torch.special.entr(self.log_stay.exp())


def compute_action_distribution(
    logits: Tensor, excluded_ids: Tensor, soft: SoftThreshold
) -> ActionDistribution:
    """The outcomes at positions with these logits (n, V), float32 or more.

    excluded_ids: (e,) tokens that are never drawn.
    """

    def each(value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(logits.dtype)[:, None]
        return logits.new_full((len(logits), 1), value)  # made on the device: what is sent is waited for

    threshold, width = each(soft.threshold), each(soft.width)
    log_pi = (logits.index_fill(1, excluded_ids, -math.inf) / each(soft.temperature)).log_softmax(-1)
    log_c = logits.log_softmax(-1).clamp(max=MAX_LOG_CONFIDENCE)
    odds = log_c - torch.log(-torch.expm1(log_c))  # logit c
    gate = (odds - torch.logit(threshold)) / width
    return ActionDistribution(
        log_pi,
        log_pi + logsigmoid(gate),
        (log_pi + logsigmoid(-gate)).logsumexp(-1),
        odds.index_fill(1, excluded_ids, -math.inf).amax(-1) / width[:, 0],
    )


def gather_action_log_probs(found: ActionDistribution, taken: Tensor) -> Tensor:
    """Of what was done at n positions (4, n): the log-probability of committing `taken`, of staying; the
    urge; the log-probability of `taken` under pi. taken (n,): a token, -1 where the position stayed.
    """
    n, token = torch.arange(len(taken), device=taken.device), taken.clamp(min=0)
    commit, log_pi = found.log_commit[n, token], found.log_pi[n, token]
    return torch.stack((commit, found.log_stay, found.forced_logit, log_pi))


def step_log_prob(parts: Tensor, step: Tensor, took: Tensor, forced: Tensor) -> Tensor:
    """The log-probability (S,) of the actions of S steps, in nats.

    parts (4, n): `gather_action_log_probs` at all candidates. step (n,): which step each is a candidate
    of, from 0. took (n,): whether it committed a token. forced (S,): whether what the step took was forced.
    """
    commit, stay, urge, log_pi = parts
    must, steps = forced[step], len(forced)
    # The logsumexp of the urges of each step, taken off its highest.
    highest = urge.new_full((steps,), -math.inf).scatter_reduce(0, step, urge.detach(), "amax")[step]
    total = urge.new_zeros(steps).index_add(0, step, (urge - highest).exp())
    drawn = urge - highest - total.log()[step] + log_pi
    each = torch.where(took & ~must, commit, stay) + torch.where(took & must, drawn, 0.0)
    return stay.new_zeros(steps).index_add(0, step, each)


def draw_actions(
    logits: Tensor, excluded_ids: Tensor, soft: SoftThreshold, uniform: Tensor, forced: Tensor
) -> dict[str, Tensor]:
    """Draws for positions with logits (n, V), at the quantiles `uniform` (n,) and `forced` (n,).

    Returns by name (n,) the drawn token, its log c, its gate, the log-probability of committing it; that of
    staying; the urge; the token to be forced, its log c and log-probability under pi.
    """
    found = compute_action_distribution(logits, excluded_ids, soft)
    rows = torch.arange(len(logits), device=logits.device)
    token, other = (sample_at_quantile(found.log_pi, at) for at in (uniform, forced))
    log_c = logits.log_softmax(-1)
    gate = (found.log_commit[rows, token] - found.log_pi[rows, token]).exp()
    return {
        "drawn_token_ids": token,
        "drawn_log_confidence": log_c[rows, token],
        "gate": gate,
        "log_commit": found.log_commit[rows, token],
        "log_stay": found.log_stay,
        "forced_logit": found.forced_logit,
        "forced_token_ids": other,
        "forced_log_confidence": log_c[rows, other],
        "forced_log_prob": found.log_pi[rows, other],
    }


def sample_at_quantile(log_prob: Tensor, uniform: Tensor) -> Tensor:
    """The tokens (n,) at the quantiles `uniform` (n,) of distributions (n, V), given up to a factor."""
    exact = torch.float32 if log_prob.device.type == "mps" else torch.float64  # which MPS does not have
    cumulative = log_prob.to(exact).softmax(-1).cumsum(-1)
    at = uniform[:, None].to(exact) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, at).squeeze(1).clamp(max=log_prob.shape[1] - 1)
