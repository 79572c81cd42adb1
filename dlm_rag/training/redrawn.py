"""Fine-tuning a model of uniform noise: rows whose canvas is drawn anew in places, and their loss.

The rows are those of masked fine-tuning (`rows/`): the same prompts, and what a mask hides there is drawn
from the whole vocabulary here. Canvases are always whole; finished ones belong to the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlm_rag.config import Config, TrainConfig
from dlm_rag.diffusion.nelbo import token_losses
from dlm_rag.diffusion.noise import SCHEDULES, antithetic_times
from dlm_rag.diffusion.uniform import redraw_tokens, uniform_nelbo
from dlm_rag.model.transfer import to_device
from dlm_rag.randomness import keyed_generator
from dlm_rag.stages import stage
from dlm_rag.training.gemma import TrainedGemma
from dlm_rag.training.objective import Terms
from dlm_rag.training.origin import Origin
from dlm_rag.training.rows.example import Example
from dlm_rag.training.tasks import AnswerRows, Sft

LINEAR = SCHEDULES["linear"]


@dataclass(frozen=True)
class Canvas:
    """A row: what the encoder reads, the true canvas (n,) and the one that is shown."""

    prompt: tuple[int, ...]
    target: tuple[int, ...]
    noisy: tuple[int, ...]
    time: float  # of the noise, for the NELBO
    conditioned: bool  # whether the logits of a first pass are shown too
    names: tuple[int, ...] = ()  # positions that a passage spells out and that are drawn anew


def whole_canvas(example: Example, block: int, end_id: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the encoder reads of an example, and the canvas behind it, filled up with end tokens."""
    at = example.finished
    target = example.target[at : at + block]
    fill = (end_id,) * (block - len(target))
    return (*example.prompt.ids, *example.target[:at]), (*target, *fill)


class RedrawnSft(Sft):
    """`Sft` for a model of uniform noise: the same rows and curriculum."""

    def __init__(self, answers: AnswerRows, config: Config, train: TrainConfig, origin: Origin) -> None:
        super().__init__(answers, config, train, origin)
        self._shape, self._end_id = origin.config, origin.tokenizer.end_id

    def objective(self, denoiser: Any, share: object) -> "RedrawnObjective":  # type: ignore[override]
        return RedrawnObjective(denoiser, self._end_ids, self._train.uniform_loss)

    def part(self, step: int, items: Sequence[int], conditions: tuple[int, int]) -> Any:
        """The rows of some items; noise and lots depend on step, item and row alone."""
        examples = self._answers.examples(step, items, conditions)
        found, rows = [], self._train.rows
        for place, item in enumerate(items):
            key = ("redrawn", self._train.seed, step, item)
            found += self._redrawn(examples[place * rows : (place + 1) * rows], keyed_generator(*key))
        return found

    def _redrawn(self, examples: Sequence[Example], generator: torch.Generator) -> list[Canvas]:
        """The rows of an item.

        For the NELBO each is drawn anew at a time of its own. Under cross-entropy, where its rows would be
        masked: half of them at a time of their own too, in the other half what was not written at a moment
        of decoding.
        """
        shape, train = self._shape, self._train
        block, end_id = shape.attention_block, self._end_id
        assert block is not None and end_id is not None
        pairs = [whole_canvas(example, block, end_id) for example in examples]
        targets = torch.tensor([target for _, target in pairs])
        times = antithetic_times(len(pairs), generator)
        if train.uniform_loss == "nelbo":
            alpha = LINEAR.alpha(times)[:, None].expand(targets.shape)
        else:
            behind = ((*e.hidden[e.finished :], *[True] * block)[:block] for e in examples)
            alpha = 1 - torch.tensor(list(behind), dtype=torch.float64)
        # One alpha for each position is one row of one token each.
        noisy = redraw_tokens(targets[..., None], alpha, shape.vocab_size, generator).squeeze(-1)
        lots = torch.rand(len(pairs), generator=generator) < train.self_conditioning
        found = []
        for n, (example, (prompt, target)) in enumerate(zip(examples, pairs, strict=True)):
            at = {pointer.position - example.finished for pointer in example.pointers}
            shown = tuple(noisy[n].tolist())
            names = tuple(p for p in sorted(at) if 0 <= p < block and shown[p] != target[p])
            found.append(Canvas(prompt, target, shown, float(times[n]), bool(lots[n]), names))
        return found

    def counts(self, part: Sequence[Any], terms: Terms) -> dict[str, float]:
        ends = sum(token in self._end_ids for row in part for token in row.target)
        supervised = sum(len(row.target) for row in part)
        return {
            "supervised": float(supervised),
            "divisor": supervised - ends + terms.end * ends,
            "pointed": float(sum(len(row.names) for row in part)),
            "tokens": float(supervised + sum(len(row.prompt) for row in part)),
            "rows": float(len(part)),
        }


class RedrawnObjective(nn.Module):
    """The loss of a batch as one call, which is what DDP wraps."""

    def __init__(self, denoiser: TrainedGemma, end_ids: frozenset[int], loss: str) -> None:
        super().__init__()
        self.denoiser, self.end_ids, self.loss = denoiser, end_ids, loss
        denoiser.from_others = loss == "nelbo"

    def forward(
        self, rows: Sequence[Canvas], counts: dict[str, float], terms: Terms
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What these rows add to the loss of a step, a scalar; and sums, as in `Objective`."""
        names = [(n, place) for n, row in enumerate(rows) for place in row.names]
        weights = [[terms.end if token in self.end_ids else 1.0 for token in row.target] for row in rows]
        arrays = [
            np.array([row.noisy for row in rows]), np.array([row.target for row in rows]),
            np.array(weights, np.float32), np.array([[row.time] for row in rows]),
            np.array(names, np.int64).reshape(-1, 2).T,
        ]  # fmt: skip
        noisy, targets, counted, times, at = to_device(arrays, self.denoiser.device)
        logits = self.denoiser([row.prompt for row in rows], noisy, [row.conditioned for row in rows])
        with stage("loss"):
            if self.loss == "nelbo":
                losses = uniform_nelbo(logits, noisy, targets, times.expand(noisy.shape), LINEAR)
            else:
                losses = token_losses(logits.flatten(0, 1), targets.flatten()).view(targets.shape)
            summed = (losses * counted).sum().float()
            right = (logits.detach().argmax(-1) == targets)[at.unbind()].sum().float()
        sums = {"tokens": summed, "names_right": right}
        return summed / counts["divisor"], {name: value.detach() for name, value in sums.items()}
