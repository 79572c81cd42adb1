"""Attention of packed rows to keys that lie anywhere in one memory: through an index, nothing is gathered.

A Triton kernel. One program has a row, a key-value head and BLOCK_QUERIES of its (token, head) pairs. Keys
are never split among programs, so a row's result depends on nothing but the row: alone and in a batch it is
the same to the bit. All lengths are read on the device; the grid alone knows the longest row. Softmax runs
along the keys in blocks, as in FlashAttention (Dao 2023), in float32.

Imported only where it is used: Triton comes with torch's CUDA builds. TRITON_INTERPRET=1 runs it on a CPU.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_QUERIES, BLOCK_KEYS = 64, 64  # no spilled registers on sm_90 and sm_103 up to a head width of 128


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    queries, keys, values, index, query_ends, key_ends, visible_counts, out, scale,
    query_stride, head_stride, key_stride, key_head_stride, out_stride, out_head_stride,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,  # noqa: N803
    HAS_COUNTS: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    block, key_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_ends + row)
    pairs = (tl.load(query_ends + row + 1) - first) * GROUP
    if block * BLOCK_QUERIES >= pairs:
        return
    pair, column = block * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES), tl.arange(0, PADDED_WIDTH)
    is_pair, is_column = pair < pairs, column < WIDTH
    token, head = first + pair // GROUP, key_head * GROUP + pair % GROUP
    at_query = token[:, None] * query_stride + head[:, None] * head_stride + column[None, :]
    q = tl.load(queries + at_query, mask=is_pair[:, None] & is_column[None, :], other=0.0)
    begin, end = tl.load(key_ends + row), tl.load(key_ends + row + 1)
    if HAS_COUNTS:
        count = tl.load(visible_counts + token, mask=is_pair, other=1)
    highest = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    mixed = tl.zeros((BLOCK_QUERIES, PADDED_WIDTH), tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        number = start + tl.arange(0, BLOCK_KEYS)
        is_key = number < end
        place = tl.load(index + number, mask=is_key, other=0).to(tl.int64)
        at_key = place * key_stride + key_head * key_head_stride
        k = tl.load(
            keys + at_key[None, :] + column[:, None], mask=is_key[None, :] & is_column[:, None], other=0.0
        )
        seen = is_key[None, :]
        if HAS_COUNTS:
            seen = seen & ((number - begin)[None, :] < count[:, None])
        scores = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            values + at_key[:, None] + column[None, :], mask=is_key[:, None] & is_column[None, :], other=0.0
        )
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = higher
    at_out = token[:, None] * out_stride + head[:, None] * out_head_stride + column[None, :]
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at_out, mixed, mask=is_pair[:, None] & is_column[None, :])


def attend_by_index(
    q: Tensor, keys: Tensor, values: Tensor, index: Tensor, ends: tuple[Tensor, Tensor], longest: int,
    visible_counts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns (T, H, D): row r of `q` (T, H, D) attends to the places that row r of `index` (K,) names.

    keys, values: a memory, (places, Hk, D), with the same strides. ends: of the rows of queries and of
    keys, (rows + 1,) each. longest: queries of the longest row, or more. visible_counts: (T,) how many of
    its row's keys a query sees, at least one; None: all. Tokens of no row get 0.
    """
    (_, heads, width), key_heads = q.shape, keys.shape[1]
    out, group = torch.zeros_like(q), heads // key_heads
    padded = triton.next_power_of_2(max(16, width))
    # The memory of a block of sm_86 to sm_121, 99 KiB, holds one stage of wide heads.
    stages = {"num_stages": 1} if q.element_size() * padded > 256 else {}
    grid = (triton.cdiv(max(1, longest) * group, BLOCK_QUERIES), key_heads, len(ends[0]) - 1)
    _attend[grid](
        q, keys, values, index, *ends, q if visible_counts is None else visible_counts, out,
        width**-0.5 * math.log2(math.e), *q.stride()[:2], *keys.stride()[:2], *out.stride()[:2],
        GROUP=group, WIDTH=width, PADDED_WIDTH=padded, HAS_COUNTS=visible_counts is not None,
        BLOCK_QUERIES=BLOCK_QUERIES, BLOCK_KEYS=BLOCK_KEYS, **stages,
    )  # fmt: skip
    return out
