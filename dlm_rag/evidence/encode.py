"""Runs of the denoiser over prompts laid out and canvases behind them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.evidence.layout import Arrangement
from dlm_rag.model.block import AttentionProbe
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.rows import Context, Rows, Segment, of_rows, pack
from dlm_rag.model.sharing import SequenceShare, Stretches
from dlm_rag.model.store import KeysValues, Parts


def encode_segments(denoiser: Denoiser, segments: Sequence[Segment]) -> list[Tensor]:
    """Keys and values (layers, 2, n, kv_heads, head_dim) of each segment, in one packed call.

    What a segment gives depends on nothing but the segment. Of the last layer only keys and values are
    computed.
    """
    rows = of_rows(*_keys_values(denoiser, segments))
    # Each a tensor of its own: a view would keep the keys and values of the whole call alive.
    return [torch.stack([x for layer in row for x in layer]).unflatten(0, (-1, 2)) for row in rows]


def _keys_values(denoiser: Denoiser, segments: Sequence[Segment]) -> tuple[KeysValues, list[int]]:
    rows = pack(segments, denoiser.device, read=[()] * len(segments))
    return denoiser.encode(rows, keep=True)[1], list(rows.lengths)


def encode_contexts(denoiser: Denoiser, laid: Sequence[Arrangement]) -> Parts | None:
    """Per row the keys and values of its segments, or None.

    Segments that several rows share are encoded once. Gradients flow through, layer by layer, without
    a copy; decoding, which keeps them from step to step, has `contexts.Contexts` instead.
    """
    segments = list(dict.fromkeys(segment for row in laid for segment in row.context))
    if not segments:
        return None
    rows = of_rows(*_keys_values(denoiser, segments))
    by_segment = dict(zip(segments, rows, strict=True))
    return Parts([[by_segment[segment] for segment in row.context] for row in laid])


def canvas_rows(
    denoiser: Denoiser,
    leads: Sequence[Segment],
    canvases: Sequence[Sequence[int]],
    read: Sequence[Sequence[int]],
    context: Context | None = None,
    ahead: int | None = None,
    add: Sequence[NDArray[Any]] = (),
) -> Rows:
    """Rows of each lead and canvas, of which those states are read that predict the canvas positions `read`
    (from 0, ascending). ahead, add: as in `rows.pack`.
    """
    runs = [Segment((*lead.ids, *canvas), lead.start) for lead, canvas in zip(leads, canvases, strict=True)]
    first = first_rows(denoiser, leads)
    asked = [[start + place for place in places] for start, places in zip(first, read, strict=True)]
    return pack(runs, denoiser.device, asked, context, ahead, add=add)


def encode_canvases(
    denoiser: Denoiser,
    leads: Sequence[Segment],
    canvases: Sequence[Sequence[int]],
    contexts: Context | None,
    read: Sequence[Sequence[int]],
    probe: AttentionProbe | None = None,
    ahead: int | None = None,
) -> Tensor:
    """Hidden states (n, hidden) that predict the canvas positions `read` (from 0, ascending), row by row.

    Only these go through the last layer. ahead: as in `rows.Sight`.
    """
    rows = canvas_rows(denoiser, leads, canvases, read, contexts, ahead)
    return denoiser.encode(rows, probe=probe)[0]


def encode_stretches(
    denoiser: Denoiser,
    leads: Sequence[Segment],
    canvases: Sequence[Sequence[int]],
    read: Sequence[Sequence[int]],
    share: SequenceShare,
) -> tuple[Tensor, list[list[int]]]:
    """As `encode_canvases` without contexts, on this process's stretch of every row.

    Returns the hidden states and the places that they are of: those of `read` that are predicted here.
    """
    runs = [Segment((*lead.ids, *canvas), lead.start) for lead, canvas in zip(leads, canvases, strict=True)]
    own = [share.stretch(len(run.ids)) for run in runs]
    parts = [
        Segment(run.ids[s.start : s.stop], run.start + s.start) for run, s in zip(runs, own, strict=True)
    ]
    rows = list(zip(first_rows(denoiser, leads), own, read, strict=True))
    here = [[place for place in places if start + place in s] for start, s, places in rows]
    asked = [
        [start + place - s.start for place in places]
        for (start, s, _), places in zip(rows, here, strict=True)
    ]
    stretches = Stretches(share, tuple(len(run.ids) for run in runs))
    packed = pack(parts, denoiser.device, asked, stretches=stretches)
    return denoiser.encode(packed)[0], here


def canvas_starts(
    denoiser: Denoiser, leads: Sequence[Segment], canvases: Sequence[Sequence[int]]
) -> list[int]:
    """Where in the packed rows of lead and canvas the state stands that predicts each first position."""
    lengths = [len(lead.ids) + len(canvas) for lead, canvas in zip(leads, canvases, strict=True)]
    starts = accumulate(lengths[:-1], initial=0)
    return [start + first for start, first in zip(starts, first_rows(denoiser, leads), strict=True)]


def first_rows(denoiser: Denoiser, leads: Sequence[Segment]) -> list[int]:
    """Where in each row of lead and canvas the state stands that predicts the first position."""
    return [len(lead.ids) - int(denoiser.config.shifted) for lead in leads]
