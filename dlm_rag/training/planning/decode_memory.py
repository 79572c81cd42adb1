"""The memory that decoding takes on a device, counted from shapes before weights are read, for the plan.

Bytes of a token on its way through a layer are found by running the real code on tensors without contents
(`memory_tracker.py`). Bounds, not means: every row has its longest prompt, every passage its full length.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dlm_rag.config import DecodeConfig
from dlm_rag.engine.batch_kv_cache import PREFILL_SCRATCH_TOKENS
from dlm_rag.engine.rules import samples_actions
from dlm_rag.engine.sampling import LOGITS_CHUNK_POSITIONS, SamplingMetadata, sample_proposals
from dlm_rag.evidence.truncation import ContextBudget
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.evidence_layouts import EVIDENCE_LAYOUTS
from dlm_rag.model.kv_store import round_up_to_page
from dlm_rag.model.packed_batch import Segment, pack_rows
from dlm_rag.model.quantize import count_scratch_bytes, count_weight_bytes
from dlm_rag.training.planning.memory_tracker import measure_simulated_peak, replace_with_empty_weights


@dataclass(frozen=True)
class LongestRow:
    """The longest row: tokens of each segment that sees itself alone, and of what runs at every step."""

    segment_tokens: tuple[int, ...]
    step_tokens: int
    canvas_tokens: int
    has_kv_slot: bool  # whether it has a slot: all but a canvas that runs with its whole prompt

    @classmethod
    def from_budget(
        cls, room: ContextBudget, shape: DenoiserConfig, question: int, passages: tuple[int, int]
    ) -> "LongestRow":
        """The row of a prompt with `question` tokens and (how many, of how many tokens) passages."""
        count, longest = passages
        block = shape.block_size or 0
        canvas = room.canvas_length + block  # blocks may have to be whole
        own = room.context_length - room.canvas_length
        if EVIDENCE_LAYOUTS[room.layout].separate_passages:
            asked = min(question, own - room.passage_length)
            return cls((min(room.passage_length, longest),) * count + (asked,), canvas + 1, canvas, True)
        prompt = min(own, question + count * longest)
        if not (EVIDENCE_LAYOUTS[room.layout].runs_with_canvas or block):
            return cls((prompt,), canvas + 1, canvas, True)
        return cls((), prompt + canvas, canvas, bool(block))

    @property
    def total_tokens(self) -> int:
        """The tokens that it sees, its own included."""
        return sum(self.segment_tokens) + self.step_tokens


@dataclass(frozen=True)
class DecodeMemory:
    """Bytes on one device, as functions of the rows in the batch; the pool of evidence is left out."""

    row: LongestRow
    weight_bytes: int
    kv_bytes_per_token: int  # keys and values of a token, in all layers
    activation_bytes_per_token: float  # what a token of a call takes on its way through a layer
    logit_bytes_per_position: float  # what a position takes whose logits are read
    mask_bytes: int  # of a query and a key, where attention takes a mask: added, and as a rule
    dequantized_bytes: int  # of the one layer whose weights are dequantised at a time

    @classmethod
    def from_config(
        cls, shape: DenoiserConfig, dtype: torch.dtype, decode: DecodeConfig, row: LongestRow,
        quantize: str = "none",
    ) -> "DecodeMemory":  # fmt: skip
        """The memory of a denoiser with weights and arithmetic in `dtype`; nothing is allocated."""
        token, position = _measure_activation_bytes(shape, dtype, decode)
        kv = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * dtype.itemsize
        return cls(
            row, count_weight_bytes(shape, dtype.itemsize, quantize), kv, token, position,
            bool(shape.block_size) * (dtype.itemsize + 1), count_scratch_bytes(shape, quantize),
        )  # fmt: skip

    def kv_slot_bytes(self, rows: int) -> float:
        """Keys and values of the rows, and of what is being computed for them in the same call."""
        if not self.row.has_kv_slot:
            return 0.0
        new = rows * sum(map(round_up_to_page, self.row.segment_tokens))
        scratch = min(round_up_to_page(PREFILL_SCRATCH_TOKENS), new)
        return self.kv_bytes_per_token * (rows * round_up_to_page(self.row.total_tokens) + scratch)

    def step_bytes(self, rows: int) -> float:
        """The most that is alive during a step, in addition to weights and slots."""
        row, kv, token = self.row, self.kv_bytes_per_token, self.activation_bytes_per_token
        longest, new = max((*row.segment_tokens, 0)), rows * sum(row.segment_tokens)
        call = token * (rows * row.step_tokens + min(PREFILL_SCRATCH_TOKENS, new))
        call += self.mask_bytes * rows * row.step_tokens * row.total_tokens  # kept for all layers
        read = self.logit_bytes_per_position * min(LOGITS_CHUNK_POSITIONS, rows * row.canvas_tokens)
        # Too many new segments run by themselves: their keys and values exist twice for a moment.
        apart = min(new, max(PREFILL_SCRATCH_TOKENS, longest)) if new > PREFILL_SCRATCH_TOKENS else 0
        prefill = apart * (kv + max(token, kv))
        moved = kv * row.total_tokens * row.has_kv_slot  # a slot whose segments change places
        return max(call, read, prefill, moved) + kv * longest + self.dequantized_bytes

    def total_bytes(self, rows: int) -> float:
        """Weights, slots and a step of so many rows."""
        return self.weight_bytes + self.kv_slot_bytes(rows) + self.step_bytes(rows)


def _measure_activation_bytes(
    shape: DenoiserConfig, dtype: torch.dtype, decode: DecodeConfig
) -> tuple[float, float]:
    """Bytes that one more token in a call takes, and one more position whose logits are read."""
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
