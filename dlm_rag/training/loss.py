"""What a training step minimises: cross-entropy at masked positions, and where two heads should look.

Pointer supervision (training only): on a masked token that a passage in the prompt spells out, one
head of one layer is asked to look at that passage, another at the very token. It brings the search for
the right subject among passages of one type forward; decoding knows nothing of it.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, nn

from dlm_rag.evidence.encode import canvas_starts, encode_canvases, encode_contexts, encode_stretches
from dlm_rag.evidence.layout import arrange
from dlm_rag.model.block import Watch
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.sharing import SequenceShare
from dlm_rag.stages import stage
from dlm_rag.training.processes import Processes
from dlm_rag.training.rows.example import Example

PASSAGE_HEAD, TOKEN_HEAD = 0, 1


def arithmetic(device: str, dtype: torch.dtype) -> torch.autocast:
    """The context in which the denoiser is trained: autocast below float32.

    It keeps no copies of weights: checkpointing would find them there when it computes again, and not do
    the same.
    """
    return torch.autocast(device, dtype, enabled=dtype != torch.float32, cache_enabled=False)


@dataclass(frozen=True)
class Weights:
    """What the parts of the loss count."""

    end: float = 1.0  # of an end token, where a token counts 1
    pointers: float = 0.0


@dataclass(frozen=True)
class Counts:
    """Of a batch, known before the denoiser has seen it."""

    supervised: float = 0.0  # masked tokens
    divisor: float = 0.0  # of the token losses: of masked tokens by weight, or of all of a document
    pointed: float = 0.0  # masked tokens that a passage in the prompt spells out
    tokens: float = 0.0  # of prompts and canvases
    rows: float = 0.0

    @classmethod
    def of(cls, examples: Sequence[Example], end_ids: frozenset[int], end_weight: float) -> Self:
        """Counts of some examples."""
        supervised = divisor = pointed = 0.0
        for example in examples:
            hidden = [t for t, hide in zip(example.target, example.masked, strict=True) if hide]
            supervised += len(hidden)
            weight = sum(end_weight if token in end_ids else 1.0 for token in hidden)
            divisor += weight if example.divisor is None else example.divisor
            pointed += len({p.position for p in example.pointers if example.masked[p.position]})
        tokens = sum(len(e.prompt) + len(e.target) for e in examples)
        return cls(supervised, divisor, pointed, tokens, len(examples))

    @classmethod
    def total(cls, parts: Sequence[Self]) -> Self:
        """The counts of several parts together."""
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))

    def over(self, processes: Processes) -> Self:
        """The same counts over the examples of all processes."""
        return type(self)(*(n / processes.sharing for n in processes.sum(astuple(self))))


@dataclass(frozen=True)
class Sums:
    """Sums over a batch, in nats and counts, which only the denoiser can tell."""

    tokens: float  # weighted cross-entropies of masked tokens
    pointers: float  # -log of the two heads' mass where it belongs
    passage_mass: float  # mass of the passage head on the right passage
    names_right: float  # tokens to be copied that the denoiser finds most probable

    @classmethod
    def of(cls, parts: Sequence[Tensor], processes: Processes) -> Self:
        """The sum of several `Objective.forward`s, over all processes; waits for the device."""
        return cls(*processes.sum(torch.stack(list(parts)).double().sum(0).tolist()))


@dataclass(frozen=True)
class Masked:
    """A batch as the denoiser sees it, at masked positions: n of them, in order of the rows."""

    hidden: Tensor  # (n, hidden) before the final norm
    targets: Tensor  # (n,)
    rows: Tensor  # (n,) index of the example
    starts: list[int]  # where each canvas begins in the packed rows


def run_masked(
    denoiser: Denoiser,
    examples: Sequence[Example],
    layout: str,
    watch: Watch | None = None,
    ahead: int | None = None,
    share: SequenceShare | None = None,
) -> Masked:
    """Runs a batch with its masked tokens hidden; only masked positions go through the last layer.

    ahead: tokens to its right that each token sees, of rows without context; None: all. share: of rows
    without context, where several processes have a stretch of each; the result is of this one's.
    """
    config = denoiser.config
    assert config.mask_token_id is not None
    laid = [arrange(e.prompt, layout, config.shifted, config.passage_length) for e in examples]
    canvases = [
        [config.mask_token_id if hide else token for token, hide in zip(e.target, e.masked, strict=True)]
        for e in examples
    ]
    read = [[place for place, hide in enumerate(e.masked) if hide] for e in examples]
    leads = [row.lead for row in laid]
    if share is None:
        contexts = encode_contexts(denoiser, laid)
        hidden = encode_canvases(denoiser, leads, canvases, contexts, read, watch, ahead)
    else:
        hidden, read = encode_stretches(denoiser, leads, canvases, read, share)
    at = [
        (row, example.target[place])
        for row, (example, places) in enumerate(zip(examples, read, strict=True))
        for place in places
    ]
    rows, targets = torch.tensor(at, dtype=torch.long, device=hidden.device).view(-1, 2).unbind(-1)
    return Masked(hidden, targets, rows, canvas_starts(denoiser, leads, canvases))


class Objective(nn.Module):
    """The loss of a batch as one call, which is what DDP and FSDP wrap."""

    def __init__(
        self, denoiser: Denoiser, layout: str, end_ids: frozenset[int], logit_chunk: int = 4096,
        share: SequenceShare | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.denoiser, self.layout, self.end_ids, self.logit_chunk = denoiser, layout, end_ids, logit_chunk
        self.share = share

    def forward(
        self, examples: Sequence[Example], over: Counts, weights: Weights, ahead: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """What these examples add to the loss of a step, a scalar; and the four `Sums`, detached.

        over: the counts of the whole step, in all its parts on all processes.
        """
        watch = Watch(max(0, self.denoiser.config.num_hidden_layers - 2)) if weights.pointers else None
        masked = run_masked(self.denoiser, examples, self.layout, watch, ahead, self.share)
        with stage("loss"):
            targets = masked.targets
            ends = torch.isin(targets, torch.tensor(sorted(self.end_ids), device=targets.device))
            of_rows = torch.tensor([example.weight for example in examples], device=targets.device)
            counted = of_rows[masked.rows] * torch.where(ends, weights.end, 1.0)
            head = self.denoiser.lm_head.weight
            normed = self.denoiser.norm(masked.hidden)
            summed, right = ChunkedLoss.apply(normed, head, targets, counted, self.logit_chunk)
            loss = summed / over.divisor
            pointed, mass = summed.new_zeros(()), summed.new_zeros(())
            if watch is not None and over.pointed:
                pointed, mass = pointer_loss(examples, self.layout, masked.starts, watch)
                loss = loss + pointed * (weights.pointers / over.pointed)
            pointing = any(example.pointers for example in examples)
            names = right[_named(examples, targets.device)].sum() if pointing else summed.new_zeros(())
        return loss, torch.stack([x.detach().float() for x in (summed, pointed, mass, names)])


def _named(examples: Sequence[Example], device: torch.device) -> Tensor:
    """(n,) which masked tokens a passage in the prompt spells out."""
    return torch.tensor(
        [
            position in copied
            for example in examples
            for copied in [{pointer.position for pointer in example.pointers}]
            for position, hide in enumerate(example.masked)
            if hide
        ],
        dtype=torch.bool,
        device=device,
    )


class ChunkedLoss(torch.autograd.Function):
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
        dtype = (
            torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        )
        ctx.dtypes = x.dtype, head.dtype
        need_x, need_head = ctx.needs_input_grad[:2]
        low = head.to(dtype)
        d_x = torch.empty_like(x) if need_x else None
        d_head = torch.zeros_like(head, dtype=torch.float32) if need_head else None
        summed, right = torch.zeros((), device=x.device), []
        for part, target, weight, at in zip(
            x.split(chunk), targets.split(chunk), weights.split(chunk), range(0, max(1, len(x)), chunk),
            strict=False,
        ):  # fmt: skip
            part = part.to(dtype)
            logits = (part @ low.t()).float()
            right.append(logits.argmax(-1) == target)
            logits -= logits.logsumexp(-1, keepdim=True)
            summed -= (logits.gather(1, target[:, None]).squeeze(1) * weight).sum()
            if not (need_x or need_head):
                continue
            slope = logits.exp_()
            slope.scatter_add_(1, target[:, None], torch.full_like(weight, -1.0)[:, None])
            slope = (slope * weight[:, None]).to(dtype)
            if d_x is not None:
                d_x[at : at + len(part)] = slope @ low
            if d_head is not None:
                d_head += slope.t() @ part
        ctx.gradients = d_x, d_head
        found = torch.cat(right) if right else targets.new_zeros(0, dtype=torch.bool)
        ctx.mark_non_differentiable(found)
        return summed, found

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        found = []
        for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True):
            found.append(None if gradient is None else gradient.mul_(slope).to(dtype))
        return (*found, None, None, None)


def pointer_loss(
    examples: Sequence[Example], layout: str, starts: Sequence[int], watch: Watch
) -> tuple[Tensor, Tensor]:
    """Sum of -log(mass on the passage) - log(mass on the token), and the sum of masses on the passage."""
    assert watch.queries is not None and watch.keys is not None
    queries, keys = watch.queries[:, :2].float(), watch.keys.float()
    group = watch.queries.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)[:, :2] if group > 1 else keys[:, :2]
    scale = 1 / math.sqrt(queries.shape[-1])
    losses, mass = queries.new_zeros(()), queries.new_zeros(())
    for example, start, row_keys in zip(examples, starts, keys.split(watch.lengths), strict=True):
        pointed = [pointer for pointer in example.pointers if example.masked[pointer.position]]
        if not pointed:
            continue
        # `independent` keeps the question behind the passages, the others before them.
        ahead = 0 if layout == "independent" else len(example.prompt.head)
        bounds = torch.tensor([*accumulate(map(len, example.prompt.facts), initial=ahead)])
        fact = torch.tensor([pointer.fact for pointer in pointed])
        first, last = bounds[fact], bounds[fact + 1]
        at = queries[[start + pointer.position for pointer in pointed]]
        log_mass = (torch.einsum("nhd,khd->hnk", at, row_keys) * scale).log_softmax(-1)
        place = torch.arange(len(row_keys))
        outside = ((place < first[:, None]) | (place >= last[:, None])).to(log_mass.device)
        on_passage = log_mass[PASSAGE_HEAD].masked_fill(outside, -math.inf).logsumexp(-1)
        token = (first + torch.tensor([pointer.token for pointer in pointed])).to(log_mass.device)
        on_token = log_mass[TOKEN_HEAD].gather(1, token[:, None]).squeeze(1)
        losses = losses - (on_passage + on_token).sum()
        mass = mass + on_passage.detach().exp().sum()
    return losses, mass
