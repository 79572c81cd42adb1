"""Pointer supervision (training only): where two heads of one layer should look.

On a supervised token that a passage in the prompt spells out, one head is asked to look at that passage,
another at the very token. It brings the search for the right subject among passages of one type forward;
decoding knows nothing of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.evidence.prompt_segments import LaidOutRow
from dlm_rag.model.layers import AttentionProbe
from dlm_rag.model.packed_batch import Segment
from dlm_rag.training.data.example import Example

PASSAGE_HEAD, TOKEN_HEAD = 0, 1


@dataclass(frozen=True)
class PointerTargets:
    """The pointers of a batch, row by row, p of them."""

    counts: list[int]  # of each row
    indices: NDArray[np.int64]  # (4, p): packed query; of the row's keys: first, last + 1 of passage; token

    @classmethod
    def of(
        cls, examples: Sequence[Example], states: Sequence[LaidOutRow], starts: Sequence[int]
    ) -> "PointerTargets":
        """starts: where in the packed queries each canvas begins."""
        found = []
        for example, state, start in zip(examples, states, starts, strict=True):
            facts, head = example.prompt.facts, len(example.prompt.head)
            # Where the prompt is in one piece, the passages follow its head; else each is a segment.
            bounds = dict(zip(range(len(facts)), accumulate(map(len, facts), initial=head), strict=False))
            ends = accumulate((len(segment.ids) for segment in state.context_segments), initial=0)
            at = dict(zip(state.context_segments, ends, strict=False))
            for pointer in example.supervised_pointers:
                fact = facts[pointer.fact]
                first = at.get(Segment(fact, 0), bounds[pointer.fact])
                last = first + len(fact)
                found.append((start + pointer.position, first, last, first + pointer.token))
        numbers = np.array(found, dtype=np.int64).reshape(-1, 4).T
        return cls([len(example.supervised_pointers) for example in examples], numbers)


def compute_pointer_loss(
    counts: Sequence[int], places: Tensor, probe: AttentionProbe
) -> tuple[Tensor, Tensor]:
    """Sum of -log(mass on the passage) - log(mass on the token), and the sum of masses on the passage.

    counts, places: of `PointerTargets`, the latter on the device. In float32, whatever autocast says: the
    log of a small mass is what is asked for.
    """
    assert probe.queries is not None and probe.keys is not None
    off: Any = torch.autocast(probe.queries.device.type, enabled=False)
    with off:
        queries, keys = probe.queries[:, :2].float(), probe.keys.float()
        group = probe.queries.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(group, dim=1)[:, :2] if group > 1 else keys[:, :2]
        scale = 1 / math.sqrt(queries.shape[-1])
        losses, mass = queries.new_zeros(()), queries.new_zeros(())
        rows = zip(places.split(list(counts), dim=1), keys.split(probe.key_lengths), strict=True)
        for (at, first, last, token), row_keys in rows:
            if not len(at):
                continue
            place = torch.arange(len(row_keys), device=at.device)
            scores = torch.einsum("nhd,khd->hnk", queries[at], row_keys) * scale
            if probe.visible_counts is not None:
                scores = scores.masked_fill(place >= probe.visible_counts[at][:, None], -math.inf)
            log_mass = scores.log_softmax(-1)
            outside = (place < first[:, None]) | (place >= last[:, None])
            on_passage = log_mass[PASSAGE_HEAD].masked_fill(outside, -math.inf).logsumexp(-1)
            on_token = log_mass[TOKEN_HEAD].gather(1, token[:, None]).squeeze(1)
            losses = losses - (on_passage + on_token).sum()
            mass = mass + on_passage.detach().exp().sum()
    return losses, mass
