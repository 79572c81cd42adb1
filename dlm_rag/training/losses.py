"""The forward process of masks, and what a step of training minimises.

A token is still untouched at time t in [0, 1] with probability alpha(t) = 1 - t (the linear schedule of
LLaDA, arXiv 2502.09992). The continuous-time NELBO weights a masked token at time t by
-alpha'(t) / (1 - alpha(t)) = 1 / t (MDLM, arXiv 2406.07524, eq. 10). Losses are cross-entropy at supervised
positions, and where two heads should look.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.layers import AttentionProbe, get_compute_dtype
from dlm_rag.model.packed_batch import SharedContext
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.training.batches import PreparedBatch, Sums


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


class ChunkedCrossEntropy(torch.autograd.Function):
    """Weighted cross-entropy, summed, whose logits exist `chunk` rows at a time and only once.

    The sum is linear in each token's loss, so the gradients of a chunk are known as soon as its logits
    are (as in Liger Kernel, arXiv 2410.10989): they are computed at once and the logits dropped.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """x (n, hidden), head (V, hidden), targets and weights (n,) -> the sum in float32, and which
        targets (n,) are the most probable token.
        """
        need_x, need_head = ctx.needs_input_grad[:2]
        ctx.dtypes = x.dtype, head.dtype
        d_x = torch.empty_like(x) if need_x else None
        d_head = torch.zeros_like(head, dtype=torch.float32) if need_head else None
        summed, right = torch.zeros((), device=x.device), torch.zeros_like(targets, dtype=torch.bool)
        low = head.to(get_compute_dtype(x))
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            part = x[rows].to(low.dtype)
            logits = (part @ low.t()).float()
            target, weight = targets[rows], weights[rows]
            right[rows] = logits.argmax(-1) == target
            logits -= logits.logsumexp(-1, keepdim=True)
            summed -= (logits.gather(1, target[:, None]).squeeze(1) * weight).sum()
            if not (need_x or need_head):
                continue
            slope = logits.exp_()
            slope.scatter_add_(1, target[:, None], torch.full_like(weight, -1.0)[:, None])
            slope = (slope * weight[:, None]).to(low.dtype)
            if d_x is not None:
                d_x[rows] = slope @ low
            if d_head is not None:
                d_head += slope.t() @ part
        ctx.gradients = d_x, d_head
        ctx.mark_non_differentiable(right)
        return summed, right

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.gradients, ctx.dtypes, strict=True)
        found = [None if gradient is None else gradient.mul_(slope).to(dtype) for gradient, dtype in pairs]
        return (*found, None, None, None)


PASSAGE_HEAD, TOKEN_HEAD = 0, 1


def compute_pointer_loss(
    counts: Sequence[int], places: Tensor, probe: AttentionProbe
) -> tuple[Tensor, Tensor]:
    """Sum of -log(mass on the passage) - log(mass on the token), and the sum of masses on the passage.

    counts, places: of `batches.locate_pointers`, the latter on the device. In float32, whatever autocast
    says: the log of a small mass is what is asked for.
    """
    assert probe.queries is not None and probe.keys is not None and probe.key_ends is not None
    count, group = probe.queries.shape[1], probe.queries.shape[1] // probe.keys.shape[1]
    heads = [min(head, count - 1) for head in (PASSAGE_HEAD, TOKEN_HEAD)]
    start, length = probe.key_ends[:-1], probe.key_ends.diff()
    off: Any = torch.autocast(probe.queries.device.type, enabled=False)
    at, first, last, token, row, slot = places
    with off:
        queries = torch.stack([probe.queries[:, head] for head in heads], 1).float()
        keys = torch.stack([probe.keys[:, head // group] for head in heads], 1).float()
        if not len(row):
            return queries.new_zeros(()), queries.new_zeros(())
        place = torch.arange(max(probe.key_lengths), device=row.device)
        padded = keys[(start[:, None] + place).clamp(max=len(keys) - 1)]  # (rows, keys, 2, D)
        asked = queries.new_zeros((len(counts), max(counts), *queries.shape[1:]))
        asked = asked.index_put((row, slot), queries[at])
        scores = torch.einsum("rnhd,rkhd->rnhk", asked, padded)[row, slot] / math.sqrt(queries.shape[-1])
        seen = length[row] if probe.visible_counts is None else probe.visible_counts[at]
        scores = scores.masked_fill((place >= seen[:, None])[:, None], -math.inf)
        log_mass = scores.log_softmax(-1)  # (p, 2, keys)
        outside = (place < first[:, None]) | (place >= last[:, None])
        on_passage = log_mass[:, PASSAGE_HEAD].masked_fill(outside, -math.inf).logsumexp(-1)
        on_token = log_mass[:, TOKEN_HEAD].gather(1, token[:, None]).squeeze(1)
        losses = -(on_passage + on_token).sum()
        mass = on_passage.detach().exp().sum()
    return losses, mass


class MaskedObjective(nn.Module):
    """The loss of a batch as one call, which is what DDP and FSDP wrap."""

    logit_chunk = 4096  # supervised positions whose logits exist at a time

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(self, batch: PreparedBatch, counts: Sums) -> tuple[Tensor, dict[str, Tensor]]:
        """What a batch adds to the loss of a step, a scalar; and sums that only the denoiser tells.

        counts: of the whole step, in all its parts on all processes. Sums, in nats and counts: the losses
        of tokens by weight, the pointer losses, the mass of the passage head on the right passage, the
        tokens to be copied that the denoiser finds most probable.
        """
        layers, weight = self.denoiser.config.num_hidden_layers, batch.weights.pointer
        probe = AttentionProbe(max(0, layers - 2)) if weight and counts["pointed"] else None
        batch = batch.moved(self.denoiser.device)
        context: Any = None
        if batch.contexts is not None:
            context = SharedContext(self.denoiser.encode(batch.contexts, keep=True)[1], ())
        hidden = self.denoiser.encode(replace(batch.canvases, context=context), probe=probe)[0]
        with profile_stage("loss"):
            targets, weights, copied = batch.supervision
            normed, head = self.denoiser.norm(hidden), self.denoiser.lm_head.weight
            summed, right = ChunkedCrossEntropy.apply(normed, head, targets, weights, self.logit_chunk)
            loss = summed / counts["divisor"]
            pointed, mass = summed.new_zeros(2)
            if probe is not None:
                pointed, mass = compute_pointer_loss(batch.pointers, batch.places, probe)
                loss = loss + pointed * (weight / counts["pointed"])
            names = (right & copied).sum().float()
        sums = {"tokens": summed, "pointers": pointed, "passage_mass": mass, "names_right": names}
        return loss, {name: value.detach() for name, value in sums.items()}
