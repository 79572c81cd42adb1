"""Encodes segments of a prompt to keys and values, and canvases after them to hidden states."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.layers import AttentionProbe
from dlm_rag.model.packed_batch import LaidOutRow, SharedContext, make_consecutive_ranges, pack_rows


def encode_canvases(
    denoiser: Denoiser, states: Sequence[LaidOutRow], read: Sequence[Sequence[int]],
    add: Sequence[NDArray[Any]] = (), probe: AttentionProbe | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Hidden states (n, hidden) that predict the canvas positions `read` (from 0, ascending), row by row;
    and the arrays `add` on the device.

    Only these go through the last layer. Segments that several rows share are encoded once, and gradients
    flow through; decoding has `engine.cache.KVCache`.
    """
    segments = list(dict.fromkeys(s for row in states for s in row.context_segments))
    segments.sort(key=lambda segment: len(segment.ids))  # rows of equal lengths are attended to together
    context = None
    if segments:
        at = dict(zip(segments, make_consecutive_ranges([len(s.ids) for s in segments]), strict=True))
        packed = pack_rows(segments, denoiser.device, read=[()] * len(segments))
        seen = [[at[segment] for segment in row.context_segments] for row in states]
        context = SharedContext(denoiser.encode(packed, keep=True)[1], seen)
    asked = [[row.find_state(n) for n in places] for row, places in zip(states, read, strict=True)]
    rows = pack_rows([row.canvas_segment for row in states], denoiser.device, asked, context, add)
    return denoiser.encode(rows, probe=probe)[0], rows.extra_tensors
