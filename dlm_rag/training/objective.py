"""What a training step minimises: cross-entropy at masked positions, and where two heads should look.

Pointer supervision (training only): on a masked token that a passage in the prompt spells out, one
head of one layer is asked to look at that passage, another at the very token. It brings the search for
the right subject among passages of one type forward; decoding knows nothing of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_rag.data.examples import Example
from dlm_rag.decode.evidence import Arrangement, arrange, encode_canvases, encode_contexts
from dlm_rag.diffusion.nelbo import token_losses
from dlm_rag.model.denoiser import Denoiser, Watch
from dlm_rag.stages import stage

PASSAGE_HEAD, TOKEN_HEAD = 0, 1


@dataclass(frozen=True)
class StepLoss:
    """Losses in nats and rates of one batch; `total` is what is minimised."""

    total: Tensor
    tokens: Tensor  # mean cross-entropy of masked tokens, end tokens by their weight
    pointers: Tensor  # mean of -log of the two heads' mass where it belongs; 0 without pointers
    name_accuracy: float  # share of masked name tokens with a source in the prompt that are right
    pointer_mass: float  # mean mass of the passage head on the right passage


def step_loss(
    denoiser: Denoiser,
    examples: Sequence[Example],
    layout: str,
    *,
    end_id: int,
    end_weight: float,
    pointer_weight: float,
) -> StepLoss:
    """The losses of a batch; logits are computed at masked positions only."""
    config = denoiser.config
    assert config.mask_token_id is not None
    laid = [arrange(e.prompt, layout, config.shifted, config.passage_length) for e in examples]
    canvases = [
        [config.mask_token_id if hide else token for token, hide in zip(e.target, e.masked, strict=True)]
        for e in examples
    ]
    watch = Watch(max(0, config.num_hidden_layers - 2))
    hidden, starts = encode_canvases(denoiser, laid, canvases, encode_contexts(denoiser, laid), watch)
    source, target, named = [], [], []
    for example, start in zip(examples, starts, strict=True):
        copied = {pointer.position for pointer in example.pointers}
        for position, hide in enumerate(example.masked):
            if hide:
                source.append(start + position)
                target.append(example.target[position])
                named.append(position in copied)
    with stage("loss"):
        wanted = torch.tensor(target, device=hidden.device)
        logits = denoiser.read_out(hidden, torch.tensor(source, device=hidden.device))
        losses = token_losses(logits, wanted)
        weights = torch.where(wanted == end_id, end_weight, 1.0)
        tokens = (losses * weights).sum() / weights.sum()
        right = (logits.detach().argmax(-1) == wanted)[torch.tensor(named, device=hidden.device)]
        pointers, mass = tokens.new_zeros(()), 0.0
        if pointer_weight:
            pointers, mass = pointer_loss(examples, laid, starts, watch)
    return StepLoss(
        total=tokens + pointer_weight * pointers,
        tokens=tokens.detach(),
        pointers=pointers.detach(),
        name_accuracy=float(right.float().mean()) if len(right) else math.nan,
        pointer_mass=mass,
    )


def pointer_loss(
    examples: Sequence[Example], laid: Sequence[Arrangement], starts: Sequence[int], watch: Watch
) -> tuple[Tensor, float]:
    """Mean of -log(mass on the passage) - log(mass on the token), and the mean mass on the passage.

    Only for contexts that hold the passages as segments of their own, in prompt order
    (`independent`).
    """
    assert watch.queries is not None and watch.keys is not None
    queries, keys = watch.queries[:, :2], watch.keys
    group = watch.queries.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)[:, :2] if group > 1 else keys[:, :2]
    scale = 1 / math.sqrt(queries.shape[-1])
    losses, masses = [], []
    rows = zip(examples, laid, starts, keys.split(watch.lengths), strict=True)
    for example, arrangement, start, row_keys in rows:
        pointed = [pointer for pointer in example.pointers if example.masked[pointer.position]]
        if not pointed:
            continue
        ends = torch.tensor([len(segment.ids) for segment in arrangement.context]).cumsum(0)
        fact = torch.tensor([pointer.fact for pointer in pointed])
        last, first = ends[fact], ends[fact] - torch.tensor([len(s.ids) for s in arrangement.context])[fact]
        at = queries[[start + pointer.position for pointer in pointed]]
        scores = torch.einsum("nhd,khd->hnk", at, row_keys) * scale
        log_mass = scores.log_softmax(-1)
        place = torch.arange(len(row_keys))
        outside = (place < first[:, None]) | (place >= last[:, None])
        on_passage = log_mass[PASSAGE_HEAD].masked_fill(outside.to(scores.device), -math.inf).logsumexp(-1)
        token = (first + torch.tensor([pointer.token for pointer in pointed])).to(scores.device)
        on_token = log_mass[TOKEN_HEAD].gather(1, token[:, None]).squeeze(1)
        losses.append(-(on_passage + on_token))
        masses.append(on_passage.detach().exp())
    if not losses:
        return queries.new_zeros(()), 0.0
    return torch.cat(losses).mean(), float(torch.cat(masses).mean())
