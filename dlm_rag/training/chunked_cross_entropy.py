"""Cross-entropy whose logits exist a chunk at a time."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dlm_rag.model.layers import get_compute_dtype


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
        for rows, part, logits in iterate_logit_chunks(x, low, chunk):
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
        found = []
        for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True):
            found.append(None if gradient is None else gradient.mul_(slope).to(dtype))
        return (*found, None, None, None)


def iterate_logit_chunks(x: Tensor, low: Tensor, size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Of `size` rows of x (n, hidden) at a time: which they are, they and their logits (size, V).

    Products are those of the dtype of the head `low` (V, hidden), logits float32.
    """
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        part = x[rows].to(low.dtype)
        yield rows, part, (part @ low.t()).float()
