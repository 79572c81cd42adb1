"""How a model answers a step: one call over all rows, and tokens for the positions asked for."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.config import EngineConfig, ModelConfig
from dlm_rag.engine.cache import CacheStats, KVCache, KVMemory
from dlm_rag.engine.policy import SoftThreshold, draw_actions, sample_at_quantile
from dlm_rag.engine.rules import Proposals
from dlm_rag.engine.store import open_evidence_store
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.prompt_segments import check_kept_evidence
from dlm_rag.machine import default_pool_bytes, limit_cuda_allocator
from dlm_rag.model.denoiser import AnyDenoiser, Denoiser, count_head_flops
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.layers import is_autocast
from dlm_rag.model.packed_batch import PackedRows, RowInput, pack_rows, start_gather, to_device
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.progress import format_bytes
from dlm_rag.retrieval.corpus import Passage

GIB = 2**30
LOGITS_CHUNK_POSITIONS = 1024  # logits that exist at a time: the vocabulary is the memory
STATISTICS = ("token_ids", "confidence", "log_prob", "entropy", "margin")
SIZES_AN_OCTAVE = 4  # of tokens: a tenth is padding on average, a quarter at most
MAX_TOKENS = 8192  # of a graph; a larger step keeps the device busy as it is
# What each array of `pack_rows` is as long as, and what fills it up: the last end again, or the dump, the
# place of nobody behind all others.
DUMP, LAST = "dump", "last"
PADDING: dict[str, tuple[str, int | str]] = {
    "ids": ("tokens", 0), "positions": ("tokens", 0), "places": ("tokens", DUMP), "limits": ("tokens", 1),
    "seen": ("keys", DUMP), "read": ("reads", 0), "last_limits": ("reads", 1),
    "queries": ("ends", LAST), "keys": ("ends", LAST), "reads": ("ends", LAST),
}  # fmt: skip
Head = Callable[[Tensor], Any]  # what makes proposals of states (n, hidden)


@dataclass(frozen=True)
class DecoderStats:
    """What a decoder, or many of them, work with, in words; what they have reused and compiled."""

    runtime: str
    cache_stats: CacheStats
    compiled_graphs: int | None = None
    store: str = ""  # how the evidence store is used, in words; empty without one

    def __add__(self, other: "DecoderStats") -> "DecoderStats":
        """Both together; `runtime` is the same for decoders of one job."""
        counts = zip(astuple(self.cache_stats), astuple(other.cache_stats), strict=True)
        graphs = [n for n in (self.compiled_graphs, other.compiled_graphs) if n is not None]
        summed = CacheStats(*map(sum, counts))
        return DecoderStats(self.runtime, summed, sum(graphs) if graphs else None, self.store)

    def describe(self) -> str:
        """In words for a person."""
        reuse, parts = self.cache_stats, [self.runtime]
        if reuse.requested_tokens:
            parts[0] += f", {reuse.reused_share:.1%} of it reused"
        if self.store:
            read = f"from files ({format_bytes(reuse.store_bytes)}, {reuse.store_seconds:.1f} s)"
            counts = {"on the device": reuse.device_segments, read: reuse.store_segments}
            found = [f"{count:,} {source}" for source, count in counts.items() if count]
            parts += [f"passages: {', '.join([*found, f'{reuse.encoded_segments:,} encoded'])}", self.store]
        used = "; ".join(filter(None, parts))
        if reuse.evicted_segments:
            used += f", {reuse.evicted_segments:,} passages left the pool (engine.prefix_cache_gib)"
        return used if self.compiled_graphs is None else f"{used}, {self.compiled_graphs} graphs compiled"


class ModelRunner:
    """A model as the loop knows it: it is shown the rows that are to take a step, and proposes."""

    denoiser: AnyDenoiser
    cache: KVCache | None = None
    cache_stats: CacheStats  # what was reused since the last `reset_cache`

    @property
    def shape(self) -> DenoiserConfig:
        """Lengths of canvas, blocks, context and passages."""
        return self.denoiser.config

    def reset_cache(self) -> None:
        """Drops all keys and values; to be called when the denoiser's weights have changed."""
        raise NotImplementedError

    def propose(self, inputs: Sequence[RowInput]) -> Callable[[], list[Proposals]]:
        """Launches a step; what is returned waits for the device, and returns the proposals for the
        positions of each row, which are the same for a row whatever the others are."""
        raise NotImplementedError

    def score(self, inputs: Sequence[RowInput]) -> list[float]:
        """Returns, for each row, the mean log-probability in nats of the tokens that its positions have."""
        raise NotImplementedError

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
        self.denoiser, self._engine = denoiser, engine
        self._excluded_ids = list_excluded_ids(denoiser, mask_id)
        limit_cuda_allocator(engine.memory_gib, denoiser.device)
        if engine.compile:
            denoiser.compile_layers()
        self.reset_cache()

    def reset_cache(self) -> None:
        engine, denoiser = self._engine, self.denoiser
        for name in ("cache", "_graphs"):  # freed first: the budget is a share of what is free
            vars(self).pop(name, None)
        if engine.prefix_cache_gib is None:
            limit = None if engine.memory_gib is None else engine.memory_gib * GIB
            weights = sum(p.nbytes for p in denoiser.parameters())
            budget = default_pool_bytes(denoiser.device, limit, weights)
        else:
            budget = int(engine.prefix_cache_gib * GIB)
        memory = KVMemory(denoiser, engine.cache_dtype, budget)
        store = open_evidence_store(engine, denoiser, memory.token) if budget else None
        self.cache = KVCache(memory, store)
        self.cache_stats = self.cache.cache_stats
        check_step_graphs(engine, self.shape, denoiser.backend, denoiser.layer_devices)
        self._graphs = StepGraphs(denoiser, memory) if engine.cuda_graphs else None

    def release(self, row: int) -> None:
        self.cache.release(row)

    @torch.inference_mode()
    def propose(self, inputs: Sequence[RowInput]) -> Callable[[], list[Proposals]]:
        with profile_stage("denoise"):
            wanted, flags = collect_sampling_arrays(inputs)
        greedy = len(wanted) == 1 and not any(flags)
        sent = [] if greedy else wanted  # greedy sampling reads no numbers
        found, there = self._encode(inputs, sent, self._sample if greedy else None)
        with profile_stage("denoise"):
            if isinstance(found, Tensor):
                bars = [*sent[1:2], *there[1:]]
                found = self._sample(found, there[0] if there else None, flags, bars)
            return gather_proposals(inputs, found)

    def _sample(
        self, states: Tensor, numbers: Tensor | None = None, flags: Sequence[bool] = (False,) * 3,
        bars: Any = (),
    ) -> list[dict[str, Tensor]]:  # fmt: skip
        """What `sample_proposals` says of states (n, hidden), in chunks; bars: what `bar_tokens` takes."""
        found = list[dict[str, Tensor]]()
        if numbers is None:  # which nobody reads
            numbers = states.new_empty((6, len(states)))
        chunks = (states.split(LOGITS_CHUNK_POSITIONS), numbers.split(LOGITS_CHUNK_POSITIONS, dim=1))
        for own, part in zip(*chunks, strict=True):
            logits = self.denoiser.compute_token_logits(own).float()
            bar_tokens(logits, len(found) * LOGITS_CHUNK_POSITIONS, bars)
            found.append(sample_proposals(logits, self._excluded_ids, part, *flags))
        return found

    def _encode(
        self, inputs: Sequence[RowInput], more: Sequence[NDArray[Any]], head: Head | None = None
    ) -> tuple[Any, Sequence[Tensor]]:
        """The states (n, hidden) that are asked for, or what a graph's `head` made of them; and `more`."""
        denoiser = self.denoiser
        if denoiser.compute_dtype != self.cache.memory.dtype:
            self.reset_cache()  # an autocast has begun or ended since
        with profile_stage("encode_evidence"):
            runs, context = self.cache.prepare_rows(inputs)
        with profile_stage("denoise"):
            read = [[] if run.row is None else run.locate(inputs[run.row].states) for run in runs]
            send = None if self._graphs is None else self._graphs.send
            rows = pack_rows([run.segment for run in runs], denoiser.device, read, context, more, send)
            found = denoiser.encode(rows)[0] if self._graphs is None else self._graphs.run(rows, head)
            self.cache.store_computed()
        return found, rows.extra_tensors

    @torch.inference_mode()
    def score(self, inputs: Sequence[RowInput]) -> list[float]:
        ids = [np.array(shown.chain.ids)[shown.states + 1] for shown in inputs]
        hidden, (targets,) = self._encode(inputs, [np.concatenate(ids)])
        with profile_stage("denoise"):
            chunks = (hidden.split(LOGITS_CHUNK_POSITIONS), targets.split(LOGITS_CHUNK_POSITIONS))
            losses = [
                F.cross_entropy(self.denoiser.compute_token_logits(states).float(), part, reduction="none")
                for states, part in zip(*chunks, strict=True)
            ]
            by_row = torch.cat(losses).cpu().split([*map(len, ids)])
            return [-float(own.mean()) for own in by_row]


def list_excluded_ids(denoiser: Denoiser, mask_id: int) -> Tensor:
    """The tokens (e,) that are never proposed; an autoregressive model's mask may be beyond V."""
    never = [n for n in (mask_id, *denoiser.config.excluded_token_ids) if n < denoiser.config.vocab_size]
    ids = torch.empty(len(never), dtype=torch.long, device=denoiser.device)
    for place, token in enumerate(never):
        ids[place : place + 1].fill_(token)  # on the device: what is sent is waited for
    return ids


def collect_sampling_arrays(inputs: Sequence[RowInput]) -> tuple[list[NDArray[Any]], list[bool]]:
    """The numbers that `sample_proposals` takes, of all positions that are asked for, then what
    `collect_bars` says of them; and the flags."""
    counts = [len(shown.positions) for shown in inputs]
    numbers, end = np.zeros((6, sum(counts)), np.float32), 0
    numbers[3:] = 1.0  # of rows that draw nothing
    for shown, count in zip(inputs, counts, strict=True):
        part = numbers[:, end : (end := end + count)]
        if shown.quantiles is not None:
            part[0], part[1:3] = shown.temperature, shown.quantiles
            part[3:] = np.array(shown.soft_threshold or (1.0, 0.5, 1.0))[:, None]
    spread, acts = (any(getattr(s, name) for s in inputs) for name in ("needs_entropy", "soft_threshold"))
    flags = [spread, bool(numbers[0].any()), acts]
    return [numbers, *collect_bars(counts, [shown.barred for shown in inputs])], flags


def collect_bars(counts: Sequence[int], barred: Sequence[NDArray[np.bool_] | None]) -> list[NDArray[Any]]:
    """Of rows with so many positions, the first (b,) of those with barred tokens; and these (b, V)."""
    firsts = zip(np.cumsum(counts) - counts, barred, strict=True)
    return [*map(np.array, zip(*((at, bar) for at, bar in firsts if bar is not None), strict=True))]


def bar_tokens(logits: Tensor, start: int, bars: Sequence[Any]) -> Tensor:
    """Sets the logits (n, V) of tokens that are barred to minus infinity, and returns them.

    start: of all positions that are asked for, the number of the first of these. bars: the two arrays of
    `collect_bars` as tensors, before them the first on the host too; or none.
    """
    if bars:
        places, numbers, barred = bars
        here = slice(*np.searchsorted(places, (start, start + len(logits))))
        rows = numbers[here] - start
        logits[rows] = logits[rows].masked_fill(barred[here], -math.inf)
    return logits


def sample_proposals(
    logits: Tensor, excluded_ids: Tensor, numbers: Tensor, spread: bool, samples: bool, acts: bool
) -> dict[str, Tensor]:
    """The fields (n,) of `Proposals` by name; where a policy draws, what `draw_actions` says, too.

    logits: (n, V) float32. excluded_ids: (e,) tokens that are never proposed, the mask among them. numbers:
    (6, n) the temperature of a token, 0 for the most probable one; the quantiles to draw at, the second
    where a policy is forced; of a policy the temperature, threshold and width. spread, samples, acts:
    whether some positions want entropy and margin (else 0: they cost a pass over the whole distribution), a
    token at random, what a policy draws. Confidence is a token's probability at temperature 1, whatever it
    was sampled at; the log-probability is finite where that underflows.
    """
    # The largest weight is 1 and confidences near 1 stay apart, which log-sum-exp would round away.
    highest = logits.amax(-1, keepdim=True)
    weights = (logits - highest).exp_()
    total = weights.sum(-1)
    temperature, uniform, forced, *soft = numbers
    entropy, margin = torch.zeros_like(total), torch.zeros_like(total)
    if spread:
        probability = weights / total[:, None]
        first, second = probability.topk(2, dim=-1).values.unbind(-1)
        entropy, margin = torch.special.entr(probability).sum(-1), first - second
    allowed = logits.index_fill(1, excluded_ids, -math.inf)
    token = allowed.argmax(-1)
    if samples:
        above = allowed - allowed.amax(-1, keepdim=True)
        exact = above if above.device.type == "mps" else above.double()
        divisor = torch.where(temperature > 0, temperature, 1.0).to(exact.dtype)
        drawn = sample_at_quantile(exact / divisor[:, None], uniform)
        token = torch.where(temperature > 0, drawn, token)
    log_prob = (allowed.gather(1, token[:, None]) - highest).squeeze(1) - total.log()
    confidence = weights.gather(1, token[:, None]).squeeze(1) / total
    found = dict(zip(STATISTICS, (token, confidence, log_prob, entropy, margin), strict=True))
    if acts:
        found |= draw_actions(logits, excluded_ids, SoftThreshold(*soft), uniform, forced)
    return found


def gather_proposals(
    inputs: Sequence[RowInput], found: Sequence[Mapping[str, Tensor]]
) -> Callable[[], list[Proposals]]:
    """Starts to copy what `sample_proposals` says; what is returned waits, and returns rows their own."""
    names, at = [*found[0]], np.concatenate([shown.positions for shown in inputs])
    ends = [*accumulate((len(shown.positions) for shown in inputs), initial=0)]
    wait = start_gather([torch.cat([chunk[name] for chunk in found]) for name in names])

    def finish() -> list[Proposals]:
        with profile_stage("denoise"):  # of a graph come more, of no row
            arrays = {name: found[: len(at)] for name, found in zip(names, wait(), strict=True)}
        records = Proposals.from_arrays(positions=at, **arrays).records
        return [Proposals(records[begin:end]) for begin, end in pairwise(ends)]

    return finish


def round_up_size(count: int, sizes_an_octave: int = SIZES_AN_OCTAVE) -> int:
    """The next of so many sizes between powers of two; at least 8."""
    count = max(8, count)
    unit = max(1, (1 << ((count - 1).bit_length() - 1)) // sizes_an_octave)
    return -(-count // unit) * unit


def check_unread_settings(model: ModelConfig, engine: EngineConfig, shape: DenoiserConfig) -> None:
    """Raises `ConfigError` for settings that have no effect on this checkpoint."""
    if model.block_size is not None and shape.decode_modes == ("autoregressive",):
        raise ConfigError("model.block_size has no effect on an autoregressive model: leave it out")
    if shape.adapter is not None:
        shape.adapter.check_settings(model, engine)
    else:
        check_kept_evidence(engine, shape, model.evidence_layout or shape.evidence_layout)


Graph = tuple[list[Tensor], Callable[[], Any]]  # what a captured step reads, and what replays it


def check_step_graphs(
    engine: EngineConfig, shape: DenoiserConfig, attention: str, devices: Collection[torch.device]
) -> None:
    """Raises `ConfigError` where `engine.cuda_graphs` is set and no graph can hold the model's layers, on
    these devices and with this kernel of attention."""
    kernel = attention == "indexed" and engine.cache_dtype == "auto"
    layers = shape.experts is None and len({*devices}) == 1
    if engine.cuda_graphs and not (kernel and layers):
        raise ConfigError(
            "engine.cuda_graphs=true needs model.attn_implementation=indexed, engine.cache_dtype=auto, one "
            "device, and no mixture of experts"
        )


class StepGraphs:
    """The layers of a step as CUDA graphs: captured once for each size, replayed for any rows of that size.

    They are for one memory of keys and values, and to be made anew when weights are replaced. Rows stay
    ragged: what is missing to the size of a graph is tokens of no row, rows without tokens, and a dump that
    nobody sees as their places. All that a step reads travels in one copy. A graph knows what the host knew
    when it was captured, so its key holds all of that: the sizes, the longest row of tokens and of those
    that are read, which arrays there are, whether autocast is on, whether the head is in it. All graphs go
    when the memory has grown. Sampling that is not greedy stays eager; so do steps of over `MAX_TOKENS`.

    On a CPU the layers run over the same padded tensors without a graph, which is how the tests see them.
    """

    def __init__(self, denoiser: Denoiser, memory: KVMemory) -> None:
        self._denoiser, self._memory = denoiser, memory
        self._graphs: dict[Any, Graph] = {}
        # Rows on their way: the key of their graph, tokens that are read, the longest rows, tensors.
        self._sent: tuple[Any, int, list[int], list[Tensor]] | None = None
        self._capacity = 0  # of the memory that the graphs read and write
        self._pool: Any = None

    def send(self, arrays: Mapping[str, NDArray[Any]], more: Sequence[NDArray[Any]]) -> list[Tensor]:
        """The arrays of `pack_rows` on the device, padded to the sizes of a graph if it is to have one;
        behind them, in the same copy, what no graph reads."""
        device = self._denoiser.device
        if len(arrays["ids"]) > MAX_TOKENS:
            self._sent = None
            return to_device([*arrays.values(), *more], device)
        if self._capacity != self._memory.capacity:  # it moves when it grows, and its dump does
            self._graphs.clear()
            self._capacity = self._memory.capacity
        sizes = {
            "tokens": round_up_size(len(arrays["ids"])),
            "keys": round_up_size(int(arrays["keys"][-1]) + 1, 1),
            "reads": round_up_size(len(arrays["read"]), 1),
            "ends": round_up_size(len(arrays["queries"]) - 1, 1) + 1,
        }
        padded = {name: self._pad(name, array, sizes) for name, array in arrays.items()}
        longest = [round_up_size(int(np.diff(arrays[name]).max()), 1) for name in ("queries", "reads")]
        found = to_device([*padded.values(), *more], device)
        key = *sizes.values(), *longest, *padded, is_autocast(self._denoiser.embed_tokens.weight)
        self._sent = key, len(arrays["read"]), longest, found[: len(padded)]
        return found

    def run(self, rows: PackedRows, head: Head | None) -> Any:
        """The hidden states that are read, (n, hidden), of the rows that were sent last; with `head` what
        it makes of them, or more of them, if they have a graph."""
        denoiser = self._denoiser
        if self._sent is None:
            return denoiser.encode(rows)[0]
        key, reads, longest, tensors = self._sent
        key, work = (*key, head is not None), denoiser.flop_count
        held = self._graphs.get(key)
        if held is None:
            held = self._graphs[key] = self._capture(rows, longest, tensors, head)
        elif denoiser.device.type == "cuda":  # all begin one buffer, in the same order
            size = tensors[-1].storage_offset() * tensors[-1].itemsize + tensors[-1].nbytes
            new, old = (
                x.new_empty(0, dtype=torch.uint8).set_(x.untyped_storage(), 0, (size,), (1,))
                for x in (tensors[0], held[0][0])
            )
            old.copy_(new)
        else:
            for new, old in zip(tensors, held[0], strict=True):
                old.copy_(new)
        found = held[1]()
        denoiser.flop_count = work
        denoiser.count_work(rows)
        if head is None:
            return found[:reads]
        denoiser.flop_count += count_head_flops(denoiser.config, reads, denoiser.compute_dtype.itemsize)
        return found

    def _pad(self, name: str, array: NDArray[Any], sizes: Mapping[str, int]) -> NDArray[Any]:
        kind, value = PADDING[name]
        if isinstance(value, str):
            value = self._memory.capacity if value == DUMP else array[-1]
        return np.concatenate((array, np.full(sizes[kind] - len(array), value, dtype=array.dtype)))

    def _capture(
        self, rows: PackedRows, longest: list[int], tensors: list[Tensor], head: Head | None
    ) -> Graph:
        """Captures a step over these tensors, after one run that sets up kernels and libraries."""
        sight, last = rows.attention_metadata, rows.last_layer_metadata
        whole = replace(sight, query_lengths=(longest[0],))
        top = whole if last is sight else replace(last, query_lengths=(longest[1],))
        shown = replace(rows, attention_metadata=whole, last_layer_metadata=top)

        def compute() -> Any:
            states = self._denoiser.encode(shown)[0]
            return states if head is None else head(states)

        weights = self._denoiser.embed_tokens.weight
        if not weights.is_cuda:
            return tensors, compute
        if not self._graphs:  # torch refuses a pool whose graphs are gone
            self._pool = torch.cuda.graph_pool_handle()
        compute()
        graph = torch.cuda.CUDAGraph()
        # Its casts of weights are the graph's own: those that autocast caches go when it ends.
        cast = torch.autocast("cuda", enabled=is_autocast(weights), cache_enabled=False)
        # Other threads may search on the device meanwhile, or wait for a copy.
        with cast, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = compute()

        def replay() -> Any:
            graph.replay()
            return output

        return tensors, replay
