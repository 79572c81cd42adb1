"""Encodes segments of a prompt to keys and values, and canvases after them to hidden states."""

from collections.abc import Sequence
from itertools import accumulate

from einops import rearrange
from torch import Tensor

from dlm_rag.evidence.prompt_segments import LaidOutRow
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import Segment
from dlm_rag.model.layers import AttentionProbe
from dlm_rag.model.packed_batch import (
    CachedContext,
    KeysValues,
    SharedContext,
    make_consecutive_ranges,
    pack_rows,
)


def encode_segments(denoiser: Denoiser, segments: Sequence[Segment]) -> list[Tensor]:
    """Keys and values (layers, 2, n, kv_heads, head_dim) of each segment, in one packed call.

    What a segment gives depends on nothing but the segment. Of the last layer only keys and values are
    computed.
    """
    kept, lengths = _keys_values(denoiser, segments), [len(segment.ids) for segment in segments]
    # Each a tensor of its own: a view would keep the keys and values of the whole call alive.
    first = denoiser.device
    rows = zip(*(x.to(first).split(lengths) for layer in kept for x in layer), strict=True)
    return [rearrange([*row], "(layers kv) n h d -> layers kv n h d", kv=2) for row in rows]


def _keys_values(denoiser: Denoiser, segments: Sequence[Segment]) -> KeysValues:
    return denoiser.encode(pack_rows(segments, denoiser.device, read=[()] * len(segments)), keep=True)[1]


def encode_contexts(denoiser: Denoiser, states: Sequence[LaidOutRow]) -> SharedContext | None:
    """Per row the keys and values of its segments, or None.

    Segments that several rows share are encoded once, and gradients flow through; decoding, which keeps
    keys and values from step to step, has `engine.cache.KVCache` instead.
    """
    segments = list(dict.fromkeys(segment for row in states for segment in row.context_segments))
    segments.sort(key=lambda segment: len(segment.ids))  # rows of equal lengths are attended to together
    if not segments:
        return None
    at = dict(zip(segments, make_consecutive_ranges([len(s.ids) for s in segments]), strict=True))
    ranges = [[at[segment] for segment in row.context_segments] for row in states]
    return SharedContext(_keys_values(denoiser, segments), ranges)


def encode_canvases(
    denoiser: Denoiser,
    states: Sequence[LaidOutRow],
    contexts: CachedContext | None,
    read: Sequence[Sequence[int]],
    probe: AttentionProbe | None = None,
) -> Tensor:
    """Hidden states (n, hidden) that predict the canvas positions `read` (from 0, ascending), row by row.

    Only these go through the last layer.
    """
    asked = [[row.find_state(n) for n in places] for row, places in zip(states, read, strict=True)]
    rows = pack_rows([row.canvas_segment for row in states], denoiser.device, asked, contexts)
    return denoiser.encode(rows, probe=probe)[0]


def run_starts(states: Sequence[LaidOutRow]) -> list[int]:
    """Where each run begins in the packed runs."""
    return [*accumulate([len(row.canvas_segment.ids) for row in states[:-1]], initial=0)]
