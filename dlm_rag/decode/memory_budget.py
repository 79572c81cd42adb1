"""The memory that decoding takes on a device, computed before weights are read, and a budget for it.

Weights; slots of keys and values for the rows of the batch; what a step computes on the way. What is left
of a budget is the pool's. Bytes of a token on the way are found by running the real code on tensors
without contents (`model/memory_tracker.py`); the rest is counted from shapes. Bounds, not means: every
row has its longest prompt, every passage its full length.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import partial

import torch

from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.decode.model_runner import GIB, DecodeBudget
from dlm_rag.decode.sampling import LOGITS_CHUNK_POSITIONS, SamplingMetadata, sample_proposals
from dlm_rag.diffusion.commit_rules import samples_actions
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.batch_kv_cache import PREFILL_SCRATCH_TOKENS
from dlm_rag.evidence.kv_tiers import round_up_to_unit
from dlm_rag.evidence.segment_kv_cache import has_unified_memory, measure_free_bytes
from dlm_rag.evidence.truncation import ContextBudget
from dlm_rag.model.attention import RAGGED_KERNELS
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.evidence_layouts import EVIDENCE_LAYOUTS
from dlm_rag.model.kv_format import SCALE_BYTES, has_plain_key_bias
from dlm_rag.model.kv_store import round_up_to_page
from dlm_rag.model.memory_tracker import (
    RESERVED_MEMORY_FRACTION,
    measure_simulated_peak,
    replace_with_empty_weights,
)
from dlm_rag.model.packed_batch import Segment, pack_rows
from dlm_rag.model.quantize import count_scratch_bytes, count_weight_bytes


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
class SharedSegmentBytes:
    """What rows take whose segments lie in the pool alone.

    token_bytes: keys and values of a token, as the pool keeps them. gathered_bytes: of a token that a row
    sees, in the one layer that is under way. block_size: of finished blocks, which stay in slots.
    """

    token_bytes: int
    gathered_bytes: int
    block_size: int | None

    @classmethod
    def from_config(
        cls, shape: DenoiserConfig, dtype: torch.dtype, attention: str, engine: EngineConfig
    ) -> "SharedSegmentBytes | None":
        """None where a kernel, or a decoder without a pool, does not share segments."""
        if attention not in RAGGED_KERNELS or engine.prefix_cache_gib == 0:
            return None
        values, packed = shape.head_dim * dtype.itemsize, engine.cache_dtype == "int8"
        width = shape.head_dim + SCALE_BYTES if packed else values
        heads = 2 * shape.num_key_value_heads
        # A bias is turned to the token's position in float32, of which four tensors are alive.
        bias = shape.num_key_value_heads * shape.head_dim * 4 * 4 * has_plain_key_bias(shape)
        return cls(
            shape.num_hidden_layers * heads * width,
            heads * values + (heads * width + bias) * packed,
            shape.block_size,
        )

    def step_bytes(self, row: "LongestRow") -> int:
        """Of a row, of which each block runs as a row of its own; what slots hold is there twice."""
        runs = 1 if self.block_size is None else -(-row.step_tokens // self.block_size) + 1
        kept = row.step_tokens * (self.block_size is not None)
        return self.gathered_bytes * runs * (row.total_tokens + kept)


@dataclass(frozen=True)
class DecodeMemory:
    """Bytes on one device, as functions of the rows in the batch."""

    row: LongestRow
    weight_bytes: int
    kv_bytes_per_token: int  # keys and values of a token, in all layers
    activation_bytes_per_token: float  # what a token of a call takes on its way through a layer
    logit_bytes_per_position: float  # what a position takes whose logits are read
    mask_bytes: int = 0  # of a query and a key, where attention takes a mask: added, and as a rule
    shared: SharedSegmentBytes | None = None  # where rows read segments in place
    dequantized_bytes: int = 0  # of the one layer whose weights are dequantised at a time

    @classmethod
    def from_config(
        cls, shape: DenoiserConfig, dtype: torch.dtype, decode: DecodeConfig, row: LongestRow,
        shared: SharedSegmentBytes | None = None, quantize: str = "none",
    ) -> "DecodeMemory":  # fmt: skip
        """For a denoiser with weights and arithmetic in `dtype`; nothing is allocated."""
        token, position = _measure_activation_bytes(shape, dtype, decode)
        masked = bool(shape.block_size)
        return cls(
            row, count_weight_bytes(shape, dtype.itemsize, quantize), count_kv_bytes(shape, dtype.itemsize),
            token, position, masked * (dtype.itemsize + 1), shared,
            count_scratch_bytes(shape, quantize),
        )  # fmt: skip

    @property
    def slot_tokens(self) -> int:
        """Tokens of the slot of a row, which it has where something of the row stays from step to step."""
        if not self.row.has_kv_slot or (self.shared is not None and not self.shared.block_size):
            return 0
        return self.row.total_tokens if self.shared is None else self.row.step_tokens

    def shared_segment_bytes(self, rows: int, passages: float = math.inf) -> int:
        """What the pool has to hold for these rows at a time, of which at most so many passages differ."""
        if self.shared is None or not self.row.segment_tokens:
            return 0
        *found, question = map(round_up_to_unit, self.row.segment_tokens)
        return self.shared.token_bytes * int(
            rows * question + min(passages, rows * len(found)) * max(found, default=0)
        )

    def scratch_tokens(self, rows: int) -> int:
        """Tokens of room in slots for segments that run in the same call as the rows."""
        new = rows * sum(map(round_up_to_page, self.row.segment_tokens))
        return min(round_up_to_page(PREFILL_SCRATCH_TOKENS), new) * bool(self.slot_tokens)

    def kv_slot_bytes(self, rows: int) -> float:
        """Keys and values of the rows, and of what is being computed for them."""
        tokens = rows * round_up_to_page(self.slot_tokens) + self.scratch_tokens(rows)
        return self.kv_bytes_per_token * tokens

    def step_bytes(self, rows: int) -> float:
        """The most that is alive during a step, in addition to weights, slots and pool."""
        row, kv, token = self.row, self.kv_bytes_per_token, self.activation_bytes_per_token
        longest, new = max((*row.segment_tokens, 0)), rows * sum(row.segment_tokens)
        call = token * (rows * row.step_tokens + min(PREFILL_SCRATCH_TOKENS, new))
        call += self.mask_bytes * rows * row.step_tokens * row.total_tokens  # kept for all layers
        asked = rows * row.canvas_tokens
        read = self.logit_bytes_per_position * min(LOGITS_CHUNK_POSITIONS, asked)
        # Too many new segments run by themselves: their keys and values exist twice for a moment.
        apart = min(new, max(PREFILL_SCRATCH_TOKENS, longest)) if new > PREFILL_SCRATCH_TOKENS else 0
        prefill = apart * (kv + max(token, kv))
        # A slot whose segments change places; what enters the pool before something leaves it.
        moved = kv * self.slot_tokens
        if self.shared is not None:
            call += rows * self.shared.step_bytes(row)
            call += self.shared.gathered_bytes * min(PREFILL_SCRATCH_TOKENS, new)
        return max(call, read, prefill, moved) + kv * longest + self.dequantized_bytes

    def bytes_without_pool(self, rows: int) -> float:
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
    wanted = SamplingMetadata(mask_id, drawn, numbers, numbers, places, *sampled)
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
    asked = max(int((engine.prefix_cache_gib or 0.0) * GIB), memory.shared_segment_bytes(1))
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
        int(left) if engine.prefix_cache_gib is None else asked, rows, memory.slot_tokens,
        memory.scratch_tokens(rows),
    )  # fmt: skip


def _gib(number: float) -> str:
    return f"{number / GIB:.2g} GiB" if number > GIB / 100 else f"{number / 2**20:.2g} MiB"


def limit_cuda_allocator(engine: EngineConfig, device: torch.device) -> None:
    """Makes torch's own allocator refuse more than the budget, where it can: on CUDA."""
    if engine.memory_gib is not None and device.type == "cuda":
        place = torch.cuda.current_device() if device.index is None else device.index
        whole = torch.cuda.get_device_properties(place).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, engine.memory_gib * GIB / whole), place)
