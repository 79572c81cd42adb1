"""The memory that decoding takes on a device, computed before weights are read, and a budget for it.

Weights; slots of keys and values for the rows of the batch; what a step computes on the way. What is left
of a budget is the pool's. Bytes of a token on the way are found by running the real code on tensors
without contents (`model/memory_tracker.py`); the rest is counted from shapes. Bounds, not means: every
row has its longest prompt, every passage its full length.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import partial

import torch

from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.decode.model_runner import (
    GIB,
    LOGITS_CHUNK_POSITIONS,
    DecodeBudget,
    SamplingMetadata,
    sample_proposals,
)
from dlm_rag.diffusion.commit_rules import samples_actions
from dlm_rag.diffusion.copy_crf import estimate_crf_bytes
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.batch_kv_cache import PREFILL_SCRATCH_TOKENS
from dlm_rag.evidence.segment_kv_cache import has_unified_memory, measure_free_bytes
from dlm_rag.evidence.truncation import ContextBudget
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.evidence_layouts import EVIDENCE_LAYOUTS
from dlm_rag.model.kv_store import round_up_to_page
from dlm_rag.model.layers import count_weight_bytes
from dlm_rag.model.memory_tracker import (
    RESERVED_MEMORY_FRACTION,
    measure_simulated_peak,
    replace_with_empty_weights,
)
from dlm_rag.model.packed_batch import Segment, pack_rows


@dataclass(frozen=True)
class LongestRow:
    """The longest row: tokens of each segment that sees itself alone, and of what runs at every step."""

    segment_tokens: tuple[int, ...]
    step_tokens: int
    canvas_tokens: int
    has_kv_slot: bool  # whether it has a slot: all but a canvas that runs with its whole prompt

    @classmethod
    def from_budget(
        cls, room: ContextBudget, shape: DenoiserConfig, question: int | None, passages: tuple[int, int]
    ) -> "LongestRow":
        """In that room; question: tokens of the longest prompt without evidence, None: not known.

        passages: how many, and tokens of the longest.
        """
        count, longest = passages
        block = shape.block_size or 0
        canvas = room.canvas_length + block  # blocks may have to be whole
        own = room.context_length - room.canvas_length
        if EVIDENCE_LAYOUTS[room.layout].separate_passages:
            most = own - room.passage_length
            asked = most if question is None else min(question, most)
            return cls((min(room.passage_length, longest),) * count + (asked,), canvas + 1, canvas, True)
        prompt = own if question is None else min(own, question + count * longest)
        if not (EVIDENCE_LAYOUTS[room.layout].runs_with_canvas or block):
            return cls((prompt,), canvas + 1, canvas, True)
        return cls((), prompt + canvas, canvas, bool(block))

    @property
    def total_tokens(self) -> int:
        """That it sees, its own included."""
        return sum(self.segment_tokens) + self.step_tokens


@dataclass(frozen=True)
class DecodeMemory:
    """Bytes on one device, as functions of the rows in the batch."""

    row: LongestRow
    weight_bytes: int
    kv_bytes_per_token: int  # keys and values of a token, in all layers
    activation_bytes_per_token: float  # what a token of a call takes on its way through a layer
    logit_bytes_per_position: float  # what a position takes whose logits are read
    # What every position of a canvas takes in addition where neighbours are to agree.
    crf_bytes_per_position: float = 0.0
    has_mask: bool = False  # whether attention in a step takes a mask

    @classmethod
    def from_config(
        cls, shape: DenoiserConfig, dtype: torch.dtype, decode: DecodeConfig, row: LongestRow
    ) -> "DecodeMemory":
        """For a denoiser with weights and arithmetic in `dtype`; nothing is allocated."""
        token, position = _measure_activation_bytes(shape, dtype, decode)
        asked = linked = 0
        if decode.copy_penalty is not None:
            asked, linked = estimate_crf_bytes(shape.vocab_size, row.total_tokens)
        return cls(
            row, count_weight_bytes(shape, dtype.itemsize), count_kv_bytes(shape, dtype.itemsize), token,
            position + asked, linked, bool(shape.block_size or shape.attention_patterns),
        )  # fmt: skip

    def scratch_tokens(self, rows: int) -> int:
        """Tokens of room for segments that run in the same call as the rows."""
        new = rows * sum(map(round_up_to_page, self.row.segment_tokens))
        return min(round_up_to_page(PREFILL_SCRATCH_TOKENS), new)

    def kv_slot_bytes(self, rows: int) -> float:
        """Keys and values of the rows, and of what is being computed for them."""
        tokens = rows * round_up_to_page(self.row.total_tokens) + self.scratch_tokens(rows)
        return self.kv_bytes_per_token * tokens * self.row.has_kv_slot

    def step_bytes(self, rows: int) -> float:
        """The most that is alive during a step, in addition to weights, slots and pool."""
        row, kv, token = self.row, self.kv_bytes_per_token, self.activation_bytes_per_token
        longest, new = max((*row.segment_tokens, 0)), rows * sum(row.segment_tokens)
        call = token * (rows * row.step_tokens + min(PREFILL_SCRATCH_TOKENS, new))
        if self.has_mask:  # a byte for each query and key, kept for all layers
            call += rows * row.step_tokens * row.total_tokens
        asked = rows * row.canvas_tokens
        read = self.logit_bytes_per_position * min(LOGITS_CHUNK_POSITIONS, asked)
        read += self.crf_bytes_per_position * asked
        # Too many new segments run by themselves: their keys and values exist twice for a moment.
        apart = min(new, max(PREFILL_SCRATCH_TOKENS, longest)) if new > PREFILL_SCRATCH_TOKENS else 0
        prefill = apart * (kv + max(token, kv))
        # A slot whose segments change places; what enters the pool before something leaves it.
        moved = kv * row.total_tokens * row.has_kv_slot
        return max(call, read, prefill, moved) + kv * longest

    def bytes_without_pool(self, rows: int) -> float:
        """All but the pool."""
        return self.weight_bytes + self.kv_slot_bytes(rows) + self.step_bytes(rows)

    def max_batch_size(self, room: float) -> int:
        """The largest batch that fits into so many bytes; 0 where not one row does."""
        return bisect_right(range(1, 2**16 + 1), room, key=self.bytes_without_pool)


def count_kv_bytes(shape: DenoiserConfig, size: int) -> int:
    """Bytes of the keys and values of a token in all layers; size: bytes of a number."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * size


def _measure_activation_bytes(
    shape: DenoiserConfig, dtype: torch.dtype, decode: DecodeConfig
) -> tuple[float, float]:
    """Bytes that one more token in a call takes, and one more position whose logits are read."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # What is alive at a time is of one layer; the last is spared what nobody reads.
    dense = 0 if shape.experts is None else shape.dense_layers
    small = replace(shape, num_hidden_layers=min(shape.num_hidden_layers, dense + 2))
    with torch.device("meta"):
        denoiser = Denoiser(small).to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        denoiser = replace_with_empty_weights(denoiser)
        less, more = (measure_simulated_peak(partial(_call_layers, denoiser, n)) for n in (128, 256))
        few, many = (measure_simulated_peak(partial(_read_logits, denoiser, decode, n)) for n in (64, 128))
    return (more - less) / (3 * 128), (many - few) / 64


def _call_layers(denoiser: Denoiser, length: int) -> None:
    """A call of three rows that are not alike."""
    lengths = [length, length + 1, length + 2]
    segments = [Segment((0,) * n, 0) for n in lengths]
    denoiser.encode(pack_rows(segments, denoiser.device, [range(n) for n in lengths]))


def _read_logits(denoiser: Denoiser, decode: DecodeConfig, count: int) -> None:
    """Reads so many positions in the ways that the settings ask for."""
    hidden = torch.empty(count, denoiser.config.hidden_size, dtype=denoiser.dtype)
    places = torch.empty(count, dtype=torch.int64)
    drawn, numbers = (places, torch.empty(count)) if decode.temperature else (places[:0], torch.empty(0))
    sampled = (places, torch.empty(5, count)) if samples_actions(decode) else (None, None)
    mask_id = torch.zeros(1, dtype=torch.int64)
    wanted = SamplingMetadata(mask_id, places, drawn, numbers, numbers, places, *sampled)
    sample_proposals(denoiser.compute_token_logits(hidden).float(), wanted)


def plan_decode_budget(
    memory: DecodeMemory, engine: EngineConfig, device: torch.device, rows: int
) -> DecodeBudget:
    """The room of a decoder of so many rows under `engine.memory_gib`, before its weights are read.

    On CUDA a share is left for what torch's allocator does not see. Raises `ConfigError` where the budget
    is more than what is free, or does not hold the batch.
    """
    assert engine.memory_gib is not None
    given, free = engine.memory_gib * GIB, measure_free_bytes(device)
    budget = f"engine.memory_gib={engine.memory_gib:g}"
    if given > free:
        raise ConfigError(
            f"{budget} is more than the {free / GIB:.1f} GiB that are free on this {device.type}: lower "
            "it, or wait until others have ended"
        )
    room = given * (1 - RESERVED_MEMORY_FRACTION if device.type == "cuda" else 1)
    host = engine.cpu_offload_gib * GIB if has_unified_memory(device) else 0.0
    left = room - memory.bytes_without_pool(rows) - host
    asked = 0 if engine.prefix_cache_gib is None else int(engine.prefix_cache_gib * GIB)
    if left < asked:
        most = memory.max_batch_size(room - host - asked)
        kept = f", pools {_gib(asked + host)}" if asked + host else ""
        remedy = f"decode.batch_size={most} fits" if most else "not one question fits"
        raise ConfigError(
            f"{budget} is too little for decode.batch_size={rows}: weights take "
            f"{_gib(memory.weight_bytes)}, keys and values of the batch "
            f"{_gib(memory.kv_slot_bytes(rows))}, a step {_gib(memory.step_bytes(rows))}{kept}; {remedy}"
        )
    return DecodeBudget(
        int(left) if engine.prefix_cache_gib is None else asked, rows,
        memory.row.total_tokens * memory.row.has_kv_slot,
        memory.scratch_tokens(rows) * memory.row.has_kv_slot,
    )  # fmt: skip


def _gib(number: float) -> str:
    return f"{number / GIB:.2g} GiB" if number > GIB / 100 else f"{number / 2**20:.2g} MiB"


def limit_cuda_allocator(engine: EngineConfig, device: torch.device) -> None:
    """Makes torch's own allocator refuse more than the budget, where it can: on CUDA."""
    if engine.memory_gib is not None and device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, engine.memory_gib * GIB / whole), device)
