"""Fine-tuning a model of uniform noise: rows whose canvas has random tokens, and their loss.

The rows are those of masked fine-tuning: the same prompts, with random tokens where a mask would be.
Canvases are always complete; finished ones belong to the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlm_rag.diffusion.noise import (
    NOISE_SCHEDULES,
    add_uniform_noise,
    sample_antithetic_times,
    token_losses,
    uniform_nelbo,
)
from dlm_rag.model.device_io import to_device
from dlm_rag.model.diffusion_gemma import DiffusionGemma
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.randomness import make_keyed_generator
from dlm_rag.training.data.examples import Example
from dlm_rag.training.losses import LossWeights
from dlm_rag.training.supervised_tasks import SftTask

LINEAR = NOISE_SCHEDULES["linear"]


@dataclass(frozen=True)
class UniformRow:
    """A row: what the encoder reads, the true canvas (n,) and the one that is shown."""

    prompt: tuple[int, ...]
    target: tuple[int, ...]
    noisy: tuple[int, ...]
    time: float  # of the noise, for the NELBO
    self_conditioned: bool  # whether the logits of a first pass are shown too
    copied_positions: tuple[int, ...] = ()  # positions of random tokens that a passage spells out


def make_full_canvas(example: Example, block: int, end_id: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the encoder reads of an example, and the canvas after it, filled up with end tokens."""
    at = example.finished
    target = example.target[at : at + block]
    fill = (end_id,) * (block - len(target))
    return (*example.prompt.ids, *example.target[:at]), (*target, *fill)


class UniformSftTask(SftTask):
    """`SftTask` for a model of uniform noise: the same rows and curriculum."""

    def objective(self, denoiser: Any, share: object) -> "UniformObjective":  # type: ignore[override]
        return UniformObjective(denoiser, self._origin.tokenizer.end_ids, self.train.uniform_loss)

    def make_microbatch(self, step: int, items: Sequence[int], conditions: tuple[int, int]) -> Any:
        """The rows of some items; what is random depends on step, item and row alone."""
        found, rows = [], self.train.rows_per_set
        examples = self._source.examples(step, items, conditions)
        for place, item in enumerate(items):
            generator = make_keyed_generator("redrawn", self.train.seed, step, item)
            found += self._make_rows(examples[place * rows : (place + 1) * rows], generator)
        return found

    def _make_rows(self, examples: Sequence[Example], generator: torch.Generator) -> list[UniformRow]:
        """The rows of an item.

        For the NELBO each has noise of a time of its own. For cross-entropy it has noise where the row
        would be masked: for half of the rows at a time of its own too, for the others what was not yet
        written at some moment of decoding.
        """
        shape, train = self._origin.config, self.train
        block, end_id = shape.block_size, self._origin.tokenizer.end_id
        assert block is not None and end_id is not None
        pairs = [make_full_canvas(example, block, end_id) for example in examples]
        targets = torch.tensor([target for _, target in pairs])
        times = sample_antithetic_times(len(pairs), generator)
        if train.uniform_loss == "nelbo":
            alpha = LINEAR.alpha(times)[:, None].expand(targets.shape)
        else:
            masked = [(*e.masked[e.finished :], *[True] * block)[:block] for e in examples]
            alpha = 1 - torch.tensor(masked, dtype=torch.float64)
        # One alpha for each position is one row of one token each.
        noisy = add_uniform_noise(targets[..., None], alpha, shape.vocab_size, generator).squeeze(-1)
        conditioned = torch.rand(len(pairs), generator=generator) < train.self_conditioning
        found = []
        for n, (example, (prompt, target)) in enumerate(zip(examples, pairs, strict=True)):
            at = {pointer.position - example.finished for pointer in example.pointers}
            shown = tuple(noisy[n].tolist())
            names = tuple(p for p in sorted(at) if 0 <= p < block and shown[p] != target[p])
            found.append(UniformRow(prompt, target, shown, float(times[n]), bool(conditioned[n]), names))
        return found

    def count_microbatch(self, part: Sequence[Any], terms: LossWeights) -> dict[str, float]:
        ends = sum(token in self._origin.tokenizer.end_ids for row in part for token in row.target)
        supervised = sum(len(row.target) for row in part)
        return {
            "supervised": float(supervised),
            "divisor": supervised - ends + terms.end_token * ends,
            "pointed": float(sum(len(row.copied_positions) for row in part)),
            "tokens": float(supervised + sum(len(row.prompt) for row in part)),
            "rows": float(len(part)),
        }


class UniformObjective(nn.Module):
    """The loss of a batch as one call, which is what DDP wraps."""

    def __init__(self, denoiser: DiffusionGemma, end_ids: frozenset[int], loss: str) -> None:
        super().__init__()
        self.denoiser, self.end_ids, self.loss = denoiser, end_ids, loss
        denoiser.from_others = loss == "nelbo"

    def forward(
        self, rows: Sequence[UniformRow], counts: dict[str, float], terms: LossWeights
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What these rows add to the loss of a step, a scalar; and sums, as in `MaskedObjective`."""
        names = [(n, place) for n, row in enumerate(rows) for place in row.copied_positions]
        weights = [
            [terms.end_token if token in self.end_ids else 1.0 for token in row.target] for row in rows
        ]
        arrays = [
            np.array([row.noisy for row in rows]), np.array([row.target for row in rows]),
            np.array(weights, np.float32), np.array([[row.time] for row in rows]),
            np.array(names, np.int64).reshape(-1, 2).T,
        ]  # fmt: skip
        noisy, targets, counted, times, at = to_device(arrays, self.denoiser.device)
        logits = self.denoiser([row.prompt for row in rows], noisy, [row.self_conditioned for row in rows])
        with profile_stage("loss"):
            if self.loss == "nelbo":
                losses = uniform_nelbo(logits, noisy, targets, times.expand(noisy.shape), LINEAR)
            else:
                losses = token_losses(logits.flatten(0, 1), targets.flatten()).view(targets.shape)
            summed = (losses * counted).sum().float()
            right = (logits.detach().argmax(-1) == targets)[at.unbind()].sum().float()
        sums = {"tokens": summed, "names_right": right}
        return summed / counts["divisor"], {name: value.detach() for name, value in sums.items()}
