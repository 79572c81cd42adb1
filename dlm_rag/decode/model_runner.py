"""What a step asks of a model, and how the denoiser answers.

The loop knows a model only as a `ModelRunner`: it shows the rows that are to take a step and gets proposals
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
from dlm_rag.decode.copy_sources import CopySources, batch_copy_sources
from dlm_rag.decode.memory_budget import GIB, LOGITS_CHUNK_POSITIONS, DecodeBudget
from dlm_rag.decode.sampler import SamplingMetadata, sample_proposals
from dlm_rag.diffusion.commit_rules import STATISTICS, Proposals
from dlm_rag.diffusion.copy_crf import CopyCRF, apply_copy_crf
from dlm_rag.evidence.batch_kv_cache import CacheRequest, ForwardSpan, KVCacheManager
from dlm_rag.evidence.prompt_segments import LaidOutPrompt
from dlm_rag.evidence.segment_kv_cache import CacheStats, EvidencePool, default_pool_bytes
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.device_io import to_host
from dlm_rag.model.packed_batch import pack_rows
from dlm_rag.nvtx_ranges import profile_stage


@dataclass(frozen=True)
class ModelInput:
    """What a model is shown of a row that is to take a step."""

    slot: int  # the row's own: what is kept for it is kept under this number
    laid_out_prompt: LaidOutPrompt
    canvas: NDArray[np.int64]  # (length,) the ids that stand there now, as far as the model is to look
    positions: NDArray[np.int64]  # those to propose for, ascending; (length,) alone: the masked one behind
    temperature: float = 0.0
    quantiles: NDArray[np.float64] | None = None  # a number for each position, with a temperature
    needs_entropy: bool = False  # whether entropy and margin are wanted
    soft_threshold: tuple[float, float, float] | None = None  # of a policy: temperature, threshold, width
    policy_quantiles: NDArray[np.float64] | None = None  # (2, n) the numbers that it draws tokens at
    finished_length: int = 0  # positions in front that are whole blocks and change no more
    copy_sources: CopySources | None = None  # what is to be copied where it can be
    copy_penalty: float = 0.0  # nats, of what is not


class ModelRunner(Protocol):
    """What a step asks of a model."""

    @property
    def shape(self) -> DenoiserConfig:
        """Lengths of canvas, blocks, context and passages."""
        ...

    def propose(self, views: Sequence[ModelInput]) -> list[Proposals]:
        """Proposals for the positions of each row; the same for a row whatever the others are."""
        ...

    def prefetch(self, arrangement: LaidOutPrompt) -> None:
        """A row will be shown with this prompt next."""
        ...

    def release(self, slot: int) -> None:
        """The row in this slot takes no more steps."""
        ...


class MaskedModelRunner:
    """A masked-diffusion denoiser: one call over all rows, logits at the positions asked for only."""

    def __init__(
        self, denoiser: Denoiser, mask_id: int, engine: EngineConfig, budget: DecodeBudget | None = None
    ) -> None:
        """budget: what `plan_decode_budget` has found for `engine.memory_gib`."""
        self.denoiser, self._engine, self._budget = denoiser, engine, budget
        self._mask_id = np.array([mask_id])
        self.reset_cache()

    @property
    def shape(self) -> DenoiserConfig:
        return self.denoiser.config

    def reset_cache(self) -> None:
        """Drops all keys and values; to be called when the denoiser's weights have changed."""
        device, engine, budget = self.denoiser.device, self._engine, self._budget
        # What was kept is freed first: the pool is a share of what is free.
        self.pool, self._contexts = None, KVCacheManager(self.denoiser, None)
        if budget is not None:
            near = budget.pool_bytes
        else:
            near = (
                default_pool_bytes(device)
                if engine.prefix_cache_gib is None
                else int(engine.prefix_cache_gib * GIB)
            )
        if near:
            self.pool = EvidencePool(device, near, int(engine.cpu_offload_gib * GIB))
        self._contexts = KVCacheManager(self.denoiser, self.pool)
        if budget is not None and budget.slot_tokens:  # slots that grow exist twice for a moment
            self._contexts.reserve(budget.slot_count, budget.slot_tokens, budget.scratch_tokens)
        self._dtype = self.denoiser.compute_dtype

    @property
    def cache_stats(self) -> CacheStats:
        """What was reused since the last `forget`."""
        return self._contexts.cache_stats

    def prefetch(self, arrangement: LaidOutPrompt) -> None:
        self._contexts.prefetch(arrangement)

    def release(self, slot: int) -> None:
        self._contexts.release(slot)

    @torch.inference_mode()
    def propose(self, views: Sequence[ModelInput]) -> list[Proposals]:
        if self.denoiser.compute_dtype != self._dtype:
            self.reset_cache()  # an autocast has begun or ended since
        with profile_stage("encode_evidence"):
            shown = [self._cache_request(view) for view in views]
            runs, context = self._contexts.prepare_rows(shown)
        with profile_stage("denoise"):
            segments = [run.segment for run in runs]
            read = [[] if run.row is None else self._read_tokens(run, views[run.row]) for run in runs]
            added, copied = (
                collect_sampling_metadata(views, self._mask_id),
                collect_crf_inputs(views, int(self._mask_id[0])),
            )
            rows = pack_rows(
                segments,
                self.denoiser.device,
                read,
                context,
                add=[*added, *(array for arrays in copied.values() for array in arrays)],
            )
            hidden, _ = self.denoiser.encode(rows)
            self._contexts.store_computed()
            mask_id, *arrays = rows.extra_tensors[: len(added)]
            sizes = count_chunk_positions(views)
            of, chains, found = len(arrays) // len(sizes), len(added), []
            for number, part in enumerate(hidden.split(sizes)):
                logits = self.denoiser.compute_token_logits(part).float()
                if number in copied:
                    logits = apply_copy_crf(
                        logits, CopyCRF(*rows.extra_tensors[chains : chains + len(copied[number])])
                    )
                    chains += len(copied[number])
                wanted = SamplingMetadata(mask_id, *arrays[number * of : (number + 1) * of])
                found.append(sample_proposals(logits, wanted))
            values = to_host(torch.cat(found, dim=1)).astype(np.float64)
        ends = np.cumsum([len(view.positions) for view in views])
        parts = np.split(values, ends[:-1], axis=1)
        return [_proposals(view, part) for view, part in zip(views, parts, strict=True)]

    def _cache_request(self, view: ModelInput) -> CacheRequest:
        """The chain of a row's lead and canvas, and what of it is finished."""
        laid, lead = view.laid_out_prompt, len(view.laid_out_prompt.canvas_prefix.ids)
        chain = laid.build_canvas_segment(view.canvas.tolist())
        finished = chain.block_start(lead + view.finished_length)
        first = int(view.positions[0]) if len(view.positions) else view.finished_length
        return CacheRequest(view.slot, laid, chain, finished, lead + first - self.denoiser.config.shifted)

    def _read_tokens(self, run: ForwardSpan, view: ModelInput) -> list[int]:
        """The tokens of a run whose states predict positions that are asked for."""
        first = len(view.laid_out_prompt.canvas_prefix.ids) - self.denoiser.config.shifted - run.begin
        at = view.positions + first
        return at[(at >= 0) & (at < len(run.segment.ids))].tolist()


def _proposals(view: ModelInput, found: NDArray[np.float64]) -> Proposals:
    known = found if view.soft_threshold is not None else found[: len(STATISTICS)]
    return Proposals.from_rows(view.positions, known)


def split_logit_chunks(views: Sequence[ModelInput]) -> list[list[tuple[int, slice]]]:
    """The positions that are read at a time, at most `LOGITS_CHUNK_POSITIONS`: of which rows which.

    Rows are whole in a piece, but for those that are longer.
    """
    pieces: list[list[tuple[int, slice]]] = [[]]
    room = LOGITS_CHUNK_POSITIONS
    for row, view in enumerate(views):
        for start in range(0, len(view.positions), LOGITS_CHUNK_POSITIONS):
            part = slice(start, min(start + LOGITS_CHUNK_POSITIONS, len(view.positions)))
            if part.stop - start > room:
                pieces.append([])
                room = LOGITS_CHUNK_POSITIONS
            pieces[-1].append((row, part))
            room -= part.stop - start
    return pieces


def count_chunk_positions(views: Sequence[ModelInput]) -> list[int]:
    """The number of positions in each of `split_logit_chunks`."""
    return [sum(part.stop - part.start for _, part in piece) for piece in split_logit_chunks(views)]


def collect_crf_inputs(views: Sequence[ModelInput], mask_id: int) -> dict[int, list[NDArray[Any]]]:
    """The fields of `CopyCRF` for each piece, by its number, with rows that copy."""
    found: dict[int, list[NDArray[Any]]] = {}
    for number, piece in enumerate(
        split_logit_chunks(views) if any(view.copy_sources for view in views) else ()
    ):
        copyings, chains, first, prices, begin = [], [], [], [], 0
        for row, part in piece:
            view = views[row]
            if view.copy_sources is not None:
                copyings.append(view.copy_sources)
                chains.append(view.copy_sources.build_chain(view.canvas, view.positions[part], mask_id))
                first.append(begin)
                prices.append(view.copy_penalty)
            begin += part.stop - part.start
        if copyings:
            found[number] = [*batch_copy_sources(copyings, chains, first), np.array(prices, np.float32)]
    return found


def collect_sampling_metadata(
    views: Sequence[ModelInput], mask_id: NDArray[np.int64]
) -> list[NDArray[Any]]:
    """As it goes to the device: the mask, then the rest of `SamplingMetadata` for each of
    `split_logit_chunks`.
    """
    counts = [len(view.positions) for view in views]
    written = np.concatenate([np.append(view.canvas, mask_id)[view.positions] for view in views])
    temperature = np.repeat([view.temperature for view in views], counts)
    spread = np.repeat([view.needs_entropy for view in views], counts)
    uniform = np.zeros(len(written))
    any_soft = any(view.soft_threshold is not None for view in views)
    lots, soft = np.zeros((5, len(written)), dtype=np.float32), np.zeros(len(written), dtype=bool)
    for view, end in zip(views, np.cumsum(counts), strict=True):
        at = slice(end - len(view.positions), end)
        if view.quantiles is not None:
            uniform[at] = view.quantiles
        if view.soft_threshold is not None and view.policy_quantiles is not None:
            soft[at], lots[:3, at], lots[3:, at] = (
                True,
                np.array(view.soft_threshold)[:, None],
                view.policy_quantiles,
            )
    arrays: list[NDArray[Any]] = [mask_id]
    ends = np.cumsum(count_chunk_positions(views))
    for start, stop in pairwise([0, *ends.tolist()]):
        part = slice(start, stop)
        sampled = np.flatnonzero(temperature[part])
        drawn = (values[part][sampled].astype(np.float32) for values in (temperature, uniform))
        arrays += [written[part], sampled, *drawn, np.flatnonzero(spread[part])]
        if any_soft:
            drawing = np.flatnonzero(soft[part])
            arrays += [drawing, lots[:, part][:, drawing]]
    return arrays
