"""Segments that rows read in place: the same attention, the same tokens, each segment in memory once."""

import random
from collections import OrderedDict
from itertools import pairwise

import pytest
import torch

from dlm_rag.config import EngineConfig
from dlm_rag.decode.model_runner import MaskedModelRunner
from dlm_rag.evidence.batch_kv_cache import KVCacheManager
from dlm_rag.evidence.kv_tiers import KVArena, round_up_to_unit
from dlm_rag.evidence.prompt_segments import LaidOutPrompt
from dlm_rag.evidence.segment_kv_cache import EvidencePool
from dlm_rag.model.kv_format import KVFormat
from dlm_rag.model.packed_batch import Segment, pack_rows
from dlm_rag.model.shared_segments import SharedSegments, merge_attention
from tests.evidence.test_kv_pool import laid_out, shown_of
from tests.model.test_block_attention import ASKED, ORDERS, make_decoder, what_happened
from tests.support.attention import by_the_book, ragged_by_the_book, random_rows, shared_segments, sight_of
from tests.support.decoding import QUESTIONS, rollout_records
from tests.support.setup_matrix import DECODING_SETUPS, make_setup_decoder
from tests.support.tiny_models import tiny_denoiser

CPU = torch.device("cpu")


def test_merged_parts_are_attention_to_all_keys():
    """Each of five queries sees its own 3 keys, and none to two of three further parts."""
    q, k, v = random_rows((5,), (3 + 4 + 2 + 7,))
    parts = [range(3), range(3, 7), range(7, 9), range(9, 16)]
    seen_by = [(), (1,), (2, 3), (3, 1), (1,)]  # which of the parts, in this order
    asked = [(query, part) for query, row in enumerate(seen_by) for part in row]
    merge = torch.full((5, 2), len(asked))
    for n, (query, part) in enumerate(asked):
        merge[query, seen_by[query].index(part)] = n
    own = ragged_by_the_book(q, k[:3], v[:3], sight_of((5,), (3,)), with_lse=True)
    rows = [
        (q[n][None], k[parts[p].start : parts[p].stop], v[parts[p].start : parts[p].stop]) for n, p in asked
    ]
    sight = sight_of((1,) * len(rows), tuple(len(row[1]) for row in rows))
    shared = ragged_by_the_book(*(torch.cat(x) for x in zip(*rows, strict=True)), sight, with_lse=True)
    for query, row in enumerate(seen_by):
        keys = torch.tensor([n for part in (0, *row) for n in parts[part]])
        expected = by_the_book(q[query][None], k[keys], v[keys])
        torch.testing.assert_close(merge_attention(own, shared, merge)[query][None], expected)


def test_a_query_takes_nothing_from_parts_of_others():
    """The number that stands for no part must not read one: another row's may be no number."""
    own, shared = (
        (torch.ones(2, 1, 4), torch.zeros(1, 2)),
        (torch.full((1, 1, 4), torch.nan), torch.zeros(1, 1)),
    )
    found = merge_attention(own, shared, torch.tensor([[0], [1]]))
    assert found[0].isnan().all() and (found[1] == 1).all()


@pytest.mark.parametrize("int8", [False, True])
def test_a_plan_asks_each_segment_once_for_all_its_readers(int8):
    arena = KVArena(10**6, KVFormat(tiny_denoiser(), "int8" if int8 else "auto"))
    context = SharedSegments(arena, [(range(8, 11), range(4)), (), (range(4),)])
    plan = context.plan_reads([2, 3, 1])
    assert plan.arrays["query_index"].tolist() == [0, 1, 5, 0, 1]
    assert plan.query_lengths == ((3, 2) if int8 else (3, 0, 2)), "in between lies what nobody reads"
    assert plan.key_lengths == ((4, 3) if int8 else (4, 4, 3)) and plan.pairs == 3 * 4 + 2 * 3
    assert plan.arrays["merge_index"].tolist() == [[3, 0], [4, 1], [5, 5], [5, 5], [5, 5], [2, 5]]
    assert plan.arrays["gathered"].tolist() == ([0, 1, 2, 3, 8, 9, 10] if int8 else [])
    rows = pack_rows([Segment((1,) * n, 0) for n in (2, 3, 1)], CPU, [[0], [], []], context)
    assert rows.last_layer_metadata.shared.query_index.tolist() == [0, 0]


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


def test_room_that_is_there_is_found_without_a_look_at_all_that_is_kept():
    class Kept(OrderedDict):
        def __iter__(self):
            raise AssertionError("a pool has thousands of passages")

    format = KVFormat(tiny_denoiser())
    pool = EvidencePool(CPU, KVArena(100 * format.token_bytes, format))
    pool.arena.kept = Kept()
    assert len(pool.locate([Segment((name,) * 9, 0) for name in range(6)])) == 6


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
        assert decode(4, 0.0)[0] == expected, "without a pool the kernel reads slots"
        token_gib = decode(1, 1.0)[1].pool.arena.format.token_bytes / 2**30
        for size, pool in ((4, 1.0), (1, 1.0), (4, 40 * token_gib)):
            found, runner = decode(size, pool)
            assert runner.pool.arena is not None and found == expected
        assert layout == "prefix" or runner.cache_stats.evicted_segments
        if shape:
            assert runner._contexts._store.keys_values.numel() == 0, "a row keeps nothing of its own"


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("way", [way for way, setup in DECODING_SETUPS.items() if setup[0] != "joint"])
def test_every_way_of_decoding_finds_what_went_to_host_memory(corpus_file, way, cache_dtype):
    def decode():
        torch.manual_seed(0)  # of the policy heads
        decoder = make_setup_decoder(corpus_file, way)
        gib = 400 * KVFormat(decoder.denoiser, cache_dtype).token_bytes / 2**30
        engine = EngineConfig(prefix_cache_gib=gib, cpu_offload_gib=1e-4, cache_dtype=cache_dtype)
        decoder.model_runner = MaskedModelRunner(decoder.denoiser, decoder.tokenizer.mask_id, engine)
        return rollout_records(decoder.decode(QUESTIONS * 2)), decoder.model_runner.cache_stats

    expected, _ = decode()
    with shared_segments():
        found, stats = decode()
    assert found == expected and (stats.host_segments or DECODING_SETUPS[way][0] == "prefix")
