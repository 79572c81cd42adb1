"""What a step of training minimises: cross-entropy at supervised positions; where two heads should look."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dlm_rag.evidence.encode_segments import (
    encode_canvases,
    encode_contexts,
    encode_sequence_shards,
    run_starts,
)
from dlm_rag.evidence.prompt_segments import LaidOutRow, lay_out_prompt
from dlm_rag.model.context_parallel import ContextParallel
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.device_io import to_device
from dlm_rag.model.kv_store import SharedContext
from dlm_rag.model.layers import AttentionProbe, get_compute_dtype
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.training.data.examples import Example


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


def locate_pointers(
    examples: Sequence[Example], states: Sequence[LaidOutRow]
) -> tuple[list[int], NDArray[np.int64]]:
    """How many pointers each row has, p in all; and (6, p): their packed query; of the row's keys the first
    and last + 1 of the passage, and the token; the row, and the place among its pointers.
    """
    found = []
    laid_out = zip(examples, states, run_starts(states), strict=True)
    for row, (example, state, start) in enumerate(laid_out):
        facts, head = example.prompt.facts, len(example.prompt.head)
        # Where the prompt is in one piece, the passages follow its head; else each is a segment.
        bounds = dict(zip(range(len(facts)), accumulate(map(len, facts), initial=head), strict=False))
        ends = accumulate((len(segment.ids) for segment in state.context_segments), initial=0)
        at = dict(zip(((s.ids, s.start) for s in state.context_segments), ends, strict=False))
        for slot, pointer in enumerate(example.supervised_pointers):
            fact = facts[pointer.fact]
            first = at.get((fact, 0), bounds[pointer.fact])
            span = first, first + len(fact), first + pointer.token
            found.append((start + state.find_state(pointer.position), *span, row, slot))
    counts = [len(example.supervised_pointers) for example in examples]
    return counts, np.array(found, dtype=np.int64).reshape(-1, 6).T


def compute_pointer_loss(
    counts: Sequence[int], places: Tensor, probe: AttentionProbe
) -> tuple[Tensor, Tensor]:
    """Sum of -log(mass on the passage) - log(mass on the token), and the sum of masses on the passage.

    counts, places: of `locate_pointers`, the latter on the device. In float32, whatever autocast says: the
    log of a small mass is what is asked for.
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


def make_autocast(device: str, dtype: torch.dtype) -> torch.autocast:
    """The context in which the denoiser is trained: autocast below float32.

    It keeps no copies of weights: checkpointing would find them there when it computes again, and not do
    the same.
    """
    return torch.autocast(device, dtype, enabled=dtype != torch.float32, cache_enabled=False)


@dataclass(frozen=True)
class LossWeights:
    """What the parts of the loss count in a step, and what tokens see."""

    end_token: float = 1.0  # of an end token, where a token counts 1
    pointer: float = 0.0
    block_size: int | None = None  # attention in blocks of so many tokens; None: as the denoiser has it


def count_examples(
    examples: Sequence[Example], end_ids: frozenset[int], eos_weight: float
) -> dict[str, float]:
    """What is known of examples before the denoiser has seen them.

    supervised: tokens. divisor: of their losses, which counts them by weight, or all of a document.
    pointed: those that a passage in the prompt spells out. tokens: of prompts and canvases.
    """
    found = dict.fromkeys(("supervised", "divisor", "pointed", "tokens", "rows"), 0.0)
    for example in examples:
        targets = [example.target[n] for n in example.supervised_positions]
        counted = sum(eos_weight if token in end_ids else 1.0 for token in targets)
        found["supervised"] += len(targets)
        found["divisor"] += counted if example.divisor is None else example.divisor
        found["pointed"] += len({pointer.position for pointer in example.supervised_pointers})
        found["tokens"] += len(example.prompt) + len(example.target)
        found["rows"] += 1
    return found


class EncodedBatch(NamedTuple):
    """A batch as the denoiser sees it, at supervised positions: n of them, in order of the rows."""

    states: list[LaidOutRow]
    hidden: Tensor  # (n, hidden) before the final norm
    positions: list[list[int]]  # of each row the canvas positions that they predict


def encode_batch(
    denoiser: Denoiser,
    examples: Sequence[Example],
    layout: str,
    probe: AttentionProbe | None = None,
    block: int | None = None,
    share: ContextParallel | None = None,
) -> EncodedBatch:
    """Runs a batch with its hidden tokens masked; only supervised ones go through the last layer.

    block: as in `LossWeights`. share: of rows without context, where several processes have a stretch of
    each; the result is of this one's.
    """
    config = denoiser.config
    if block is not None:
        config = replace(config, block_size=min(block, config.block_size or block))
    states = lay_out_examples(examples, config, layout)
    places = [list(example.supervised_positions) for example in examples]
    if share is not None:
        return EncodedBatch(states, *encode_sequence_shards(denoiser, states, places, share))
    contexts = encode_contexts(denoiser, states)
    return EncodedBatch(states, encode_canvases(denoiser, states, contexts, places, probe), places)


def lay_out_examples(
    examples: Sequence[Example], shape: DenoiserConfig, layout: str | None = None
) -> list[LaidOutRow]:
    """What the denoiser runs for each example."""
    assert shape.mask_token_id is not None
    return [
        lay_out_prompt(example.prompt, shape, layout).build_row(
            example.canvas(shape.mask_token_id, shape.causal_context), example.finished, shape.shifted
        )
        for example in examples
    ]


class MaskedObjective(nn.Module):
    """The loss of a batch as one call, which is what DDP and FSDP wrap."""

    def __init__(
        self, denoiser: Denoiser, layout: str, end_ids: frozenset[int], logit_chunk: int = 4096,
        share: ContextParallel | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.denoiser, self.layout, self.end_ids, self.logit_chunk = denoiser, layout, end_ids, logit_chunk
        self.share = share

    def forward(
        self, examples: Any, counts: dict[str, float], terms: LossWeights
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What these examples add to the loss of a step, a scalar; and sums that only the denoiser tells.

        examples: rows, or all of them as a `PreparedBatch`. counts: of the whole step, in all its parts on
        all processes. Sums, in nats and counts: the losses of tokens by weight, the pointer losses, the
        mass of the passage head on the right passage, the tokens to be copied that the denoiser finds most
        probable.
        """
        layers = self.denoiser.config.num_hidden_layers
        probe = AttentionProbe(max(0, layers - 2)) if terms.pointer and counts["pointed"] else None
        if isinstance(examples, Sequence):
            hidden, pointers, arrays = self._encode(examples, probe, terms)
        else:
            batch = examples.moved(self.denoiser.device)
            pointers, arrays = batch.pointers, batch.arrays
            rows = batch.canvases
            if batch.contexts is not None:
                kept = self.denoiser.encode(batch.contexts, keep=True)[1]
                rows = replace(rows, context=SharedContext(kept, ()))
            hidden = self.denoiser.encode(rows, probe=probe)[0]
        with profile_stage("loss"):
            targets, weights, copied, places = arrays
            normed, head = self.denoiser.norm(hidden), self.denoiser.lm_head.weight
            summed, right = ChunkedCrossEntropy.apply(normed, head, targets, weights, self.logit_chunk)
            loss = summed / counts["divisor"]
            pointed, mass = summed.new_zeros(2)
            if probe is not None:
                pointed, mass = compute_pointer_loss(pointers, places, probe)
                loss = loss + pointed * (terms.pointer / counts["pointed"])
            names = (right & copied).sum().float()
        sums = {"tokens": summed, "pointers": pointed, "passage_mass": mass, "names_right": names}
        return loss, {name: value.detach() for name, value in sums.items()}

    def _encode(
        self, examples: Sequence[Example], probe: AttentionProbe | None, terms: LossWeights
    ) -> tuple[Tensor, list[int], list[Tensor]]:
        """Hidden states of examples, and what a `PreparedBatch` would have beside them."""
        seen = encode_batch(self.denoiser, examples, self.layout, probe, terms.block_size, self.share)
        pointers, places = locate_pointers(examples, seen.states)
        supervision = list_supervision(examples, seen.positions, self.end_ids, terms.end_token)
        return seen.hidden, pointers, to_device([*supervision, places], seen.hidden.device)


def list_supervision(
    examples: Sequence[Example], places: Sequence[Sequence[int]], end_ids: frozenset[int], end_weight: float
) -> list[np.ndarray]:
    """Of the supervised tokens (n,): which they are, what they count, whether they can be copied."""
    found = []
    for example, row in zip(examples, places, strict=True):
        names = {pointer.position for pointer in example.pointers}
        for place in row:
            token = example.target[place]
            weight = example.weight * (end_weight if token in end_ids else 1.0)
            found.append((token, weight, place in names))
    columns = zip(*found, strict=True) if found else ((), (), ())
    dtypes = (np.int64, np.float32, np.bool_)
    return [np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)]
