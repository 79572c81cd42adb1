"""Keys and values that stay between steps: the same as computed anew, within their budget, counted."""

import random
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_rag.config import EngineConfig
from dlm_rag.engine.cache import KVCache, KVMemory, dequantize_int8, quantize_int8
from dlm_rag.engine.runner import DecoderStats, MaskedModelRunner
from dlm_rag.evidence.encode_segments import encode_canvases
from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.machine import default_pool_bytes, measure_free_bytes
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.layers import _KERNELS
from dlm_rag.model.packed_batch import LaidOutPrompt, MemoryRows, RowInput, Segment, pack_rows
from dlm_rag.tokenizer import Prompt
from tests.model.test_block_attention import ASKED, ORDERS, make_decoder, what_happened
from tests.support.attention import ragged_kernel
from tests.support.tiny_models import tiny_denoiser

CPU = torch.device("cpu")
CANVASES = [(256, 7, 256), (9, 256), (256, 256, 256, 8)]
READ = [(0, 2), (1,), (0, 1, 2)]


def segment(name, length=10):
    return Segment((name,) * length, 0)


def request(*segments, row=0):
    """A row that sees these, with a canvas of two tokens."""
    return RowInput(row, LaidOutPrompt(segments, Segment((), 0)), np.array([1, 2]), np.array([0]))


def fill(cache):
    """As the denoiser would: writes the name of each new segment to its places."""
    for new, places in cache._new.items():
        cache.memory.write(places, torch.full_like(cache.memory.read(places), new.ids[0]), 0)


def refresh(cache, *segments):
    cache.prepare_rows([request(*segments)])
    fill(cache)
    cache.store_computed()


def cache_of(tokens, cache_dtype="auto", store=None, **shape):
    size = KVMemory(denoiser := tiny_denoiser(**shape), cache_dtype).token_bytes
    return KVCache(KVMemory(denoiser, cache_dtype, tokens * size), store)


class Store(dict):
    """A store that forgets all but the last."""

    def __init__(self, most):
        self.most = most

    def add(self, segment, kept, ready):
        self[segment] = kept
        if len(self) > self.most:
            del self[next(iter(self))]

    def get_all(self, segments):
        return [*map(self.get, segments)]


def names(kept):
    return [found.ids[0] for found in kept]


def test_places_never_meet_and_what_they_hold_stays_as_the_memory_grows():
    rng = random.Random(0)
    memory, held = cache_of(20).memory, {}
    for name in range(1, 500):
        tokens = rng.randrange(9)
        held[name] = memory.take(tokens)
        memory.write(held[name], torch.full((2, 2, tokens, 2, 8), float(name)), 0)
        if rng.random() < 0.55:
            memory.give_back(held.pop(rng.choice([*held])))
        every = np.concatenate([*held.values(), []])
        assert len(every) == len({*every.tolist()}) == memory.taken
        assert memory.free == memory.capacity - memory.taken
    assert memory.capacity > 20
    assert all((memory.read(places) == name).all() for name, places in held.items())


def test_a_memory_that_cannot_grow_keeps_what_it_holds(monkeypatch):
    memory, there = cache_of(8).memory, torch.ones(2, 2, 5, 2, 8)
    memory.write(places := memory.take(5), there, 0)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(memory, "_allocate", Mock(side_effect=torch.OutOfMemoryError))
        memory.take(4)
    assert (memory.capacity, memory.free) == (8, 3) and torch.equal(memory.read(places), there)
    assert len({*places, *memory.take(4)}) == 9 and torch.equal(memory.read(places), there)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_a_row_sees_the_places_that_it_names_and_itself(int8, by_row):
    """In its own order, of a memory without other numbers."""
    memory = cache_of(100, cache_dtype="int8" if int8 else "auto").memory
    held = [Segment((n,) * n, 10 * n) for n in (3, 9, 5)]
    numbers = [torch.randn(2, 2, len(segment.ids), 2, 8) for segment in held]
    memory.layer(0).fill_(0 if int8 else torch.nan)
    places = []
    for segment, values in zip(held, numbers, strict=True):
        places.append(memory.take(len(segment.ids)))
        kept = quantize_int8(values) if int8 else values
        memory.write(places[-1], kept, segment.start)
    seen, lengths = [(0, 2), (), (2, 1)], (2, 3, 1)  # segments of each row; its own tokens
    before = [np.concatenate([*(places[n] for n in row), memory.take(0)]) for row in seen]
    context = MemoryRows(memory, before, [memory.take(n) for n in lengths], by_row)
    own = torch.randn(2, 6, 2, 8)
    rows = pack_rows([Segment((1,) * n, 0) for n in lengths], CPU, [[0], [], []], context)
    for layer in range(2):
        found = torch.stack(rows.gather_keys_values(*own, layer))
        assert (rows.attention_metadata.key_places is not None) == by_row
        if by_row:
            found = found[:, rows.attention_metadata.key_places]
            found = dequantize_int8(found, torch.float32) if int8 else found
        expected = []
        for row, mine in zip(seen, own.split(lengths, dim=1), strict=True):
            expected += [*(numbers[m][layer] for m in row), mine]
        torch.testing.assert_close(found, torch.cat(expected, dim=1), atol=0.03 * int8, rtol=0.0)
    keys = (2 + 3 + 5, 3, 5 + 9 + 1)
    assert rows.attention_metadata.key_lengths == rows.last_layer_metadata.key_lengths == keys
    assert rows.last_layer_metadata.num_attention_pairs == keys[0]


def test_what_was_used_longest_ago_leaves_first():
    cache = cache_of(32)
    for name in (1, 2, 3, 1, 4):
        refresh(cache, segment(name))
    assert names(cache.kept) == [3, 1, 4] and cache.cache_stats.evicted_segments == 1
    assert cache.cache_stats.encoded_segments == 4 and cache.cache_stats.device_segments == 1


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
def test_what_comes_back_from_the_store_has_the_bits_that_left(cache_dtype):
    """And the positions that turn a key's bias. The device has room for one segment, the store for two."""
    cache, written = cache_of(12, cache_dtype, Store(2), qkv_bias=True), {}
    for name in (1, 2, 3, 2, 3, 1):
        cache.prepare_rows([request(asked := Segment((name,) * 10, 5 * name))])
        memory, places = cache.memory, cache._seen[asked]
        if asked in cache._new:
            bits = torch.randint(256, memory.read(places).view(torch.uint8).shape, dtype=torch.uint8)
            written[name] = bits.view(memory.token.dtype)
            memory.write(places, written[name], asked.start)
        assert torch.equal(*(kept.view(torch.uint8) for kept in (memory.read(places), written[name])))
        if cache_dtype == "int8":
            assert memory._positions[0][places].tolist() == [*range(asked.start, asked.start + 10)]
        cache.store_computed()
    stats = cache.cache_stats
    assert (stats.encoded_segments, stats.store_segments, stats.device_segments) == (4, 2, 0)
    assert (stats.requested_tokens, stats.encoded_tokens) == (60, 40)
    assert "; passages: 2 from files (" in DecoderStats("cpu", stats, store="read").describe()


def test_a_cache_keeps_what_it_holds_apart_and_within_its_budgets():
    rng, cache = random.Random(0), cache_of(100, store=Store(20))
    for _ in range(2000):
        wanted = {segment(name, name % 23 + 1): None for name in rng.sample(range(40), rng.randrange(1, 9))}
        cache.prepare_rows([request(*wanted)])
        fill(cache)
        assert {*wanted} == {*cache._seen}
        assert all((cache.memory.read(at) == seen.ids[0]).all() for seen, at in cache._seen.items())
        if rng.random() < 0.9:  # else the call fails
            cache.store_computed()
            assert cache.used_bytes <= cache.budget_bytes
            assert cache.memory.taken == sum(map(len, cache.kept.values()))
        assert all((cache.memory.read(at) == kept.ids[0]).all() for kept, at in cache.kept.items())
    assert cache.cache_stats.evicted_segments > 100 and cache.cache_stats.store_segments > 100


def laid_out(layout, facts, shifted, question=(1, 2, 3)):
    shape = DenoiserConfig(300, shifted=shifted, passage_length=6)
    return lay_out_prompt(Prompt(question, tuple(facts), (4,)), shape, layout)


def shown_of(numbers, laid):
    """The rows with their canvases, of which all states may be asked for."""
    rows = zip(numbers, laid, CANVASES, strict=False)
    return [RowInput(number, row, np.array(canvas), np.array([0])) for number, row, canvas in rows]


def hidden_of(denoiser, cache, numbers, laid):
    """The states that predict the positions `READ`, from the cache and as they are computed anew."""
    shifted, canvases = denoiser.config.shifted, CANVASES[: len(laid)]
    states = [row.build_row(canvas, 0, shifted) for row, canvas in zip(laid, canvases, strict=True)]
    runs, stored = cache.prepare_rows(shown_of(numbers, laid))
    firsts = [len(row.canvas_prefix.ids) - shifted for row in laid]
    asked = [[first + n for n in places] for first, places in zip(firsts, READ, strict=False)]
    read = [[] if run.row is None else asked[run.row] for run in runs]
    rows = pack_rows([run.segment for run in runs], CPU, read, stored)
    fresh, _ = encode_canvases(denoiser, states, READ[: len(laid)])
    found = denoiser.encode(rows)[0]
    cache.store_computed()
    return found, fresh


A, B, C, LONG = (10, 11), (20, 21, 22), (30,), (40, 41, 42, 43, 44)
# Evidence of three rows, step by step: changes in the middle, shrinks, empties, repeats, grows.
STEPS = [
    [(A, B, C), (A,), (LONG, A)],
    [(A, LONG, C), (A,), (LONG, B)],
    [(A, LONG), (B,), ()],
    [(), (C, B, A), ()],
    [(A, B, C), (C, B, A, LONG), (A,)],
]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("layout", ["prefix", "independent"])
@pytest.mark.parametrize("budget", [0, 700, 10**9])
def test_kept_contexts_give_what_fresh_ones_give(layout, shifted, budget):
    denoiser = tiny_denoiser(shifted=shifted)
    cache = KVCache(KVMemory(denoiser, budget_bytes=budget))
    numbers = (2, 0, 1)
    with torch.inference_mode():
        for evidence in STEPS:
            laid = [
                laid_out(layout, facts, shifted, question)
                for facts, question in zip(evidence, ((1, 2), (3,), (5, 6, 7)), strict=True)
            ]
            found, fresh = hidden_of(denoiser, cache, numbers, laid)
            torch.testing.assert_close(found, fresh)


def test_without_a_budget_every_step_encodes_everything_and_without_context_there_is_no_memory():
    cache, laid = cache_of(0), LaidOutPrompt((), Segment((1, 2), 0))
    for _ in range(3):
        refresh(cache, segment(1), segment(2))
    assert cache.cache_stats.reused_share == 0 and not cache.kept and not cache.memory.taken
    runs, stored = cache_of(0).prepare_rows(shown_of((0,), [laid]))
    assert stored is None and [run.segment for run in runs] == [laid.build_canvas_segment(CANVASES[0], 0)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [{}, {"block_size": None}], ids=["blocks", "whole"])
@pytest.mark.parametrize("layout", ["independent", "prefix"])
def test_a_ragged_kernel_finds_the_same_tokens_in_every_batch_and_budget(corpus_file, shape, layout, order):
    settings = {} if shape or layout == "prefix" else {"finished_block_context": order}

    def decode(size, gib, **engine):
        decoder = make_decoder(corpus_file, layout, gib, shape, batch_size=size, **settings, **engine)
        return what_happened(decoder.decode(ASKED)), decoder.model_runner

    expected, runner = decode(4, 0.0)
    gib = 20 * runner.cache.memory.token_bytes / 2**30
    with ragged_kernel():
        for size, budget in ((4, 0.0), (4, 1.0), (1, 1.0), (4, gib)):
            found, runner = decode(size, budget)
            assert found == expected
        assert layout == "prefix" or runner.cache_stats.evicted_segments
        assert not runner.cache._chains


class OperatorCount(TorchDispatchMode):
    """How many operators torch is asked for while it is open."""

    total = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.total += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize("gib", [0.0, 1.0])
def test_a_layer_asks_for_as_many_operators_for_many_rows_as_for_one(block, gib):
    """And for as many with many passages: on a GPU the host is waited for."""
    denoisers = [tiny_denoiser(block_size=block, num_hidden_layers=layers) for layers in (2, 3)]

    def count_in_a_layer(rows, passages):
        found = []
        for denoiser in denoisers:
            runner = MaskedModelRunner(denoiser, 256, EngineConfig(prefix_cache_gib=gib))
            facts = tuple((10 + n, 20 + n) for n in range(passages))
            views = []
            for row in range(rows):
                laid = lay_out_prompt(Prompt((1, row), facts, (4,)), denoiser.config, "independent")
                views.append(RowInput(row, laid, np.full(6, 256), np.arange(6)))
            runner.propose(views)()  # which computes all segments if they are kept
            calls = denoiser.flop_count.calls
            with OperatorCount() as seen:
                runner.propose(views)()
            assert denoiser.flop_count.calls == calls + 1
            found.append(seen.total)
        return found[1] - found[0]

    with ragged_kernel(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(_KERNELS, "varlen", lambda q, k, v, sight: torch.zeros_like(q))
        assert 0 < count_in_a_layer(1, 2) == count_in_a_layer(5, 2) == count_in_a_layer(3, 6) <= 40


def test_what_is_free_is_what_the_container_may_take(tmp_path, monkeypatch):
    for name, value in (("max", "5000000"), ("current", "3000000")):
        (tmp_path / name).write_text(f"{value}\n")
    group = (tmp_path / "max", tmp_path / "current")
    monkeypatch.setattr("dlm_rag.machine.CGROUP_MEMORY_FILES", (group,))
    assert measure_free_bytes(CPU) == 2_000_000 and default_pool_bytes(CPU) == 500_000
    (tmp_path / "max").write_text("max\n")
    assert measure_free_bytes(CPU) > 2_000_000
