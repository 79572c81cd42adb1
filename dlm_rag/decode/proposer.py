"""What a step asks of a model, and how the denoiser answers.

The loop knows a model only as a `Proposer`: it shows the rows that are to take a step and gets proposals
for their positions. Another family (one that denoises from uniform noise, say) stands behind the same
protocol.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dlm_rag.config import EngineConfig
from dlm_rag.decode.budget import GIB, ROWS_READ, Budget
from dlm_rag.decode.copying import Copying, together
from dlm_rag.decode.proposals import Wanted, read_proposals
from dlm_rag.diffusion.chain import Chains, marginals
from dlm_rag.diffusion.commit import Proposals
from dlm_rag.evidence.contexts import Contexts, Run, Shown
from dlm_rag.evidence.layout import Arrangement
from dlm_rag.evidence.pool import EvidencePool, Reuse, default_budget
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.rows import pack
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.model.transfer import to_host
from dlm_rag.stages import stage


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
    copying: Copying | None = None  # what is to be copied where it can be
    copy_price: float = 0.0  # nats, of what is not


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

    def __init__(
        self, denoiser: Denoiser, mask_id: int, engine: EngineConfig, budget: Budget | None = None
    ) -> None:
        """budget: what `budget.within` has found for `engine.memory_gib`."""
        self.denoiser, self._engine, self._budget = denoiser, engine, budget
        self._mask_id = np.array([mask_id])
        self.forget()

    @property
    def shape(self) -> DenoiserConfig:
        return self.denoiser.config

    def forget(self) -> None:
        """Drops all keys and values; to be called when the denoiser's weights have changed."""
        device, engine, budget = self.denoiser.device, self._engine, self._budget
        # What was kept is freed first: the pool is a share of what is free.
        self.pool, self._contexts = None, Contexts(self.denoiser, None)
        if budget is not None:
            near = budget.pool
        else:
            near = default_budget(device) if engine.pool_gib is None else int(engine.pool_gib * GIB)
        if near:
            self.pool = EvidencePool(device, near, int(engine.host_pool_gib * GIB))
        self._contexts = Contexts(self.denoiser, self.pool)
        if budget is not None and budget.tokens:  # slots that grow exist twice for a moment
            self._contexts.reserve(budget.rows, budget.tokens, budget.scratch)
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
            added, copied = wanted_of(views, self._mask_id), copied_of(views, int(self._mask_id[0]))
            rows = pack(
                segments,
                self.denoiser.device,
                read,
                context,
                add=[*added, *(array for arrays in copied.values() for array in arrays)],
            )
            hidden, _ = self.denoiser.encode(rows)
            self._contexts.take_up()
            mask_id, *arrays = rows.added[: len(added)]
            sizes = sizes_of(views)
            of, chains, found = len(arrays) // len(sizes), len(added), []
            for number, part in enumerate(hidden.split(sizes)):
                logits = self.denoiser.read_out(part).float()
                if number in copied:
                    logits = marginals(logits, Chains(*rows.added[chains : chains + len(copied[number])]))
                    chains += len(copied[number])
                wanted = Wanted(mask_id, *arrays[number * of : (number + 1) * of])
                found.append(read_proposals(logits, wanted))
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


def pieces_of(views: Sequence[View]) -> list[list[tuple[int, slice]]]:
    """The positions that are read at a time, at most `ROWS_READ`: of which rows which.

    Rows are whole in a piece, but for those that are longer.
    """
    pieces: list[list[tuple[int, slice]]] = [[]]
    room = ROWS_READ
    for row, view in enumerate(views):
        for start in range(0, len(view.positions), ROWS_READ):
            part = slice(start, min(start + ROWS_READ, len(view.positions)))
            if part.stop - start > room:
                pieces.append([])
                room = ROWS_READ
            pieces[-1].append((row, part))
            room -= part.stop - start
    return pieces


def sizes_of(views: Sequence[View]) -> list[int]:
    """The number of positions in each of `pieces_of`."""
    return [sum(part.stop - part.start for _, part in piece) for piece in pieces_of(views)]


def copied_of(views: Sequence[View], mask_id: int) -> dict[int, list[NDArray[Any]]]:
    """The fields of `Chains` for each piece, by its number, with rows that copy."""
    found: dict[int, list[NDArray[Any]]] = {}
    for number, piece in enumerate(pieces_of(views) if any(view.copying for view in views) else ()):
        copyings, chains, first, prices, begin = [], [], [], [], 0
        for row, part in piece:
            view = views[row]
            if view.copying is not None:
                copyings.append(view.copying)
                chains.append(view.copying.chain(view.canvas, view.positions[part], mask_id))
                first.append(begin)
                prices.append(view.copy_price)
            begin += part.stop - part.start
        if copyings:
            found[number] = [*together(copyings, chains, first), np.array(prices, np.float32)]
    return found


def wanted_of(views: Sequence[View], mask_id: NDArray[np.int64]) -> list[NDArray[Any]]:
    """As it goes to the device: the mask, then the rest of `Wanted` for each of `pieces_of`."""
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
    ends = np.cumsum(sizes_of(views))
    for start, stop in pairwise([0, *ends.tolist()]):
        part = slice(start, stop)
        sampled = np.flatnonzero(temperature[part])
        drawn = (values[part][sampled].astype(np.float32) for values in (temperature, uniform))
        arrays += [written[part], sampled, *drawn, np.flatnonzero(spread[part])]
        if any_soft:
            drawing = np.flatnonzero(soft[part])
            arrays += [drawing, lots[:, part][:, drawing]]
    return arrays
