"""What a training step minimises: cross-entropy at masked positions, and where two heads should look.

Pointer supervision (training only): on a masked token that a passage in the prompt spells out, one
head of one layer is asked to look at that passage, another at the very token. It brings the search for
the right subject among passages of one type forward; decoding knows nothing of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from dlm_rag.data.examples import Example
from dlm_rag.decode.evidence import arrange, canvas_starts, encode_canvases, encode_contexts
from dlm_rag.diffusion.nelbo import token_losses
from dlm_rag.model.denoiser import Denoiser, Watch
from dlm_rag.stages import stage
from dlm_rag.training.parallel import Processes

PASSAGE_HEAD, TOKEN_HEAD = 0, 1


@dataclass(frozen=True)
class Sums:
    """Sums over the rows of a batch, in nats and counts."""

    count: float  # masked tokens
    weight: float  # of masked tokens, an end token counting `end_weight`
    tokens: float  # weighted cross-entropies of masked tokens
    names: float  # masked name tokens that a passage in the prompt spells out
    names_right: float  # how many of them the most probable token is
    pointers: float  # -log of the two heads' mass where it belongs, over `names`
    passage_mass: float  # mass of the passage head on the right passage, over `names`

    def over(self, processes: Processes) -> Self:
        """The same sums over the batch of all processes."""
        return type(self)(*processes.sum([getattr(self, field.name) for field in fields(self)]))


@dataclass(frozen=True)
class BatchLoss:
    """The two losses of a batch, as differentiable sums, and what they are sums of."""

    tokens: Tensor
    pointers: Tensor
    sums: Sums

    def total(self, over: Sums, pointer_weight: float) -> Tensor:
        """What is minimised: the mean over masked tokens plus the mean over pointers, of all processes."""
        loss = self.tokens / over.weight
        return loss + self.pointers * (pointer_weight / over.names) if over.names else loss


@dataclass(frozen=True)
class Masked:
    """A batch as the denoiser sees it, at masked positions: n of them, in order of the rows."""

    logits: Tensor  # (n, V)
    targets: Tensor  # (n,)
    rows: Tensor  # (n,) index of the example
    starts: list[int]  # where each canvas begins in the packed rows


def run_masked(
    denoiser: Denoiser, examples: Sequence[Example], layout: str, watch: Watch | None = None
) -> Masked:
    """Runs a batch with its masked tokens hidden; logits are computed at masked positions only."""
    config = denoiser.config
    assert config.mask_token_id is not None
    laid = [arrange(e.prompt, layout, config.shifted, config.passage_length) for e in examples]
    canvases = [
        [config.mask_token_id if hide else token for token, hide in zip(e.target, e.masked, strict=True)]
        for e in examples
    ]
    read = [[place for place, hide in enumerate(e.masked) if hide] for e in examples]
    contexts = encode_contexts(denoiser, laid)
    leads = [row.lead for row in laid]
    hidden = encode_canvases(denoiser, leads, canvases, contexts, read, watch)
    at = [
        (row, example.target[place])
        for row, (example, places) in enumerate(zip(examples, read, strict=True))
        for place in places
    ]
    rows, targets = torch.tensor(at, device=hidden.device).unbind(-1)
    return Masked(denoiser.read_out(hidden), targets, rows, canvas_starts(denoiser, leads, canvases))


def batch_loss(
    denoiser: Denoiser, examples: Sequence[Example], layout: str, *, end_id: int, end_weight: float
) -> BatchLoss:
    """The losses of a batch."""
    watch = Watch(max(0, denoiser.config.num_hidden_layers - 2))
    masked = run_masked(denoiser, examples, layout, watch)
    with stage("loss"):
        weights = torch.where(masked.targets == end_id, end_weight, 1.0)
        tokens = (token_losses(masked.logits, masked.targets) * weights).sum()
        named = torch.tensor(
            [
                position in copied
                for example in examples
                for copied in [{pointer.position for pointer in example.pointers}]
                for position, hide in enumerate(example.masked)
                if hide
            ],
            device=tokens.device,
        )
        right = (masked.logits.detach().argmax(-1) == masked.targets)[named]
        pointers, mass = pointer_loss(examples, layout, masked.starts, watch)
    sums = Sums(
        count=len(weights),
        weight=float(weights.sum()),
        tokens=float(tokens.detach()),
        names=len(right),
        names_right=int(right.sum()),
        pointers=float(pointers.detach()),
        passage_mass=mass,
    )
    return BatchLoss(tokens, pointers, sums)


def pointer_loss(
    examples: Sequence[Example], layout: str, starts: Sequence[int], watch: Watch
) -> tuple[Tensor, float]:
    """Sum of -log(mass on the passage) - log(mass on the token), and the sum of masses on the passage."""
    assert watch.queries is not None and watch.keys is not None
    queries, keys = watch.queries[:, :2], watch.keys
    group = watch.queries.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)[:, :2] if group > 1 else keys[:, :2]
    scale = 1 / math.sqrt(queries.shape[-1])
    losses, mass = queries.new_zeros(()), 0.0
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
        mass += float(on_passage.detach().exp().sum())
    return losses, mass
