"""What a step minimises: cross-entropy at supervised positions, and where two heads should look."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlm_rag.evidence.encode_segments import encode_contexts
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.layers import AttentionProbe, get_compute_dtype
from dlm_rag.model.packed_batch import pack_rows
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.training.batches import MaskedBatch, Sums


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
    sight = probe.sight
    assert probe.queries is not None and probe.keys is not None and sight is not None
    count, group = probe.queries.shape[1], probe.queries.shape[1] // probe.keys.shape[1]
    heads = [min(head, count - 1) for head in (PASSAGE_HEAD, TOKEN_HEAD)]
    start, length = sight.key_ends[:-1], sight.key_ends.diff()
    off: Any = torch.autocast(probe.queries.device.type, enabled=False)
    at, first, last, token, row, slot = places
    with off:
        queries = torch.stack([probe.queries[:, head] for head in heads], 1).float()
        keys = torch.stack([probe.keys[:, head // group] for head in heads], 1).float()
        if not len(row):
            return queries.new_zeros(()), queries.new_zeros(())
        place = torch.arange(max(sight.key_lengths), device=row.device)
        padded = keys[(start[:, None] + place).clamp(max=len(keys) - 1)]  # (rows, keys, 2, D)
        asked = queries.new_zeros((len(counts), max(counts), *queries.shape[1:]))
        asked = asked.index_put((row, slot), queries[at])
        scores = torch.einsum("rnhd,rkhd->rnhk", asked, padded)[row, slot] / math.sqrt(queries.shape[-1])
        seen = length[row] if sight.visible_counts is None else sight.visible_counts[at]
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

    def forward(self, batch: MaskedBatch, counts: Sums) -> tuple[Tensor, dict[str, Tensor]]:
        """What a batch adds to the loss of a step, a scalar; and sums that only the denoiser tells.

        counts: of the whole step, in all its parts on all processes. Sums, in nats and counts: the losses
        of tokens by weight, the pointer losses, the mass of the passage head on the right passage, the
        tokens to be copied that the denoiser finds most probable.
        """
        denoiser, states, weight = self.denoiser, batch.states, batch.pointer_weight
        probe = None
        if weight and counts["pointed"]:
            probe = AttentionProbe(max(0, denoiser.config.num_hidden_layers - 2))
        runs, context = [row.canvas_segment for row in states], encode_contexts(denoiser, states)
        read = [[row.find_state(n) for n in read] for row, read in zip(states, batch.read, strict=True)]
        add = [*batch.supervision, batch.places]
        rows = pack_rows(runs, denoiser.device, read, context, add)
        targets, weights, copied, places = rows.extra_tensors
        hidden = denoiser.encode(rows, probe=probe)[0]
        with profile_stage("loss"):
            normed, head = denoiser.norm(hidden), denoiser.lm_head.weight
            summed, right = ChunkedCrossEntropy.apply(normed, head, targets, weights, self.logit_chunk)
            loss = summed / counts["divisor"]
            pointed, mass = summed.new_zeros(2)
            if probe is not None:
                pointed, mass = compute_pointer_loss(batch.pointers, places, probe)
                loss = loss + pointed * (weight / counts["pointed"])
            names = (right & copied).sum().float()
        sums = {"tokens": summed, "pointers": pointed, "passage_mass": mass, "names_right": names}
        return loss, {name: value.detach() for name, value in sums.items()}
