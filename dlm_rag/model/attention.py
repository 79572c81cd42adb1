"""Attention over ragged rows, through one function with three interchangeable kernels.

Rows are packed one behind another without padding, so a question gets the same arithmetic alone
and in a batch. Who sees whom is decided by which keys a row is given, and by how many of them a token sees.

Shapes: Tq, Tk packed query and key tokens; H query heads; Hk key-value heads (H a multiple of Hk);
D head width.

What the kernels of other versions do, read in the sources and wheels of torch 2.11 to 2.13 (a GPU has not
confirmed it): `kernels.py`.
"""

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from dlm_rag.model.kernels import paging
from dlm_rag.model.rows import Ragged, Sight
from dlm_rag.model.store import PAGE


def attention(q: Tensor, k: Tensor, v: Tensor, sight: Sight, backend: str) -> Tensor:
    """Row r of `q` (Tq, H, D) attends to row r of `k`, `v` (Tk, Hk, D); returns (Tq, H, D).

    With `sight.stored`, `k` and `v` are all that a `ContextStore` holds, (tokens, Hk, D): row r sees the
    tokens from its start on, as many as its keys. `backend` is one of `kernels.choose_backend`'s.
    """
    if any(sight.bounded) and not sight.causal:
        backend = "sdpa"  # the only one that takes a mask
    return _KERNELS[backend](q, k, v, sight)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    bounded = sight.bounded or (False,) * len(sight.queries.lengths)
    shapes = list(zip(sight.queries.lengths, sight.keys.lengths, bounded, strict=True))
    if sight.stored is None:  # rows of equal lengths behind one another are one call
        runs = [(len(list(same)), *shape) for shape, same in groupby(shapes)]
        run_keys, run_values = (x.split([rows * n for rows, _, n, _ in runs]) for x in (k, v))
    else:
        runs = [(1, *shape) for shape in shapes]
        run_keys, run_values = (sight.stored.views(x, sight.keys.lengths) for x in (k, v))
    found, at = [], 0
    run_queries = q.split([rows * n for rows, n, *_ in runs])
    for (rows, n, seen, masked), *packed in zip(runs, run_queries, run_keys, run_values, strict=True):
        run_q, run_k, run_v = (
            x.unflatten(0, (rows, length)).transpose(1, 2)
            for x, length in zip(packed, (n, seen, seen), strict=True)
        )
        mask = None
        if masked and not sight.causal:
            assert sight.limits is not None
            limits = sight.limits[at : at + rows * n].view(rows, 1, n, 1)
            mask = torch.arange(seen, device=q.device) < limits
        out = F.scaled_dot_product_attention(
            run_q, run_k, run_v, mask, is_causal=masked and sight.causal, enable_gqa=True
        )
        found.append(out.transpose(1, 2).flatten(0, 1))
        at += rows * n
    return found[0] if len(found) == 1 else torch.cat(found)


def _varlen(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    rule = paging(q.device)
    options = dict(rule.options)
    ends: Tensor | None = sight.keys.cumulative
    if sight.stored is not None and rule.reads_pages:
        k, v = (x.unflatten(0, (-1, PAGE)) for x in (k, v))
        options |= {"seqused_k": sight.counts, "block_table": sight.table}
        ends = ends if rule.wants_ends else None
    elif sight.stored is not None:
        k, v = (torch.cat(sight.stored.views(x, sight.keys.lengths)) for x in (k, v))
    out = varlen_attn(
        q, k, v, sight.queries.cumulative, ends, _at_most(sight.queries), sight.keys.longest,
        window_size=(-1, 0 if sight.causal else -1), enable_gqa=q.shape[1] != k.shape[-2], **options,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def _flash(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    if sight.stored is not None:
        k, v = (x.unflatten(0, (-1, PAGE)) for x in (k, v))
    return flash_attn_varlen_func(
        q, k, v, sight.queries.cumulative, sight.keys.cumulative, _at_most(sight.queries),
        sight.keys.longest, window_size=(-1, 0 if sight.causal else -1), block_table=sight.table,
    )  # fmt: skip


def _at_most(queries: Ragged) -> int:
    """What a kernel is told of the longest row.

    Told of one query at most, FlashAttention 2 takes a way of its own for grouped heads: it fails where a
    row has none, and may split keys by how many rows there are.
    """
    return max(2, queries.longest)


_KERNELS = {"sdpa": _sdpa, "varlen": _varlen, "flash": _flash}
