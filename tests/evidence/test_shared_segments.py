"""Segments that rows share: the same keys and values, the same tokens, each segment in memory once."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_rag.config import EngineConfig
from dlm_rag.engine.batch_kv_cache import KVCacheManager
from dlm_rag.engine.kv_format import KVFormat
from dlm_rag.engine.kv_tiers import KVArena, round_up_to_unit
from dlm_rag.engine.runner import MaskedModelRunner
from dlm_rag.engine.sampling import ModelInput
from dlm_rag.engine.segment_kv_cache import EvidencePool
from dlm_rag.evidence.prompt_segments import LaidOutPrompt, lay_out_prompt
from dlm_rag.model.attention import _KERNELS
from dlm_rag.model.kv_store import CachedRows, SharedSegments, SlotKVCache
from dlm_rag.model.packed_batch import Segment, pack_rows
from dlm_rag.tokenizer import Prompt
from tests.evidence.test_kv_pool import laid_out, shown_of
from tests.model.test_block_attention import ASKED, ORDERS, make_decoder, what_happened
from tests.support.attention import shared_segments
from tests.support.decoding import QUESTIONS, rollout_records
from tests.support.setup_matrix import DECODING_SETUPS, make_setup_decoder
from tests.support.tiny_models import tiny_denoiser

CPU = torch.device("cpu")


class OperatorCount(TorchDispatchMode):
    """How many operators torch is asked for while it is open."""

    total = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.total += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("block", [None, 2])
def test_a_row_sees_what_it_names_in_the_memory_its_slot_and_itself(int8, block):
    """Segments that others see too, in its own order, of a memory and a store without other numbers."""
    denoiser = tiny_denoiser(block_size=block)
    format = KVFormat(denoiser, "int8" if int8 else "auto")
    arena, store = KVArena(10**6, format), SlotKVCache(2, 8, torch.float32, [CPU, CPU])
    held = [Segment((n,) * n, 10 * n) for n in (3, 9, 5)]
    numbers = [torch.randn(2, 2, len(segment.ids), 2, 8) for segment in held]
    for segment, values in zip(held, numbers, strict=True):
        arena.take(segment)
        arena.write(segment, format.pack(values, segment.start))
    store.reserve(2, 300)
    store.parts[0].fill_(torch.nan)
    kept = torch.randn(2, 2, 4, 2, 8)
    store.write_tokens(store.capacity + 7, kept)
    seen = [(0, 2), (), (2, 1)]  # segments of each row
    slots = CachedRows(store, (0, 2 * 300, store.capacity + 7), (0, 0, 4), (), True) if block else None
    ranges = [tuple(arena.range_of(held[n]) for n in row) for row in seen]
    context = SharedSegments(arena, ranges, (), slots)
    own = torch.randn(2, 6, 2, 8)
    rows = pack_rows([Segment((1,) * n, 0) for n in (2, 3, 1)], CPU, [[0], [], []], context)
    for layer in range(2):
        found = torch.stack(rows.gather_keys_values(*own, layer))
        expected = []
        for n, (row, mine) in enumerate(zip(seen, own.split((2, 3, 1), dim=1), strict=True)):
            before = [kept[layer]] if block and n == 2 else []
            expected += [*(numbers[m][layer] for m in row), *before, mine]
        torch.testing.assert_close(found, torch.cat(expected, dim=1), atol=0.03 * int8, rtol=0.0)
    lengths = (2 + 3 + 5, 3, 5 + 9 + (4 if block else 0) + 1)
    assert rows.attention_metadata.key_lengths == rows.last_layer_metadata.key_lengths == lengths
    assert rows.last_layer_metadata.num_attention_pairs == lengths[0]


@pytest.mark.parametrize("host_bytes", [0, 9000])
def test_an_arena_keeps_what_it_holds_apart_and_within_its_budget(host_bytes):
    rng, denoiser = random.Random(0), tiny_denoiser()
    format = KVFormat(denoiser)
    pool = EvidencePool(
        CPU, KVArena(100 * format.token_bytes, format), host_bytes and 100 * format.token_bytes
    )
    arena = pool.arena
    for _ in range(3000):
        wanted, room = [], arena.tokens
        for _ in range(rng.randrange(1, 5)):
            name = rng.randrange(40)
            segment = Segment((name,) * (name % 23 + 1), 0)
            if segment not in wanted and round_up_to_unit(len(segment.ids)) <= room:
                wanted.append(segment)
                room -= round_up_to_unit(len(segment.ids))
        if rng.random() < 0.5:  # of the call before, rows may still be shown what it saw
            pool.prefetch([Segment((name,) * (name % 23 + 1), 0) for name in rng.sample(range(40), 5)])
        for segment in pool.locate(wanted):
            arena.write(segment, torch.full_like(arena._view(segment), float(segment.ids[0])))
        if rng.random() < 0.9:  # else the call fails
            pool.commit()
            assert all((arena._view(segment) == segment.ids[0]).all() for segment in wanted)
        places = sorted(arena._ranges.values(), key=lambda place: place.start)
        assert all(one.stop <= other.start for one, other in pairwise(places))
        assert sum(map(len, places)) + sum(map(len, arena._holes)) == arena.tokens
        assert arena.bytes == sum(map(len, places)) * format.token_bytes <= arena.budget
        assert all((kept == segment.ids[0]).all() for segment, kept in arena.kept.items())
    assert pool.cache_stats.evicted_segments > 100
    assert bool(pool.cache_stats.host_tokens) == bool(host_bytes)


def test_what_a_failed_call_was_to_write_is_not_kept():
    denoiser = tiny_denoiser()
    format, empty = KVFormat(denoiser), LaidOutPrompt((), Segment((1, 2), 0))
    pool = EvidencePool(CPU, KVArena(100 * format.token_bytes, format))
    contexts = KVCacheManager(denoiser, pool, format)
    with torch.inference_mode():
        contexts.prepare_rows(shown_of((0,), [laid_out("independent", ((10, 11),), False)]))  # and it fails
        contexts.prepare_rows(shown_of((0,), [empty]))
        contexts.store_computed()
    assert not pool.arena.kept


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [{}, {"block_size": None}], ids=["blocks", "whole"])
@pytest.mark.parametrize("layout", ["independent", "prefix"])
def test_rows_that_share_segments_get_the_same_tokens(corpus_file, shape, layout, order):
    settings = {} if shape or layout == "prefix" else {"finished_block_context": order}

    def decode(size, pool, **engine):
        decoder = make_decoder(corpus_file, layout, pool, shape, batch_size=size, **settings, **engine)
        return what_happened(decoder.decode(ASKED)), decoder.model_runner

    expected, _ = decode(4, 0.0)
    with shared_segments():
        assert decode(4, 0.0)[0] == expected, "without a pool rows are gathered from slots"
        token_gib = decode(1, 1.0)[1].pool.arena.format.token_bytes / 2**30
        for size, pool in ((4, 1.0), (1, 1.0), (4, 40 * token_gib)):
            found, runner = decode(size, pool)
            assert runner.pool.arena is not None and found == expected
        assert layout == "prefix" or runner.cache_stats.evicted_segments
        if shape:
            assert runner._contexts._store.parts[0].numel() == 0, "a row keeps nothing of its own"


NO_POOL = ("joint", "parallel")  # nothing is kept, or rows are masked, which ragged kernels do not do


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("way", [way for way, setup in DECODING_SETUPS.items() if setup[0] not in NO_POOL])
def test_every_way_of_decoding_finds_what_went_to_host_memory(corpus_file, way, cache_dtype):
    def decode():
        decoder = make_setup_decoder(corpus_file, way)
        gib = 400 * KVFormat(decoder.denoiser, cache_dtype).token_bytes / 2**30
        engine = EngineConfig(prefix_cache_gib=gib, cpu_offload_gib=1e-4, cache_dtype=cache_dtype)
        decoder.model_runner = MaskedModelRunner(decoder.denoiser, decoder.tokenizer.mask_id, engine)
        return rollout_records(decoder.decode(QUESTIONS * 2)), decoder.model_runner.cache_stats

    expected, _ = decode()
    with shared_segments():
        found, stats = decode()
    assert found == expected and (stats.host_segments or DECODING_SETUPS[way][0] == "prefix")


@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize("pool", [0.0, 1.0])
def test_a_layer_asks_for_as_many_operators_for_many_rows_as_for_one(block, pool):
    """And for as many with many passages: on a GPU the host is waited for."""
    denoisers = [tiny_denoiser(block_size=block, num_hidden_layers=layers) for layers in (2, 3)]

    def count_in_a_layer(rows, passages):
        found = []
        for denoiser in denoisers:
            runner = MaskedModelRunner(denoiser, 256, EngineConfig(prefix_cache_gib=pool))
            facts = tuple((10 + n, 20 + n) for n in range(passages))
            views = []
            for slot in range(rows):
                laid = lay_out_prompt(Prompt((1, slot), facts, (4,)), denoiser.config, "independent")
                views.append(ModelInput(slot, laid, np.full(6, 256), np.arange(6)))
            runner.propose(views)  # which computes all segments where there is a pool
            calls = denoiser.flop_count.calls
            with OperatorCount() as seen:
                runner.propose(views)
            assert denoiser.flop_count.calls == calls + 1
            found.append(seen.total)
        return found[1] - found[0]

    with shared_segments(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(_KERNELS, "varlen", lambda q, k, v, sight: torch.zeros_like(q))
        assert 0 < count_in_a_layer(1, 2) == count_in_a_layer(5, 2) == count_in_a_layer(3, 6) <= 50
