"""Runs of the denoiser over prompts laid out and canvases behind them."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dlm_rag.evidence.layout import State
from dlm_rag.model.block import AttentionProbe
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.rows import Context, Segment, pack
from dlm_rag.model.sharing import SequenceShare, Stretches
from dlm_rag.model.store import KeysValues, Parts, stretches


def encode_segments(denoiser: Denoiser, segments: Sequence[Segment]) -> list[Tensor]:
    """Keys and values (layers, 2, n, kv_heads, head_dim) of each segment, in one packed call.

    What a segment gives depends on nothing but the segment. Of the last layer only keys and values are
    computed.
    """
    kept, lengths = _keys_values(denoiser, segments)
    # Each a tensor of its own: a view would keep the keys and values of the whole call alive.
    rows = zip(*(x.split(lengths) for layer in kept for x in layer), strict=True)
    return [torch.stack(row).unflatten(0, (-1, 2)) for row in rows]


def _keys_values(denoiser: Denoiser, segments: Sequence[Segment]) -> tuple[KeysValues, list[int]]:
    rows = pack(segments, denoiser.device, read=[()] * len(segments))
    return denoiser.encode(rows, keep=True)[1], list(rows.lengths)


def encode_contexts(denoiser: Denoiser, states: Sequence[State]) -> Parts | None:
    """Per row the keys and values of its segments, or None.

    Segments that several rows share are encoded once, and gradients flow through; decoding, which keeps
    keys and values from step to step, has `contexts.Contexts` instead.
    """
    segments = list(dict.fromkeys(segment for row in states for segment in row.context))
    segments.sort(key=lambda segment: len(segment.ids))  # rows of equal lengths are attended to together
    if not segments:
        return None
    kept, lengths = _keys_values(denoiser, segments)
    places = dict(zip(segments, stretches(lengths), strict=True))
    return Parts(kept, [[places[segment] for segment in row.context] for row in states])


def encode_canvases(
    denoiser: Denoiser,
    states: Sequence[State],
    contexts: Context | None,
    read: Sequence[Sequence[int]],
    probe: AttentionProbe | None = None,
) -> Tensor:
    """Hidden states (n, hidden) that predict the canvas positions `read` (from 0, ascending), row by row.

    Only these go through the last layer.
    """
    asked = [[row.first + place for place in places] for row, places in zip(states, read, strict=True)]
    rows = pack([row.run for row in states], denoiser.device, asked, contexts)
    return denoiser.encode(rows, probe=probe)[0]


def encode_stretches(
    denoiser: Denoiser, states: Sequence[State], read: Sequence[Sequence[int]], share: SequenceShare
) -> tuple[Tensor, list[list[int]]]:
    """As `encode_canvases` without contexts, on this process's stretch of every row.

    Returns the hidden states and the places that they are of: those of `read` that are predicted here.
    """
    runs = [row.run for row in states]
    own = [share.stretch(len(run.ids)) for run in runs]
    parts = [
        Segment(run.ids[s.start : s.stop], run.start + s.start) for run, s in zip(runs, own, strict=True)
    ]
    rows = list(zip(states, own, read, strict=True))
    here = [[place for place in places if row.first + place in s] for row, s, places in rows]
    asked = [
        [row.first + place - s.start for place in places]
        for (row, s, _), places in zip(rows, here, strict=True)
    ]
    stretches = Stretches(share, tuple(len(run.ids) for run in runs))
    packed = pack(parts, denoiser.device, asked, stretches=stretches)
    return denoiser.encode(packed)[0], here


def canvas_starts(states: Sequence[State]) -> list[int]:
    """Where in the packed runs the state stands that predicts each first position."""
    starts = accumulate([len(row.run.ids) for row in states[:-1]], initial=0)
    return [start + row.first for start, row in zip(starts, states, strict=True)]
