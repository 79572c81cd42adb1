"""Attention over ragged rows, through one function with three interchangeable kernels.

Rows are packed one behind another without padding, so a question gets the same arithmetic alone
and in a batch. Who sees whom is decided by which keys a row is given, and by how many of them a token sees.

Shapes: Tq, Tk packed query and key tokens; H query heads; Hk key-value heads (H a multiple of Hk);
D head width.

What the kernels of other versions do, read in the sources and wheels of torch 2.11 to 2.13 (a GPU has not
confirmed it): `attention_backends.py`.
"""

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from dlm_rag.model.attention_backends import get_paged_attention_support
from dlm_rag.model.kv_store import PAGE_TOKENS
from dlm_rag.model.packed_batch import AttentionMetadata, RaggedLengths


def compute_attention(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata, backend: str) -> Tensor:
    """Row r of `q` (Tq, H, D) attends to row r of `k`, `v` (Tk, Hk, D); returns (Tq, H, D).

    With `sight.stored`, `k` and `v` are all that a `SlotKVCache` holds, (tokens, Hk, D): row r sees the
    tokens from its start on, as many as its keys. `backend` is one of
    `attention_backends.choose_backend`'s.
    """
    if any(sight.partial_view_rows) and not sight.causal:
        backend = "sdpa"  # the only one that takes a mask
    return _KERNELS[backend](q, k, v, sight)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata) -> Tensor:
    bounded = sight.partial_view_rows or (False,) * len(sight.queries.lengths)
    shapes = list(zip(sight.queries.lengths, sight.keys.lengths, bounded, strict=True))
    if sight.cached_rows is None:  # rows of equal lengths behind one another are one call
        runs = [(len(list(same)), *shape) for shape, same in groupby(shapes)]
        run_keys, run_values = (x.split([rows * n for rows, _, n, _ in runs]) for x in (k, v))
    else:
        runs = [(1, *shape) for shape in shapes]
        run_keys, run_values = (sight.cached_rows.slice_rows(x, sight.keys.lengths) for x in (k, v))
    found, at = [], 0
    run_queries = q.split([rows * n for rows, n, *_ in runs])
    for (rows, n, seen, masked), *packed in zip(runs, run_queries, run_keys, run_values, strict=True):
        run_q, run_k, run_v = (
            x.unflatten(0, (rows, length)).transpose(1, 2)
            for x, length in zip(packed, (n, seen, seen), strict=True)
        )
        mask = None
        if masked and not sight.causal:
            assert sight.visible_counts is not None
            limits = sight.visible_counts[at : at + rows * n].view(rows, 1, n, 1)
            mask = torch.arange(seen, device=q.device) < limits
        out = F.scaled_dot_product_attention(
            run_q, run_k, run_v, mask, is_causal=masked and sight.causal, enable_gqa=True
        )
        found.append(out.transpose(1, 2).flatten(0, 1))
        at += rows * n
    return found[0] if len(found) == 1 else torch.cat(found)


def _varlen(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    rule = get_paged_attention_support(q.device)
    options = dict(rule.kernel_options)
    ends: Tensor | None = sight.keys.cu_seqlens
    if sight.cached_rows is not None and rule.reads_block_table:
        k, v = (x.unflatten(0, (-1, PAGE_TOKENS)) for x in (k, v))
        options |= {"seqused_k": sight.key_counts, "block_table": sight.block_table}
        ends = ends if rule.needs_key_offsets else None
    elif sight.cached_rows is not None:
        k, v = (torch.cat(sight.cached_rows.slice_rows(x, sight.keys.lengths)) for x in (k, v))
    out = varlen_attn(
        q, k, v, sight.queries.cu_seqlens, ends, _max_query_length(sight.queries), sight.keys.max_length,
        window_size=(-1, 0 if sight.causal else -1), enable_gqa=q.shape[1] != k.shape[-2], **options,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def _flash(q: Tensor, k: Tensor, v: Tensor, sight: AttentionMetadata) -> Tensor:
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    if sight.cached_rows is not None:
        k, v = (x.unflatten(0, (-1, PAGE_TOKENS)) for x in (k, v))
    return flash_attn_varlen_func(
        q, k, v, sight.queries.cu_seqlens, sight.keys.cu_seqlens, _max_query_length(sight.queries),
        sight.keys.max_length, window_size=(-1, 0 if sight.causal else -1), block_table=sight.block_table,
    )  # fmt: skip


def _max_query_length(queries: RaggedLengths) -> int:
    """What a kernel is told of the longest row.

    Told of one query at most, FlashAttention 2 takes a way of its own for grouped heads: it fails where a
    row has none, and may split keys by how many rows there are.
    """
    return max(2, queries.max_length)


_KERNELS = {"sdpa": _sdpa, "varlen": _varlen, "flash": _flash}
