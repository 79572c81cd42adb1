"""What a step of training minimises: cross-entropy at supervised positions; where two heads should look."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from dlm_rag.evidence.encode import canvas_starts, encode_canvases, encode_contexts, encode_stretches
from dlm_rag.evidence.layout import State, arrange
from dlm_rag.model.block import AttentionProbe
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.model.sharing import SequenceShare
from dlm_rag.model.transfer import to_device
from dlm_rag.stages import stage
from dlm_rag.training.loss import ChunkedLoss
from dlm_rag.training.pointers import Places, pointer_loss
from dlm_rag.training.rows.example import Example


def arithmetic(device: str, dtype: torch.dtype) -> torch.autocast:
    """The context in which the denoiser is trained: autocast below float32.

    It keeps no copies of weights: checkpointing would find them there when it computes again, and not do
    the same.
    """
    return torch.autocast(device, dtype, enabled=dtype != torch.float32, cache_enabled=False)


@dataclass(frozen=True)
class Terms:
    """What the parts of the loss count in a step, and what tokens see."""

    end: float = 1.0  # of an end token, where a token counts 1
    pointers: float = 0.0
    block: int | None = None  # attention in blocks of so many tokens; None: as the denoiser has it


def counts_of(examples: Sequence[Example], end_ids: frozenset[int], end_weight: float) -> dict[str, float]:
    """What is known of examples before the denoiser has seen them.

    supervised: tokens. divisor: of their losses, which counts them by weight, or all of a document.
    pointed: those that a passage in the prompt spells out. tokens: of prompts and canvases.
    """
    divisor = 0.0
    for example in examples:
        counted = sum(end_weight if example.target[n] in end_ids else 1.0 for n in example.places)
        divisor += counted if example.divisor is None else example.divisor
    return {
        "supervised": float(sum(len(e.places) for e in examples)),
        "divisor": divisor,
        "pointed": float(sum(len({pointer.position for pointer in e.pointed}) for e in examples)),
        "tokens": float(sum(len(e.prompt) + len(e.target) for e in examples)),
        "rows": float(len(examples)),
    }


@dataclass(frozen=True)
class Encoded:
    """A batch as the denoiser sees it, at supervised positions: n of them, in order of the rows."""

    states: list[State]
    hidden: Tensor  # (n, hidden) before the final norm
    places: list[list[int]]  # of each row the canvas positions that they predict
    starts: list[int]  # where each canvas begins in the packed rows


def encode(
    denoiser: Denoiser,
    examples: Sequence[Example],
    layout: str,
    probe: AttentionProbe | None = None,
    block: int | None = None,
    share: SequenceShare | None = None,
) -> Encoded:
    """Runs a batch with its hidden tokens masked; only supervised ones go through the last layer.

    block: as in `Terms`. share: of rows without context, where several processes have a stretch of each;
    the result is of this one's.
    """
    config = denoiser.config
    if block is not None:
        config = replace(config, attention_block=min(block, config.attention_block or block))
    states = states_of(examples, config, layout)
    places = [list(example.places) for example in examples]
    if share is None:
        contexts = encode_contexts(denoiser, states)
        hidden = encode_canvases(denoiser, states, contexts, places, probe)
    else:
        hidden, places = encode_stretches(denoiser, states, places, share)
    return Encoded(states, hidden, places, canvas_starts(states))


def states_of(examples: Sequence[Example], shape: DenoiserConfig, layout: str | None = None) -> list[State]:
    """What the denoiser runs for each example."""
    assert shape.mask_token_id is not None
    return [
        arrange(example.prompt, shape, layout).state(
            example.canvas(shape.mask_token_id), example.finished, shape.shifted
        )
        for example in examples
    ]


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
        self, examples: Sequence[Example], counts: dict[str, float], terms: Terms
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What these examples add to the loss of a step, a scalar; and sums that only the denoiser tells.

        counts: of the whole step, in all its parts on all processes. Sums, in nats and counts: the token
        losses by weight, the pointer losses, the mass of the passage head on the right passage, the tokens
        to be copied that the denoiser finds most probable.
        """
        layers = self.denoiser.config.num_hidden_layers
        probe = AttentionProbe(max(0, layers - 2)) if terms.pointers and counts["pointed"] else None
        seen = encode(self.denoiser, examples, self.layout, probe, terms.block, self.share)
        with stage("loss"):
            pointers = Places.of(examples, seen.states, seen.starts)
            arrays = [*self._supervision(examples, seen.places, terms.end), pointers.found]
            targets, weights, copied, places = to_device(arrays, seen.hidden.device)
            normed, head = self.denoiser.norm(seen.hidden), self.denoiser.lm_head.weight
            summed, right = ChunkedLoss.apply(normed, head, targets, weights, self.logit_chunk)
            loss = summed / counts["divisor"]
            pointed, mass = summed.new_zeros(()), summed.new_zeros(())
            if probe is not None:
                pointed, mass = pointer_loss(pointers.counts, places, probe)
                loss = loss + pointed * (terms.pointers / counts["pointed"])
            names = (right & copied).sum().float()
        sums = {"tokens": summed, "pointers": pointed, "passage_mass": mass, "names_right": names}
        return loss, {name: value.detach() for name, value in sums.items()}

    def _supervision(
        self, examples: Sequence[Example], places: Sequence[Sequence[int]], end_weight: float
    ) -> list[np.ndarray]:
        """Of the supervised tokens (n,): which they are, what they count, whether they can be copied."""
        targets, weights, copied = [], [], []
        for example, row in zip(examples, places, strict=True):
            names = {pointer.position for pointer in example.pointers}
            for place in row:
                token = example.target[place]
                targets.append(token)
                weights.append(example.weight * (end_weight if token in self.end_ids else 1.0))
                copied.append(place in names)
        return [np.array(targets, np.int64), np.array(weights, np.float32), np.array(copied, np.bool_)]
