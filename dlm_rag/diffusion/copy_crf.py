"""Tokens of neighbouring positions, made to agree: the marginals of a chain that copies.

A denoiser proposes for every masked position by itself. Where tokens are copied from texts, those beside
each other there belong together: "Kasthuri" and "Raja", not "Kasthuri" and the "Bharathi" of another
passage. So every position is thought of as copied from a place of the texts, or as free; beside the
probabilities p_i of the denoiser there is a price for leaving the thread, and for being free:

    P(z) ~ prod_i p_i(token of z_i) exp(-price [z_i is free]) prod_i T(z_i, z_i+1)
    T(j, k) = w / m_k + (1 - exp(-price)) [k is the place behind j]

where m_k places hold the token of k, and w is 1 for a jump that costs nothing (from and to what is free,
from the end of a piece, to what may follow anything), else exp(-price). With a price of 0 the chain changes
nothing. What is proposed are the marginals of tokens, by the forward-backward algorithm: a linear-chain
random field behind a parallel decoder (Sun et al., arXiv 1910.11555), with the texts at hand in place of
learned transitions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class CopyCRF:
    """Chains of r rows, none longer than l positions, each with at most u places in the row's own texts.

    tokens: (r, u) their ids; inverse_count: (r, u) 1 / m, 0 for places of the table that are not in use.
    continues: (r, u) places that follow the one before them. may_end: (r, u) tokens behind which a piece
    may end, is_separator: (r, u) tokens that may follow any; a jump from an end to a joint costs, as one
    from neither to neither. query_index: (3, m) of the positions with logits which they are, of which row,
    and in which row of the logits. At the others stands the token `fixed_tokens` (l, r), or, where
    `unknown` (l, r), nothing. penalty: (r,) nats.
    """

    tokens: Tensor
    inverse_count: Tensor
    continues: Tensor
    may_end: Tensor
    is_separator: Tensor
    query_index: Tensor
    unknown: Tensor
    fixed_tokens: Tensor
    penalty: Tensor


def apply_copy_crf(logits: Tensor, chains: CopyCRF) -> Tensor:
    """Logits (n, V), float32, of which those that a chain has are replaced by logarithms of its marginals.

    Sums are in float64 (but on devices without it): in which order they are made depends on the other rows,
    and is lost when the result is rounded.
    """
    at, row, rows = chains.query_index
    # One column more takes what the places of the table that are not in use would write.
    columns = torch.where(chains.inverse_count > 0, chains.tokens, logits.shape[1])[row]
    alone = pad(logits[rows].log_softmax(-1), (0, 1), value=-torch.inf)
    free = alone.scatter(1, columns, -torch.inf).logsumexp(-1, keepdim=True)
    states = torch.cat((alone.gather(1, columns), free - chains.penalty[row, None]), dim=1)
    emissions = _fixed_emissions(chains)
    emissions[at, row] = (states - states.amax(-1, keepdim=True)).exp().to(emissions.dtype)
    found = _forward_backward(emissions, chains)[at, row]
    found = found / found.sum(-1, keepdim=True)
    copied = found.new_zeros(alone.shape).scatter_add_(1, columns, found[:, :-1]).log().float()
    others = alone + (found[:, -1:].log().float() - free)
    is_copied = torch.zeros_like(alone, dtype=torch.bool).scatter_(1, columns, True)
    return logits.index_copy(0, rows, torch.where(is_copied, copied, others)[:, :-1])


def estimate_crf_bytes(vocabulary: int, places: int) -> tuple[int, int]:
    """Bytes that `apply_copy_crf` takes at most: for a position that is asked about, and for every
    position of a
    chain, whose row has so many places."""
    return 32 * (vocabulary + 1) + 24 * (places + 1), 40 * (places + 1)


def _fixed_emissions(chains: CopyCRF) -> Tensor:
    """(l, r, u + 1): 1 for what may stand where nothing is asked; the last place is that of free tokens."""
    stands = (chains.fixed_tokens[:, :, None] == chains.tokens) & (chains.inverse_count > 0)
    of_none = ~stands.any(-1, keepdim=True)
    unknown = chains.unknown[:, :, None]
    given = torch.cat((stands & ~unknown, of_none | unknown), dim=-1)
    return given.float() if given.device.type == "mps" else given.double()


def _forward_backward(emissions: Tensor, chains: CopyCRF) -> Tensor:
    """(l, r, u + 1): probabilities, up to a factor for each position."""
    share, follows = chains.inverse_count.to(emissions.dtype), chains.continues[:, 1:].to(emissions.dtype)
    ends, joints, one = chains.may_end, chains.is_separator, torch.ones_like(share[:, :1])
    cost = torch.exp(-chains.penalty.to(emissions.dtype))[:, None]
    before, behind = torch.ones_like(emissions), torch.ones_like(emissions)

    def jumps(mass: Tensor, leaving: Tensor, entering: Tensor) -> Tensor:
        """What reaches (r, u) from (r, u) and the free place, each jump as it costs."""
        among, free = mass[:, :-1], mass[:, -1:]
        every = among.sum(-1, keepdim=True)
        left = (among * leaving).sum(-1, keepdim=True)
        costless = torch.where(entering, every - left, left)
        return cost * (every - costless) + costless + free

    for i in range(1, len(emissions)):
        state = emissions[i - 1] * before[i - 1]
        state = state / state.sum(-1, keepdim=True)
        reached = share * jumps(state, ends, joints)
        reached[:, 1:] += (1 - cost) * follows * state[:, :-2]
        before[i] = torch.cat((reached, one), dim=1)
    for i in reversed(range(len(emissions) - 1)):
        state = emissions[i + 1] * behind[i + 1]
        state = state / state.sum(-1, keepdim=True)
        entered = torch.cat((share * state[:, :-1], state[:, -1:]), dim=1)
        reached = jumps(entered, joints, ends)
        reached[:, :-1] += (1 - cost) * follows * state[:, 1:-1]
        behind[i] = torch.cat((reached, entered.sum(-1, keepdim=True)), dim=1)
    return emissions * before * behind
