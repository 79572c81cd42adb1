"""What is kept between steps: the same as computing it anew, within its budget, counted."""

import random
from contextlib import nullcontext

import pytest
import torch

from dlm_rag.engine.batch_kv_cache import CacheRequest, KVCacheManager
from dlm_rag.engine.kv_format import KVFormat
from dlm_rag.engine.kv_tiers import KVArena
from dlm_rag.engine.segment_kv_cache import EvidencePool, default_pool_bytes, measure_free_bytes
from dlm_rag.evidence.encode_segments import encode_canvases, encode_contexts
from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.packed_batch import Segment, pack_rows
from dlm_rag.tokenizer import Prompt
from tests.support.tiny_models import tiny_denoiser

CPU = torch.device("cpu")
CANVASES = [(256, 7, 256), (9, 256), (256, 256, 256, 8)]
READ = [(0, 2), (1,), (0, 1, 2)]
PASSAGE_TOKENS = 1 * 2 * 2 * 8 * 4  # bytes of a token in `kept`


def segment(name, length=10):
    return Segment((name,) * length, 0)


def kept(length=10):
    return torch.zeros(1, 2, length, 2, 8)


def names(pool, tier=0):
    return [found.ids[0] for found in (pool._near, pool._far)[tier].kept]


def test_what_was_used_longest_ago_leaves_first():
    pool = EvidencePool(CPU, 3 * 10 * PASSAGE_TOKENS)
    for name in (1, 2, 3):
        pool.add(segment(name), kept())
    assert pool.get(segment(1)) is not None
    pool.add(segment(4), kept())
    assert names(pool) == [3, 1, 4] and pool.get(segment(2)) is None
    assert pool.cache_stats.evicted_segments == 1


def test_what_leaves_the_device_comes_back_from_the_host():
    pool = EvidencePool(CPU, 10 * PASSAGE_TOKENS, 10 * PASSAGE_TOKENS)
    one = torch.randn(1, 2, 10, 2, 8)
    pool.add(segment(1), one)
    pool.add(segment(2), kept())
    assert (names(pool), names(pool, 1)) == ([2], [1])
    pool.prefetch([segment(1), segment(3)])
    assert (names(pool), names(pool, 1)) == ([1], [2]) and pool.cache_stats.host_tokens == 10
    torch.testing.assert_close(pool.get(segment(1)), one)


def test_no_tier_passes_its_budget_in_thousands_of_refreshes():
    rng = random.Random(0)
    budgets = (5000, 9000)
    pool, largest = EvidencePool(CPU, *budgets), 0
    for _ in range(3000):
        wanted = segment(rng.randrange(300), rng.choice((1, 7, 30, 200)))
        if pool.get(wanted) is None:
            pool.add(wanted, kept(len(wanted.ids)))
        held = [sum(t.nbytes for t in tier.kept.values()) for tier in (pool._near, pool._far)]
        assert tuple(held) == pool.used_bytes and all(a <= b for a, b in zip(held, budgets, strict=True))
        largest = max(largest, *held)
    assert largest > 0.9 * budgets[1], "the budget is used"
    assert pool.get(segment(0, 200)) is None, "200 tokens of 128 bytes fit nowhere"


def laid_out(layout, facts, shifted, question=(1, 2, 3)):
    shape = DenoiserConfig(300, shifted=shifted, passage_length=6)
    return lay_out_prompt(Prompt(question, tuple(facts), (4,)), shape, layout)


def shown_of(slots, laid):
    """The rows with their canvases, of which all states may be asked for."""
    rows = zip(slots, laid, CANVASES, strict=False)
    return [
        CacheRequest(slot, row, row.build_canvas_segment(canvas, 0), 0, 0) for slot, row, canvas in rows
    ]


def hidden_of(denoiser, contexts, slots, laid):
    """The states that predict the positions `READ`, from slots and as they are computed anew."""
    shifted, canvases = denoiser.config.shifted, CANVASES[: len(laid)]
    states = [row.build_row(canvas, 0, shifted) for row, canvas in zip(laid, canvases, strict=True)]
    runs, stored = contexts.prepare_rows(shown_of(slots, laid))
    firsts = [len(row.canvas_prefix.ids) - shifted for row in laid]
    asked = [[first + n for n in places] for first, places in zip(firsts, READ, strict=False)]
    read = [[] if run.row is None else asked[run.row] for run in runs]
    rows = pack_rows([run.segment for run in runs], CPU, read, stored)
    fresh = encode_canvases(denoiser, states, encode_contexts(denoiser, states), READ[: len(laid)])
    found = denoiser.encode(rows)[0]
    contexts.store_computed()
    return found, fresh, stored


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
    pool = EvidencePool(CPU, budget, budget // 2) if budget else None
    contexts = KVCacheManager(denoiser, pool, KVFormat(denoiser))
    slots = (2, 0, 1)
    with torch.inference_mode():
        for evidence in STEPS:
            laid = [
                laid_out(layout, facts, shifted, question)
                for facts, question in zip(evidence, ((1, 2), (3,), (5, 6, 7)), strict=True)
            ]
            found, fresh, _ = hidden_of(denoiser, contexts, slots, laid)
            torch.testing.assert_close(found, fresh)


def test_a_segment_is_encoded_once_for_all_rows_and_steps():
    denoiser = tiny_denoiser()
    contexts = KVCacheManager(denoiser, EvidencePool(CPU, 10**9), KVFormat(denoiser))
    laid = [laid_out("independent", facts, False) for facts in ((A, B), (B, A), (A,))]
    with torch.inference_mode():
        hidden_of(denoiser, contexts, (0, 1, 2), laid)
        hidden_of(denoiser, contexts, (0, 1, 2), laid[::-1])
    assert contexts.cache_stats.encoded_tokens == len(A) + len(B) + 4, (
        "the question is the same in all rows"
    )
    assert contexts.cache_stats.requested_tokens == 2 * (9 + 9 + 6)


def test_under_autocast_contexts_are_kept_in_its_dtype():
    """As in the validation of a training whose weights are float32."""
    denoiser, laid = tiny_denoiser(), [laid_out("independent", (A, B), False)]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        contexts = KVCacheManager(denoiser, EvidencePool(CPU, 10**9), KVFormat(denoiser))
        found, expected, stored = hidden_of(denoiser, contexts, (0,), laid)
    assert {part.dtype for part in stored.cache.parts} == {torch.bfloat16}
    torch.testing.assert_close(found, expected)


class FakeStream:
    """A CUDA stream that only writes down what it waits for."""

    def __init__(self, name, log):
        self.name, self.log, self.events = name, log, 0

    def record_event(self):
        self.events += 1
        return f"{self.name} {self.events}"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def wait_stream(self, stream):
        self.wait_event(stream.name)


@pytest.fixture
def streams(monkeypatch):
    """The copies' stream and the denoiser's, for a pool on a CPU."""
    log = []
    copies, here = FakeStream("copies", log), FakeStream("denoiser", log)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: here)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    return copies, log


def test_a_copy_waits_for_what_the_denoiser_was_asked_before(streams):
    """The memory that it writes to was the denoiser's until now, and may still be read."""
    copies, log = streams
    pool = EvidencePool(CPU, 10 * PASSAGE_TOKENS, 10 * PASSAGE_TOKENS)
    pool._copies = copies
    one = torch.randn(1, 2, 10, 2, 8)
    pool.add(segment(1), one)
    pool.add(segment(2), kept())
    assert log == ["copies waits for denoiser 1"]
    pool.prefetch([segment(1)])
    assert log[1:] == ["copies waits for denoiser 2", "copies waits for denoiser 3"], "2 goes, 1 comes"
    torch.testing.assert_close(pool.get(segment(1)), one)
    assert log[3:] == ["denoiser waits for copies 3"]
    pool.get(segment(1))
    assert len(log) == 4, "once is enough"


def test_nothing_is_moved_in_an_arena_before_its_copies_are_made(streams):
    """Of a store, say, that still reads what the call before has written."""
    copies, log = streams
    format = KVFormat(tiny_denoiser())
    pool = EvidencePool(CPU, KVArena(40 * format.token_bytes, format))
    pool._copies = copies
    for segments in ([segment(1, 24), segment(2, 8)], [segment(2, 8), segment(3, 16)]):
        pool.locate(segments)
        pool.commit()
    del log[:]
    assert pool.arena.range_of(segment(2, 8)).start == 24
    pool.locate([segment(3, 16), segment(2, 8), segment(4, 16)])
    assert pool.arena.range_of(segment(2, 8)).start == 16 and log == ["denoiser waits for copies"]


def test_what_is_free_is_what_the_container_may_take(tmp_path, monkeypatch):
    for name, value in (("max", "5000000"), ("current", "3000000")):
        (tmp_path / name).write_text(f"{value}\n")
    group = (tmp_path / "max", tmp_path / "current")
    monkeypatch.setattr("dlm_rag.engine.segment_kv_cache.CGROUP_MEMORY_FILES", (group,))
    assert measure_free_bytes(CPU) == 2_000_000 and default_pool_bytes(CPU) == 500_000
    (tmp_path / "max").write_text("max\n")
    assert measure_free_bytes(CPU) > 2_000_000
