"""Rows, masks and a reference for attention."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.layers import _KERNELS
from dlm_rag.model.packed_batch import AttentionMetadata, Segment, pack_rows


def by_the_book(q, k, v, limits=None, allowed=None):
    """softmax(q k / sqrt(D)) v for one row, each key head repeated for its group of query heads."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q, k = q.transpose(0, 1), k.transpose(0, 1)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    if limits is not None:
        hidden = torch.arange(scores.shape[-1]) >= torch.as_tensor(limits)[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1)


def ragged_by_the_book(q, k, v, sight):
    """A ragged kernel: each row alone."""
    keys, values = (x.split(sight.key_lengths) for x in (k, v))
    assert not any(sight.partial_view_rows), "no kernel but SDPA takes masks"
    assert sight.key_places is None, "rows are consecutive"
    rows = zip(q.split(sight.query_lengths), keys, values, strict=True)
    return torch.cat([by_the_book(*row) for row in rows])


@contextmanager
def ragged_kernel():
    """While it is open, denoisers on a CPU have such a kernel, for which rows are gathered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Denoiser, "backend", property(lambda _: "varlen"))
        patch.setitem(_KERNELS, "varlen", ragged_by_the_book)
        yield


def random_rows(query_lengths, key_lengths, heads=4, key_heads=2, width=8):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(query_lengths), heads, width, generator=generator)
    k, v = torch.randn(2, sum(key_lengths), key_heads, width, generator=generator)
    return q, k, v


def sight_of(queries, keys, block=None, device="cpu"):
    """Rows of these lengths that see as many keys as are given; by blocks where they see themselves."""
    if block is not None:
        assert queries == keys
        return pack_rows(
            [Segment((1,) * n, 0, block=block) for n in queries], torch.device(device)
        ).attention_metadata
    ends = [torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device) for n in (queries, keys)]
    return AttentionMetadata(queries, keys, *ends, sum(a * b for a, b in zip(queries, keys, strict=True)))


CPU = torch.device("cpu")


def packed(ids, **more):
    """Rows of ids, each from position 0 on."""
    return pack_rows([Segment(tuple(row.tolist()), 0) for row in ids], CPU, **more)


def run_with_mask(denoiser, ids, positions, allowed):
    """The transformer with a dense attention mask in place of packed rows, as an independent path."""
    from unittest.mock import patch

    rows = replace(packed([ids]), positions=positions)

    def masked(q, k, v, *_):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
        return out[0].transpose(0, 1)

    with torch.no_grad(), patch("dlm_rag.model.layers.compute_attention", masked):
        return denoiser.encode(rows)[0]
