"""Attention under masks: FlexAttention on a GPU, SDPA elsewhere."""

from dataclasses import replace

import pytest
import torch

from dlm_rag.model import attention
from dlm_rag.model.packed_batch import Segment, pack_rows
from tests.support.attention import by_the_book, random_rows


@pytest.mark.filterwarnings("ignore:.*without torch.compile")
def test_the_mask_of_flex_attention_is_the_dense_one(monkeypatch):
    """What a GPU takes, here as torch's uncompiled reference; against the formula, in float64."""
    lengths = (150, 150, 7, 1)
    rows = [Segment((1,) * n, 0, block=3) for n in lengths]
    packed = pack_rows(rows, torch.device("cpu"), [range(0, n, 2) for n in lengths])
    q, k, v = random_rows(lengths, lengths, width=16)
    q = q[packed.output_indices]
    sight, taken = packed.last_layer_metadata, []
    dense = attention.compute_attention(q, k, v, sight, "sdpa")

    def attend_as_on_a_gpu(q, k, v, limits, masks, first_row):
        taken.append(attention.build_flex_mask(limits, q, k))
        return attention.attend_flex(q, k, v, taken[-1])

    monkeypatch.setattr(attention, "attend_masked", attend_as_on_a_gpu)
    with torch.no_grad():
        flex = attention.compute_attention(q, k, v, replace(sight), "sdpa")
    torch.testing.assert_close(flex, dense)
    assert len(taken) == 2, "rows of equal lengths are one call"

    expected, queries = [], q.split([len(range(0, n, 2)) for n in lengths])
    for n, row_q, row_k, row_v in zip(lengths, queries, k.split(lengths), v.split(lengths), strict=True):
        allowed = torch.tensor([[j // 3 <= i // 3 for j in range(n)] for i in range(0, n, 2)])
        expected.append(by_the_book(row_q.double(), row_k.double(), row_v.double(), allowed=allowed))
    torch.testing.assert_close(dense.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [8, 32])
def test_a_gpu_never_computes_grouped_heads_under_a_mask_with_sdpa(monkeypatch, width):
    """Where FlexAttention has heads of that width it is taken; else each head gets keys of its own."""
    calls = []

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(attention, "build_flex_mask", lambda *_: "mask")
    monkeypatch.setattr(attention, "attend_flex", lambda q, k, v, mask: calls.append(mask) or q)
    monkeypatch.setattr(
        attention.F, "scaled_dot_product_attention",
        lambda q, k, v, mask, enable_gqa: calls.append((k.shape[1], enable_gqa)) or q,
    )  # fmt: skip
    q, k, v = torch.zeros(1, 4, 5, width).as_subclass(OnGpu), *torch.zeros(2, 1, 2, 5, width)
    attention.attend_masked(q, k, v, torch.arange(1, 6)[None], {}, 0)
    assert calls == (["mask"] if width == 32 else [(4, False)])
