"""What decoding takes on a device, computed from shapes before weights are read: bytes and seconds.

Bounds, not means: every row has its longest prompt, every passage its full length.
"""

from dataclasses import dataclass

import torch

from dlm_rag.config import Config, DecodeConfig
from dlm_rag.engine.cache import PREFILL_TOKENS
from dlm_rag.engine.engine import resolve_settings
from dlm_rag.engine.runner import LOGITS_CHUNK_POSITIONS
from dlm_rag.evidence.prompt_segments import ContextBudget
from dlm_rag.model.denoiser_config import (
    EVIDENCE_LAYOUTS,
    DenoiserConfig,
    count_encode_flops,
    count_head_flops,
)
from dlm_rag.model.quantize import METHODS, count_scratch_bytes, count_weight_bytes
from dlm_rag.training.batches import LONG_QUESTION_TOKENS
from dlm_rag.training.planning.specs import MFU, GpuSpec

GIB = 2**30
LOGIT_COPIES = 8  # numbers of float32 for each logit that is read


@dataclass(frozen=True)
class LongestRow:
    """Tokens of the longest row: its prompt, its canvas, what runs at every step, and whether its keys and
    values are kept (all but those of a canvas that runs with its whole prompt).
    """

    prompt: int
    canvas: int
    step: int
    is_kept: bool

    @property
    def total(self) -> int:
        return self.prompt + self.canvas


def find_longest_row(
    shape: DenoiserConfig, layout: str | None, decode: DecodeConfig, passages: tuple[int, int]
) -> LongestRow:
    """The row of a long question and of (how many, of how many tokens) passages."""
    room, (count, longest) = ContextBudget.from_config(shape, layout, decode.max_new_tokens), passages
    kind, block = EVIDENCE_LAYOUTS[room.layout], shape.block_size or 0
    own, canvas = room.context_length - room.canvas_length, room.canvas_length + block  # whole blocks
    if kind.separate_passages:
        question = min(LONG_QUESTION_TOKENS, own - room.passage_length)
        return LongestRow(count * min(room.passage_length, longest) + question, canvas, canvas + 1, True)
    prompt = min(own, LONG_QUESTION_TOKENS + count * longest)
    if kind.runs_with_canvas or block:
        return LongestRow(prompt, canvas, prompt + canvas, bool(block))
    return LongestRow(prompt, canvas, canvas + 1, True)


def count_kv_bytes(shape: DenoiserConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of a token in all layers."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * dtype.itemsize


def estimate_decode_bytes(shape: DenoiserConfig, dtype: torch.dtype, row: LongestRow, rows: int) -> float:
    """Bytes in addition to the weights while so many rows are decoded; the pool of evidence is left out.

    Keys and values of the rows; of what is being computed in a call, tokens of one layer at a time; the
    logits that exist at a time.
    """
    kv, size, experts = count_kv_bytes(shape, dtype), dtype.itemsize, shape.experts
    wide = shape.intermediate_size
    if experts is not None:
        chosen = experts.num_experts_per_tok * (experts.moe_intermediate_size + shape.hidden_size)
        wide = max(wide, chosen + experts.shared_intermediate_size)
    heads = (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    token = size * (3 * shape.hidden_size + max(heads, 3 * wide))
    new = rows * row.prompt if row.is_kept else 0
    call = token * (rows * row.step + min(PREFILL_TOKENS, new))
    if shape.block_size:  # a mask of each query and key: added, and as a rule
        call += (size + 1) * rows * row.step * row.total
    read = min(LOGITS_CHUNK_POSITIONS, rows * row.canvas)
    logits = 4 * LOGIT_COPIES * shape.vocab_size * read
    kept = kv * rows * row.total * row.is_kept
    gathered = kept / shape.num_hidden_layers  # of one layer, for kernels that want rows in order
    return kept + max(call + gathered, logits)


@dataclass(frozen=True)
class DecodeStepPlan:
    """A denoising step of `decode.batch_size` rows on one device: bytes, and seconds of either bound."""

    memory: float
    compute: float
    traffic: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.traffic)


def plan_decode_step(
    config: Config, shape: DenoiserConfig, dtype: torch.dtype, machine: GpuSpec
) -> DecodeStepPlan:
    """Plans a step with passages of full length. Raises `ConfigError` for settings not for this model."""
    quantize, size = config.model.quantize, dtype.itemsize
    decode = resolve_settings(config.decode, shape)
    rows, passages = decode.batch_size, (config.retrieval.top_k, shape.passage_length)
    row = find_longest_row(shape, config.model.evidence_layout, decode, passages)
    memory = estimate_decode_bytes(shape, dtype, row, rows) + count_scratch_bytes(shape, quantize)
    memory += count_weight_bytes(shape, size, quantize)
    lengths, seen = [row.step] * rows, [max(row.total, row.step)] * rows
    work = count_encode_flops(shape, lengths, seen, [row.canvas] * rows, size)
    head = count_head_flops(shape, rows * row.canvas, size)
    keys = count_kv_bytes(shape, dtype) * sum(seen)
    packed = 1.0 if quantize == "none" else METHODS[quantize].bytes_per_weight / size
    return DecodeStepPlan(
        memory + GIB * (config.engine.prefix_cache_gib or 0.0),
        (work.flops + head.flops) / (machine.flops[dtype] * MFU),
        (keys + packed * (work.bytes_moved - keys) + head.bytes_moved) / machine.bandwidth,
    )
