"""Ragged attention against the textbook formula, and the varlen packing against the plain kernel."""

import sys
import types
from itertools import pairwise

import pytest
import torch

from dlm_rag.errors import ConfigError
from dlm_rag.model.attention import Ragged, attention, choose_backend

CPU = torch.device("cpu")


def by_the_book(q, k, v, causal):
    """softmax(q k / sqrt(D)) v for one row, each key head repeated for its group of query heads."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q, k = q.transpose(0, 1), k.transpose(0, 1)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1)


def random_rows(query_lengths, key_lengths, heads=4, key_heads=2, width=8):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(query_lengths), heads, width, generator=generator)
    k, v = torch.randn(2, sum(key_lengths), key_heads, width, generator=generator)
    return q, k, v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5, 5), (3, 7, 1)], ids=["even", "ragged"])
def test_each_row_attends_to_itself_alone(lengths, causal):
    q, k, v = random_rows(lengths, lengths)
    rows = Ragged(lengths, CPU)
    out = attention(q, k, v, rows, rows, "sdpa", causal)
    expected = torch.cat(
        [by_the_book(*row, causal) for row in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)]
    )
    torch.testing.assert_close(out, expected)


def test_rows_may_see_more_keys_than_they_have_queries():
    queries, keys = (2, 3), (6, 4)
    q, k, v = random_rows(queries, keys)
    out = attention(q, k, v, Ragged(queries, CPU), Ragged(keys, CPU), "sdpa")
    rows = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    torch.testing.assert_close(out, torch.cat([by_the_book(*row, False) for row in rows]))


def varlen_reference(q, k, v, cumulative_q, cumulative_k, longest_q, longest_k, causal):
    """What a variable-length kernel is documented to do, from its own arguments."""
    assert cumulative_q.dtype == cumulative_k.dtype == torch.int32
    assert longest_q == cumulative_q.diff().max() and longest_k == cumulative_k.diff().max()
    rows = [
        by_the_book(q[a:b], k[c:d], v[c:d], causal)
        for (a, b), (c, d) in zip(pairwise(cumulative_q), pairwise(cumulative_k), strict=True)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("backend", ["flash", "varlen"])
@pytest.mark.parametrize("causal", [False, True])
def test_gpu_kernels_get_the_same_rows_as_sdpa(monkeypatch, backend, causal):
    """The kernels themselves need a GPU; here a stand-in checks the arguments and does the sum."""

    def flash(q, k, v, cq, ck, mq, mk, causal=False):
        return varlen_reference(q, k, v, cq, ck, mq, mk, causal)

    def varlen(q, k, v, cq, ck, mq, mk, *, window_size=(-1, -1), enable_gqa=False):
        assert enable_gqa and window_size in ((-1, -1), (-1, 0))
        return varlen_reference(q, k, v, cq, ck, mq, mk, window_size == (-1, 0))

    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_varlen_func=flash))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    lengths = (3, 7, 1)
    q, k, v = random_rows(lengths, lengths)
    rows = Ragged(lengths, CPU)
    torch.testing.assert_close(
        attention(q, k, v, rows, rows, backend, causal), attention(q, k, v, rows, rows, "sdpa", causal)
    )


def test_auto_takes_sdpa_on_a_cpu_and_an_impossible_wish_is_an_error():
    assert choose_backend("auto", CPU, torch.float32) == "sdpa"
    with pytest.raises(ConfigError, match="attention=flash cannot be used here"):
        choose_backend("flash", CPU, torch.float32)
