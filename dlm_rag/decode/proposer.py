"""What a step asks of a model, and how the denoiser answers.

The loop knows a model only as a `Proposer`: it shows the rows that are to take a step and gets proposals
for their positions. Another family (one that denoises from uniform noise, say) stands behind the same
protocol.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dlm_rag.config import EngineConfig
from dlm_rag.decode.proposals import Wanted, read_proposals
from dlm_rag.diffusion.commit import Proposals
from dlm_rag.evidence.contexts import Contexts, Run, Shown
from dlm_rag.evidence.layout import Arrangement
from dlm_rag.evidence.pool import EvidencePool, Reuse, default_budget
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.rows import pack
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.model.transfer import to_host
from dlm_rag.stages import stage

ROWS_READ = 1024  # logits that exist at a time: the vocabulary is the memory
GIB = 2**30


@dataclass(frozen=True)
class View:
    """What a model is shown of a row that is to take a step."""

    slot: int  # the row's own: what is kept for it is kept under this number
    arrangement: Arrangement
    canvas: NDArray[np.int64]  # (length,) the ids that stand there now, as far as the model is to look
    positions: NDArray[np.int64]  # those to propose for, ascending; (length,) alone: the masked one behind
    temperature: float = 0.0
    uniform: NDArray[np.float64] | None = None  # a number for each position, with a temperature
    spread: bool = False  # whether entropy and margin are wanted
    soft: tuple[float, float, float] | None = None  # of a policy: temperature, threshold, width
    lots: NDArray[np.float64] | None = None  # (2, n) the numbers that it draws tokens at
    finished: int = 0  # positions in front that are whole blocks and change no more


class Proposer(Protocol):
    """What a step asks of a model."""

    @property
    def shape(self) -> DenoiserConfig:
        """Lengths of canvas, blocks, context and passages."""
        ...

    def propose(self, views: Sequence[View]) -> list[Proposals]:
        """Proposals for the positions of each row; the same for a row whatever the others are."""
        ...

    def prefetch(self, arrangement: Arrangement) -> None:
        """A row will be shown with this prompt next."""
        ...

    def release(self, slot: int) -> None:
        """The row in this slot takes no more steps."""
        ...


class DenoiserProposer:
    """A masked-diffusion denoiser: one call over all rows, logits at the positions asked for only."""

    def __init__(self, denoiser: Denoiser, mask_id: int, engine: EngineConfig) -> None:
        self.denoiser, self._engine = denoiser, engine
        self._mask_id = np.array([mask_id])
        self.forget()

    @property
    def shape(self) -> DenoiserConfig:
        return self.denoiser.config

    def forget(self) -> None:
        """Drops all keys and values; to be called when the denoiser's weights have changed."""
        device, engine = self.denoiser.device, self._engine
        # What was kept is freed first: the budget is a share of what is free.
        self.pool, self._contexts = None, Contexts(self.denoiser, None)
        budget = default_budget(device) if engine.pool_gib is None else int(engine.pool_gib * GIB)
        if budget:
            self.pool = EvidencePool(device, budget, int(engine.host_pool_gib * GIB))
        self._contexts = Contexts(self.denoiser, self.pool)
        self._dtype = self.denoiser.compute_dtype

    @property
    def reuse(self) -> Reuse:
        """What was reused since the last `forget`."""
        return self._contexts.reuse

    def prefetch(self, arrangement: Arrangement) -> None:
        self._contexts.prefetch(arrangement)

    def release(self, slot: int) -> None:
        self._contexts.release(slot)

    @torch.inference_mode()
    def propose(self, views: Sequence[View]) -> list[Proposals]:
        if self.denoiser.compute_dtype != self._dtype:
            self.forget()  # an autocast has begun or ended since
        with stage("encode_evidence"):
            shown = [self._shown(view) for view in views]
            runs, context = self._contexts.load(shown)
        with stage("denoise"):
            segments = [run.segment for run in runs]
            read = [[] if run.row is None else self._read(run, views[run.row]) for run in runs]
            added = wanted_of(views, self._mask_id)
            rows = pack(segments, self.denoiser.device, read, context, add=added)
            hidden, _ = self.denoiser.encode(rows)
            self._contexts.take_up()
            mask_id, *arrays = rows.added
            pieces = hidden.split(ROWS_READ)
            of = len(arrays) // len(pieces)
            found = [
                read_proposals(self.denoiser.read_out(part).float(), Wanted(mask_id, *arrays[at : at + of]))
                for at, part in zip(range(0, len(arrays), of), pieces, strict=True)
            ]
            values = to_host(torch.cat(found, dim=1)).astype(np.float64)
        ends = np.cumsum([len(view.positions) for view in views])
        parts = np.split(values, ends[:-1], axis=1)
        return [_proposals(view, part) for view, part in zip(views, parts, strict=True)]

    def _shown(self, view: View) -> Shown:
        """The chain of a row's lead and canvas, and what of it is finished."""
        laid, lead = view.arrangement, len(view.arrangement.lead.ids)
        chain = laid.chain(view.canvas.tolist())
        finished = chain.block_start(lead + view.finished)
        first = int(view.positions[0]) if len(view.positions) else view.finished
        return Shown(view.slot, laid, chain, finished, lead + first - self.denoiser.config.shifted)

    def _read(self, run: Run, view: View) -> list[int]:
        """The tokens of a run whose states predict positions that are asked for."""
        first = len(view.arrangement.lead.ids) - self.denoiser.config.shifted - run.begin
        at = view.positions + first
        return at[(at >= 0) & (at < len(run.segment.ids))].tolist()


def _proposals(view: View, found: NDArray[np.float64]) -> Proposals:
    token, confidence, log_prob, entropy, margin, written = found[:6]
    draws = None if view.soft is None else found[6:]
    tokens = token.astype(np.int64)
    return Proposals(view.positions, tokens, confidence, log_prob, entropy, margin, written, draws)


def wanted_of(views: Sequence[View], mask_id: NDArray[np.int64]) -> list[NDArray[Any]]:
    """As it goes to the device: the mask, then the rest of `Wanted` for every `ROWS_READ` positions."""
    counts = [len(view.positions) for view in views]
    written = np.concatenate([np.append(view.canvas, mask_id)[view.positions] for view in views])
    temperature = np.repeat([view.temperature for view in views], counts)
    spread = np.repeat([view.spread for view in views], counts)
    uniform = np.zeros(len(written))
    any_soft = any(view.soft is not None for view in views)
    lots, soft = np.zeros((5, len(written)), dtype=np.float32), np.zeros(len(written), dtype=bool)
    for view, end in zip(views, np.cumsum(counts), strict=True):
        at = slice(end - len(view.positions), end)
        if view.uniform is not None:
            uniform[at] = view.uniform
        if view.soft is not None and view.lots is not None:
            soft[at], lots[:3, at], lots[3:, at] = True, np.array(view.soft)[:, None], view.lots
    arrays: list[NDArray[Any]] = [mask_id]
    for start in range(0, len(written), ROWS_READ):
        part = slice(start, start + ROWS_READ)
        sampled = np.flatnonzero(temperature[part])
        drawn = (values[part][sampled].astype(np.float32) for values in (temperature, uniform))
        arrays += [written[part], sampled, *drawn, np.flatnonzero(spread[part])]
        if any_soft:
            drawing = np.flatnonzero(soft[part])
            arrays += [drawing, lots[:, part][:, drawing]]
    return arrays
