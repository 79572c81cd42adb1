"""What a step asks of a model, and how a masked-diffusion denoiser answers: tokens for canvas positions."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.config import EngineConfig
from dlm_rag.decode.copy_sources import CopySources, batch_copy_sources
from dlm_rag.diffusion.commit_rules import ACTION_STATISTICS, STATISTICS, Proposals
from dlm_rag.diffusion.copy_crf import CopyCRF, apply_copy_crf
from dlm_rag.diffusion.policy import SoftThreshold, draw_actions, sample_at_quantile
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.batch_kv_cache import CacheRequest, ForwardSpan, KVCacheManager
from dlm_rag.evidence.evidence_store import open_evidence_store
from dlm_rag.evidence.kv_tiers import KVArena
from dlm_rag.evidence.prompt_segments import LaidOutPrompt
from dlm_rag.evidence.segment_kv_cache import CacheStats, EvidencePool, default_pool_bytes
from dlm_rag.model.attention import RAGGED_KERNELS
from dlm_rag.model.denoiser import AnyDenoiser, Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.device_io import to_host
from dlm_rag.model.kv_format import KVFormat
from dlm_rag.model.packed_batch import pack_rows
from dlm_rag.nvtx_ranges import profile_stage

GIB = 2**30
LOGITS_CHUNK_POSITIONS = 1024  # logits that exist at a time: the vocabulary is the memory
Arrays = list[NDArray[Any]]


@dataclass(frozen=True)
class DecodeBudget:
    """What a decoder may take: bytes of the pool, and the slots that are there from the start."""

    pool_bytes: int
    slot_count: int
    slot_tokens: int
    scratch_tokens: int


@dataclass(frozen=True)
class ModelInput:
    """What a model is shown of a row that is to take a step."""

    slot: int  # the row's own: what is kept for it is kept under this number
    laid_out_prompt: LaidOutPrompt
    canvas: NDArray[np.int64]  # (length,) the ids that stand there now, as far as the model is to look
    positions: NDArray[np.int64]  # those to propose for, ascending; (length,) alone: the masked one behind
    temperature: float = 0.0
    # At which tokens are drawn: (n,) with a temperature; (2, n) of a policy, the second where it is forced.
    quantiles: NDArray[np.float64] | None = None
    soft_threshold: tuple[float, float, float] | None = None  # of a policy: temperature, threshold, width
    needs_entropy: bool = False  # whether entropy and margin are wanted
    finished_length: int = 0  # positions in front that are whole blocks and change no more
    copy_sources: CopySources | None = None  # what is to be copied where it can be
    copy_penalty: float = 0.0  # nats, of what is not


@dataclass(frozen=True)
class DecoderStats:
    """What a decoder, or many of them, work with, in words; what they have reused and compiled.

    store: how the evidence store is used, in words; empty without one.
    """

    runtime: str
    cache_stats: CacheStats
    compiled_graphs: int | None = None
    store: str = ""

    def __add__(self, other: "DecoderStats") -> "DecoderStats":
        """Both together; `runtime` is the same for decoders of one job."""
        counts = zip(astuple(self.cache_stats), astuple(other.cache_stats), strict=True)
        graphs = [n for n in (self.compiled_graphs, other.compiled_graphs) if n is not None]
        summed = CacheStats(*map(sum, counts))
        return DecoderStats(self.runtime, summed, sum(graphs) if graphs else None, self.store)

    def describe(self) -> str:
        """In words for a person."""
        used, reuse = self.runtime, self.cache_stats
        if reuse.requested_tokens:
            used += f", {reuse.reused_share:.1%} of it reused"
        if reuse.host_segments or self.store:
            used += f"; passages: {reuse.describe_tiers()}"
        used += f"; {self.store}" if self.store else ""
        if reuse.evicted_segments:
            used += f", {reuse.evicted_segments:,} passages left the pool (engine.prefix_cache_gib)"
        return used if self.compiled_graphs is None else f"{used}, {self.compiled_graphs} graphs compiled"


class ModelRunner:
    """A model as the loop knows it: it is shown the rows that are to take a step, and proposes."""

    denoiser: AnyDenoiser
    pool: EvidencePool | None = None
    ranks = ""  # on how many of them it runs, in words

    @property
    def shape(self) -> DenoiserConfig:
        """Lengths of canvas, blocks, context and passages."""
        return self.denoiser.config

    @property
    def cache_stats(self) -> CacheStats:
        """What was reused since the last `reset_cache`."""
        raise NotImplementedError

    def reset_cache(self) -> None:
        """Drops all keys and values; to be called when the denoiser's weights have changed."""
        raise NotImplementedError

    def propose(self, views: Sequence[ModelInput]) -> list[Proposals]:
        """Proposals for the positions of each row; the same for a row whatever the others are."""
        raise NotImplementedError

    def prefetch(self, laid: LaidOutPrompt) -> None:
        """A row will be shown with this prompt next."""

    def release(self, slot: int) -> None:
        """The row in this slot takes no more steps."""


class MaskedModelRunner(ModelRunner):
    """A masked-diffusion denoiser: one call over all rows, logits at the positions asked for only."""

    denoiser: Denoiser

    def __init__(
        self, denoiser: Denoiser, mask_id: int, engine: EngineConfig, budget: DecodeBudget | None = None
    ) -> None:
        """budget: what `plan_decode_budget` has found for `engine.memory_gib`."""
        if engine.tensor_parallel > 1 and denoiser.tensor_parallel is None:
            raise ConfigError("engine.tensor_parallel is for sample, evaluate and serve")
        self.denoiser, self._engine, self._budget, self._mask_id = denoiser, engine, budget, mask_id
        if engine.compile:
            denoiser.compile_layers()
        self.reset_cache()

    def reset_cache(self) -> None:
        device, engine, budget = self.denoiser.device, self._engine, self._budget
        # What was kept is freed first: the pool is a share of what is free.
        format = KVFormat(self.denoiser, engine.cache_dtype)
        self.pool, self._contexts = None, KVCacheManager(self.denoiser, None, format)
        if budget is not None:
            near = budget.pool_bytes
        elif engine.prefix_cache_gib is None:
            near = default_pool_bytes(device)
        else:
            near = int(engine.prefix_cache_gib * GIB)
        if near:
            shares = self.denoiser.backend in RAGGED_KERNELS
            self.pool = EvidencePool(
                device, KVArena(near, format) if shares else near, int(engine.cpu_offload_gib * GIB),
                open_evidence_store(engine, self.denoiser),
            )  # fmt: skip
        self._contexts = KVCacheManager(self.denoiser, self.pool, format)
        if budget is not None and budget.slot_tokens:  # slots that grow exist twice for a moment
            self._contexts.reserve(budget.slot_count, budget.slot_tokens, budget.scratch_tokens)
        self._dtype = self.denoiser.compute_dtype

    @property
    def cache_stats(self) -> CacheStats:
        return self._contexts.cache_stats

    @torch.inference_mode()  # as `propose`, whose tensors it writes to
    def prefetch(self, laid: LaidOutPrompt) -> None:
        self._contexts.prefetch(laid)

    def release(self, slot: int) -> None:
        self._contexts.release(slot)

    @torch.inference_mode()
    def propose(self, views: Sequence[ModelInput]) -> list[Proposals]:
        if self.denoiser.compute_dtype != self._dtype:
            self.reset_cache()  # an autocast has begun or ended since
        parts = self._contexts.split_rows([view.laid_out_prompt for view in views])
        return [found for part in parts for found in self._propose(views[part])]

    def _propose(self, views: Sequence[ModelInput]) -> list[Proposals]:
        with profile_stage("encode_evidence"):
            runs, context = self._contexts.prepare_rows([self._cache_request(view) for view in views])
        with profile_stage("denoise"):
            read = [[] if run.row is None else self._read_tokens(run, views[run.row]) for run in runs]
            chunks, policy = list(split_logit_chunks(views)), any(view.soft_threshold for view in views)
            wanted = [
                (
                    collect_sampling_metadata(chunk, self._mask_id, policy),
                    collect_crf_inputs(chunk, self._mask_id),
                )
                for chunk in chunks
            ]
            segments = [run.segment for run in runs]
            rows = pack_rows(segments, self.denoiser.device, read, context, add=[*chain(*chain(*wanted))])
            hidden, _ = self.denoiser.encode(rows)
            self._contexts.store_computed()
            sizes = [sum(len(view.positions) for view in chunk) for chunk in chunks]
            tensors, found = iter(rows.extra_tensors), []
            for states, (sampling, copying) in zip(hidden.split(sizes), wanted, strict=True):
                metadata = SamplingMetadata(*islice(tensors, len(sampling)))
                logits = self.denoiser.compute_token_logits(states).float()
                if copying:
                    logits = apply_copy_crf(logits, CopyCRF(*islice(tensors, len(copying))))
                found.append(sample_proposals(logits, metadata))
            values = to_host(torch.cat(found, dim=1)).astype(np.float64)
        ends = np.cumsum([len(view.positions) for view in views])
        return [
            Proposals.from_rows(view.positions, part[: None if view.soft_threshold else len(STATISTICS)])
            for view, part in zip(views, np.split(values, ends[:-1], axis=1), strict=True)
        ]

    def _cache_request(self, view: ModelInput) -> CacheRequest:
        """The chain of a row's lead and canvas, and what of it is finished."""
        laid, lead = view.laid_out_prompt, len(view.laid_out_prompt.canvas_prefix.ids)
        segment = laid.build_canvas_segment(view.canvas.tolist(), view.finished_length)
        finished = segment.block_start(lead + view.finished_length)
        asked = view.positions if len(view.positions) else np.array([view.finished_length])
        first = int(laid.find_states(asked, len(view.canvas), self.denoiser.config.shifted)[0])
        return CacheRequest(view.slot, laid, segment, finished, first)

    def _read_tokens(self, run: ForwardSpan, view: ModelInput) -> list[int]:
        """The tokens of a run whose states predict positions that are asked for."""
        shown, shifted = len(view.canvas), self.denoiser.config.shifted
        at = view.laid_out_prompt.find_states(view.positions, shown, shifted) - run.begin
        return at[(at >= 0) & (at < len(run.segment.ids))].tolist()


def split_logit_chunks(views: Sequence[ModelInput]) -> Iterator[list[ModelInput]]:
    """The views in chunks of at most `LOGITS_CHUNK_POSITIONS` positions; only longer rows are divided."""
    most, chunk, room = LOGITS_CHUNK_POSITIONS, list[ModelInput](), LOGITS_CHUNK_POSITIONS
    for view in views:
        for start in range(0, len(view.positions), most):
            part, piece = slice(start, start + most), view
            if len(view.positions) > most:
                quantiles = None if view.quantiles is None else view.quantiles[..., part]
                piece = replace(view, positions=view.positions[part], quantiles=quantiles)
            if len(piece.positions) > room:
                yield chunk
                chunk, room = [], most
            chunk.append(piece)
            room -= len(piece.positions)
    yield chunk


def collect_crf_inputs(views: Sequence[ModelInput], mask_id: int) -> Arrays:
    """The fields of `CopyCRF` for these views; empty where none copies."""
    sources, chains, first, penalties, begin = [], [], [], [], 0
    for view in views:
        if view.copy_sources is not None:
            sources.append(view.copy_sources)
            chains.append(view.copy_sources.build_chain(view.canvas, view.positions, mask_id))
            first.append(begin)
            penalties.append(view.copy_penalty)
        begin += len(view.positions)
    if not sources:
        return []
    return [*batch_copy_sources(sources, chains, first), np.array(penalties, np.float32)]


def collect_sampling_metadata(views: Sequence[ModelInput], mask_id: int, policy: bool) -> Arrays:
    """The fields of `SamplingMetadata` for these views; policy: whether any row of the call has one."""
    counts, soft = [len(view.positions) for view in views], [view.soft_threshold for view in views]
    current = np.concatenate([np.append(view.canvas, mask_id)[view.positions] for view in views])
    temperature = np.repeat([view.temperature for view in views], counts)
    drawn, quantiles = np.flatnonzero(temperature), np.zeros((2, len(current)))
    for view, end in zip(views, np.cumsum(counts), strict=True):
        if view.quantiles is not None:
            quantiles[:, end - len(view.positions) : end] = view.quantiles
    entropy = np.flatnonzero(np.repeat([view.needs_entropy for view in views], counts))
    sampled = (values[drawn].astype(np.float32) for values in (temperature, quantiles[0]))
    arrays: Arrays = [np.array([mask_id]), current, drawn, *sampled, entropy]
    if policy:
        index = np.flatnonzero(np.repeat([each is not None for each in soft], counts))
        params = np.repeat([each or (1.0, 0.5, 1.0) for each in soft], counts, axis=0).T
        arrays += [index, np.concatenate((params, quantiles)).astype(np.float32)[:, index]]
    return arrays


@dataclass(frozen=True)
class SamplingMetadata:
    """What is wanted of n positions; tensors lie on the device of the logits.

    mask_id: (1,), never proposed. current_ids: (n,) the token that stands there now. sampled_index: (m,)
    which positions take a token at random, at the quantile `quantiles` (m,) of the distribution at
    `temperature` (m,), above 0; the others take the most probable one. entropy_index: (s,) of which
    positions entropy and margin are wanted. policy_index: (k,) for which positions a policy draws, None
    where there is none in the call; policy_params: (5, k) its temperature, threshold and width, and the
    two quantiles that it draws at.
    """

    mask_id: Tensor
    current_ids: Tensor
    sampled_index: Tensor
    temperature: Tensor
    quantiles: Tensor
    entropy_index: Tensor
    policy_index: Tensor | None = None
    policy_params: Tensor | None = None


def sample_proposals(logits: Tensor, wanted: SamplingMetadata) -> Tensor:
    """A row (n,) for each of `STATISTICS`, then, where a policy draws, for each of `ACTION_STATISTICS`.

    logits: (n, V) float32. The mask itself is never proposed. Confidence is a token's probability at
    temperature 1, whatever it was sampled at; the log-probability is finite where that underflows. Entropy
    and margin cost a pass over the whole distribution, and are 0 where nobody wants them.
    """
    # The largest weight is 1 and confidences near 1 stay apart, which log-sum-exp would round away.
    highest = logits.amax(-1, keepdim=True)
    weights = (logits - highest).exp_()
    total = weights.sum(-1)
    entropy, margin = torch.zeros_like(total), torch.zeros_like(total)
    if len(wanted.entropy_index):
        probability = weights[wanted.entropy_index] / total[wanted.entropy_index, None]
        best = probability.topk(2, dim=-1).values
        entropy.index_copy_(0, wanted.entropy_index, torch.special.entr(probability).sum(-1))
        margin.index_copy_(0, wanted.entropy_index, best[:, 0] - best[:, 1])
    allowed = logits.index_fill(1, wanted.mask_id, -math.inf)
    token = allowed.argmax(-1)
    if len(wanted.sampled_index):
        above = allowed[wanted.sampled_index]
        above = above - above.amax(-1, keepdim=True)
        exact = above if above.device.type == "mps" else above.double()
        tempered = exact / wanted.temperature[:, None].to(exact.dtype)
        token = token.index_copy(0, wanted.sampled_index, sample_at_quantile(tempered, wanted.quantiles))
    log_prob = (allowed.gather(1, token[:, None]) - highest).squeeze(1) - total.log()
    confidence, current = (
        weights.gather(1, ids[:, None]).squeeze(1) / total for ids in (token, wanted.current_ids)
    )
    # As in `STATISTICS`. Token ids are exact in float32 below 2 ** 24; not every device has float64.
    found = torch.stack([token.float(), confidence, log_prob, entropy, margin, current])
    if wanted.policy_index is None or wanted.policy_params is None:
        return found
    draws = found.new_zeros(len(ACTION_STATISTICS), len(logits))
    if len(wanted.policy_index):
        temperature, threshold, width, uniform, forced = wanted.policy_params
        draws[:, wanted.policy_index] = draw_actions(
            logits[wanted.policy_index],
            wanted.mask_id,
            SoftThreshold(temperature, threshold, width),
            uniform,
            forced,
        )
    return torch.cat((found, draws))
