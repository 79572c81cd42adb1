"""How a model answers a step: a masked-diffusion denoiser in one call over all rows."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import chain, islice

import numpy as np
import torch

from dlm_rag.config import EngineConfig
from dlm_rag.engine.cache import CacheRequest, CacheStats, ForwardSpan, KVCache
from dlm_rag.engine.memory import KVFormat
from dlm_rag.engine.rules import STATISTICS, Proposals
from dlm_rag.engine.sampling import (
    ModelInput,
    SamplingMetadata,
    collect_sampling_metadata,
    sample_proposals,
    split_logit_chunks,
)
from dlm_rag.engine.store import open_evidence_store
from dlm_rag.evidence.prompt_segments import LaidOutPrompt
from dlm_rag.machine import default_pool_bytes, limit_cuda_allocator
from dlm_rag.model.denoiser import AnyDenoiser, Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.device_io import to_host
from dlm_rag.model.packed_batch import pack_rows
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.retrieval.corpus import Passage

GIB = 2**30


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
        used += f"; passages: {reuse.describe_tiers()}; {self.store}" if self.store else ""
        if reuse.evicted_segments:
            used += f", {reuse.evicted_segments:,} passages left the pool (engine.prefix_cache_gib)"
        return used if self.compiled_graphs is None else f"{used}, {self.compiled_graphs} graphs compiled"


class ModelRunner:
    """A model as the loop knows it: it is shown the rows that are to take a step, and proposes."""

    denoiser: AnyDenoiser
    cache: KVCache | None = None

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

    def release(self, row: int) -> None:
        """The row of this number takes no more steps."""

    def order_passages(self, before: Sequence[Passage], found: list[Passage]) -> list[Passage]:
        """The passages that were found in the order of the prompt; before: those that it holds."""
        return found


class MaskedModelRunner(ModelRunner):
    """A masked-diffusion denoiser: one call over all rows, logits at the positions asked for only."""

    denoiser: Denoiser
    cache: KVCache

    def __init__(self, denoiser: Denoiser, mask_id: int, engine: EngineConfig) -> None:
        self.denoiser, self._engine, self._mask_id = denoiser, engine, mask_id
        limit_cuda_allocator(engine.memory_gib, denoiser.device)
        if engine.compile:
            denoiser.compile_layers()
        self.cache = KVCache(denoiser, KVFormat(denoiser), 0)
        self.reset_cache()

    def reset_cache(self) -> None:
        engine, format = self._engine, KVFormat(self.denoiser, self._engine.cache_dtype)
        del self.cache  # what was kept is freed first: the budget is a share of what is free
        if engine.prefix_cache_gib is None:
            limit = None if engine.memory_gib is None else engine.memory_gib * GIB
            weights = sum(p.nbytes for p in self.denoiser.parameters())
            budget = default_pool_bytes(self.denoiser.device, limit, weights)
        else:
            budget = int(engine.prefix_cache_gib * GIB)
        store = open_evidence_store(engine, self.denoiser) if budget else None
        self.cache = KVCache(self.denoiser, format, budget, store)
        self._dtype = self.denoiser.compute_dtype

    @property
    def cache_stats(self) -> CacheStats:
        return self.cache.cache_stats

    def prefetch(self, laid: LaidOutPrompt) -> None:
        self.cache.prefetch(laid)

    def release(self, row: int) -> None:
        self.cache.release(row)

    @torch.inference_mode()
    def propose(self, views: Sequence[ModelInput]) -> list[Proposals]:
        if self.denoiser.compute_dtype != self._dtype:
            self.reset_cache()  # an autocast has begun or ended since
        with profile_stage("encode_evidence"):
            runs, context = self.cache.prepare_rows([self._cache_request(view) for view in views])
        with profile_stage("denoise"):
            read = [[] if run.row is None else self._read_tokens(run, views[run.row]) for run in runs]
            chunks, policy = list(split_logit_chunks(views)), any(view.soft_threshold for view in views)
            wanted = [
                collect_sampling_metadata(chunk, self._mask_id, self.shape, policy) for chunk in chunks
            ]
            segments = [run.segment for run in runs]
            rows = pack_rows(segments, self.denoiser.device, read, context, add=[*chain(*wanted)])
            hidden, _ = self.denoiser.encode(rows)
            self.cache.store_computed()
            sizes = [sum(len(view.positions) for view in chunk) for chunk in chunks]
            tensors, found = iter(rows.extra_tensors), []
            for states, sampling in zip(hidden.split(sizes), wanted, strict=True):
                metadata = SamplingMetadata(*islice(tensors, len(sampling)))
                logits = self.denoiser.compute_token_logits(states).float()
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
        first = int(laid.find_states(asked, len(view.canvas), self.shape.shifted)[0])
        return CacheRequest(view.row, laid, segment, finished, first)

    def _read_tokens(self, run: ForwardSpan, view: ModelInput) -> list[int]:
        """The tokens of a run whose states predict positions that are asked for."""
        states = view.laid_out_prompt.find_states(view.positions, len(view.canvas), self.shape.shifted)
        at = states - run.begin
        return at[(at >= 0) & (at < len(run.segment.ids))].tolist()
