"""Ragged attention against the textbook formula, and the varlen packing against the plain kernel."""

import sys
import types
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_rag.engine.cache import KVMemory
from dlm_rag.model import layers
from dlm_rag.model.layers import compute_attention
from dlm_rag.model.packed_batch import MemoryRows, Segment, pack_rows
from tests.support.attention import by_the_book, random_rows, sight_of
from tests.support.tiny_models import tiny_denoiser

CPU = torch.device("cpu")


def limits_of(length, block):
    """How many tokens each of a row sees, by the definition of blocks."""
    return None if block is None else [min(length, (n // block + 1) * block) for n in range(length)]


@pytest.mark.parametrize("block", [None, 1, 3])
@pytest.mark.parametrize("queries", [(5, 5, 5), (3, 7, 1)], ids=["even", "ragged"])
@pytest.mark.parametrize("more", [0, 4], ids=["its own keys", "more keys"])
def test_each_row_attends_to_what_it_sees_alone(queries, block, more):
    keys = tuple(n + more for n in queries)
    q, k, v = random_rows(queries, keys)
    out = compute_attention(q, k, v, sight_of(queries, keys, None if more else block), "sdpa")
    rows = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    limits = None if more else block
    expected = torch.cat([by_the_book(*row, limits_of(len(row[0]), limits)) for row in rows])
    torch.testing.assert_close(out, expected)


def test_gradients_of_a_row_are_no_longer_than_the_row():
    """A slice's gradient is as long as what it is a slice of: many rows would cost their square."""

    class Recorder(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = set()

        def __torch_dispatch__(self, op, kinds, args=(), kwargs=None):
            self.names.add(op._schema.name)
            return op(*args, **(kwargs or {}))

    lengths = (3, 7, 1, 5)
    inputs = [x.requires_grad_() for x in random_rows(lengths, lengths)]
    with Recorder() as found:
        compute_attention(*inputs, sight_of(lengths, lengths, 2), "sdpa").sum().backward()
    assert "aten::slice_backward" not in found.names
    assert {"aten::split_with_sizes", "aten::cat"} <= found.names


def varlen_reference(q, k, v, cumulative, longest, causal):
    """What a variable-length kernel is documented to do, from its own arguments, of queries and keys."""
    (cumulative_q, cumulative_k), (longest_q, longest_k) = cumulative, longest
    assert cumulative_q.dtype == cumulative_k.dtype == torch.int32
    lengths = cumulative_q.diff()
    assert longest_q >= lengths.max() and longest_k == cumulative_k.diff().max()
    # For single queries of grouped heads FlashAttention 2 takes a short cut that wants one in every row.
    assert longest_q > 1 or (lengths == 1).all()
    rows = [
        by_the_book(q[a:b], k[c:d], v[c:d], limits_of(int(b - a), 1) if causal else None)
        for (a, b), (c, d) in zip(pairwise(cumulative_q), pairwise(cumulative_k), strict=True)
    ]
    return torch.cat(rows)


def is_causal(window_size):
    """-1 stands for no bound, to the left and to the right."""
    assert window_size[0] == -1 and window_size[1] in (-1, 0)
    return window_size[1] == 0


# torch's own kernel by version and active implementation
VARLEN = {
    "2.11": ("2.11.0", None),
    "2.12": ("2.12.1", None),
    "2.13": ("2.13.0+cu130", None),
    "FA3": ("2.13.0", "FA3"),
}


@pytest.fixture(params=["flash", *VARLEN])
def gpu_kernel(request, monkeypatch):
    """The kernels themselves need a GPU; here stand-ins refuse what they refuse, and do the sum."""

    def flash(q, k, v, *ends_and_longest, window_size=(-1, -1)):
        cq, ck, *longest = ends_and_longest
        return varlen_reference(q, k, v, (cq, ck), longest, is_causal(window_size))

    if request.param == "flash":
        module = types.SimpleNamespace(flash_attn_varlen_func=flash)
        monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_interface=module))
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)
        yield "flash"
        return
    version, active = VARLEN[request.param]

    def varlen(q, k, v, *ends_and_longest, window_size=(-1, -1), **options):
        cq, ck, *longest = ends_and_longest
        assert options.pop("enable_gqa", None) == (True if version >= "2.12" else None)
        num_splits = options.pop("num_splits", None)
        assert not options
        if active is None and version < "2.13":
            assert num_splits is None, "num_splits requires FA3"
        else:
            assert num_splits == 1, "batch invariant"
        return varlen_reference(q, k, v, (cq, ck), longest, is_causal(window_size))

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    monkeypatch.setattr("torch.__version__", version)
    monkeypatch.setattr("torch.nn.attention.current_flash_attention_impl", lambda: active)
    yield "varlen"


@pytest.mark.parametrize(
    ("queries", "keys", "block"),
    [((0, 1, 1), (5, 3, 7), None), *(((3, 7, 1), (3, 7, 1), block) for block in (None, 1, 3))],
)
def test_gpu_kernels_get_the_same_rows_as_sdpa(gpu_kernel, queries, keys, block):
    """Also where one row's hidden tokens are few and another has none."""
    q, k, v = random_rows(queries, keys)
    sight = sight_of(queries, keys, block)
    expected = compute_attention(q, k, v, sight, "sdpa")
    torch.testing.assert_close(compute_attention(q, k, v, sight, gpu_kernel), expected)


def test_every_kernel_reads_places_of_a_memory(gpu_kernel):
    """The first row sees 3 tokens, which lie in another order, and its own 2; the second its own 3."""
    queries, keys = (2, 3), (5, 3)
    q, k, v = random_rows(queries, keys)
    memory = KVMemory(tiny_denoiser(num_hidden_layers=1), budget_bytes=10_000)
    memory.layer(0).fill_(torch.nan)
    gap, before, own = memory.take(3), memory.take(3)[::-1].copy(), [memory.take(n) for n in queries]
    memory.write(before, torch.stack((k[:3], v[:3]))[None], 0)
    for kernel in (gpu_kernel, "sdpa"):
        context = MemoryRows(memory, [before, gap[:0]], own, by_row=kernel == "sdpa")
        rows = pack_rows([Segment((1,) * n, 0) for n in queries], CPU, context=context)
        seen = rows.gather_keys_values(k[3:], v[3:], 0)
        out = compute_attention(q, *seen, rows.attention_metadata, kernel)
        expected = compute_attention(q, k, v, sight_of(queries, keys), "sdpa")
        torch.testing.assert_close(out, expected)


@pytest.mark.filterwarnings("ignore:.*without torch.compile")
def test_the_mask_of_flex_attention_is_the_dense_one(monkeypatch):
    """What a GPU takes, here as torch's uncompiled reference; against the formula, in float64."""
    lengths, block = (150, 150, 7, 1), 3
    rows = [Segment((1,) * n, 0, block=block) for n in lengths]
    packed = pack_rows(rows, CPU, [range(0, n, 2) for n in lengths])
    q, k, v = random_rows(lengths, lengths, width=16)
    q = q[packed.output_indices]
    sight, taken = packed.last_layer_metadata, []
    dense = compute_attention(q, k, v, sight, "sdpa")

    def attend_as_on_a_gpu(q, k, v, limits, masks, name):
        taken.append(layers.build_flex_mask(limits, q, k))
        return layers.attend_flex(q, k, v, taken[-1])

    monkeypatch.setattr(layers, "attend_masked", attend_as_on_a_gpu)
    with torch.no_grad():
        flex = compute_attention(q, k, v, replace(sight), "sdpa")
    torch.testing.assert_close(flex, dense)
    assert len(taken) == 2, "rows of equal lengths are one call"
    expected, queries = [], q.split([len(range(0, n, 2)) for n in lengths])
    for n, row_q, row_k, row_v in zip(lengths, queries, k.split(lengths), v.split(lengths), strict=True):
        allowed = torch.tensor([[j // block <= i // block for j in range(n)] for i in range(0, n, 2)])
        expected.append(by_the_book(row_q.double(), row_k.double(), row_v.double(), allowed=allowed))
    torch.testing.assert_close(dense.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [8, 32])
def test_a_gpu_never_computes_grouped_heads_under_a_mask_with_sdpa(monkeypatch, width):
    """Where FlexAttention has heads of that width it is taken; else each head gets keys of its own."""
    calls = []

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(layers, "build_flex_mask", lambda *_: "mask")
    monkeypatch.setattr(layers, "attend_flex", lambda q, k, v, mask: calls.append(mask) or q)
    monkeypatch.setattr(
        layers.F, "scaled_dot_product_attention",
        lambda q, k, v, mask, enable_gqa: calls.append((k.shape[1], enable_gqa)) or q,
    )  # fmt: skip
    q, k, v = torch.zeros(1, 4, 5, width).as_subclass(OnGpu), *torch.zeros(2, 1, 2, 5, width)
    layers.attend_masked(q, k, v, torch.arange(1, 6)[None], {}, "rule")
    assert calls == (["mask"] if width == 32 else [(4, False)])
