"""A budget of memory: what is reckoned against what is allocated, and what does not fit is refused."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dlm_rag import Decoder, load_retriever
from dlm_rag.config import DecodeConfig, EngineConfig, load_config
from dlm_rag.decode import memory_budget
from dlm_rag.decode.memory_budget import (
    GIB,
    DecodeMemory,
    LongestRow,
    SharedSegmentBytes,
    limit_cuda_allocator,
    plan_decode_budget,
)
from dlm_rag.decode.model_runner import DecodeBudget
from dlm_rag.errors import ConfigError
from dlm_rag.evidence import batch_kv_cache
from dlm_rag.evidence.segment_kv_cache import has_unified_memory, measure_free_bytes
from dlm_rag.evidence.truncation import ContextBudget
from dlm_rag.model.memory_tracker import MemoryTracker
from dlm_rag.tokenizer.prompts import PromptTemplate
from dlm_rag.training.planning.plan import check_run_fits
from tests.support.attention import shared_segments
from tests.support.cases import first_is_fast
from tests.support.decoding import QUESTIONS, rollout_records
from tests.support.passages import write_jsonl_file
from tests.support.paths import ROOT
from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer

CPU = torch.device("cpu")
WORDS = "a novel of the time that was read by all who could read and then forgotten again, "


def make(folder, layout, rows, **shape):
    """A decoder whose passages are all cut, or fill what they may, and what `rows` rows take there."""
    corpus = write_jsonl_file(
        folder / "long.jsonl",
        [{"id": f"{n}", "contents": f"Emma Dune author {n} {WORDS * 3}"} for n in range(40)],
    )
    tokenizer = tiny_tokenizer(PromptTemplate(head="{question}\n", fact="{passage}"))
    settings = DecodeConfig(
        max_new_tokens=24, commit_threshold=0.4, batch_size=rows, query_policy="committed"
    )
    sizes = {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 3} | shape
    denoiser = tiny_denoiser(**sizes)
    retriever = load_retriever(corpus, top_k=3)
    decoder = Decoder(denoiser, retriever, tokenizer, settings, layout)
    question = max(len(tokenizer.build_prompt(text, []).ids) for text in QUESTIONS)
    room = ContextBudget.from_config(denoiser.config, layout, 24)
    row = LongestRow.from_budget(room, denoiser.config, question, (3, retriever.corpus.longest_line_bytes))
    memory = DecodeMemory.from_config(denoiser.config, torch.float32, settings, row)
    return decoder, memory


@pytest.mark.parametrize("block", first_is_fast([8, None]))
@pytest.mark.parametrize("rows", first_is_fast([3, 1]))
@pytest.mark.parametrize("layout", first_is_fast(["independent", "joint", "prefix"]))
def test_a_decoder_takes_what_is_reckoned_and_not_more(tmp_path, layout, rows, block):
    """Weights and slots to the byte; of the rest a bound that is not far off; the same answers."""
    decoder, memory = make(tmp_path, layout, rows, block_size=block)
    plain = rollout_records(decoder.decode(QUESTIONS))
    assert memory.weight_bytes == sum(p.nbytes for p in decoder.denoiser.parameters())
    kept = 60_000
    given = EngineConfig(memory_gib=(memory.bytes_without_pool(rows) + kept) / GIB)
    found = plan_decode_budget(memory, given, CPU, rows)
    assert found.pool_bytes == pytest.approx(kept, abs=2)
    with MemoryTracker() as alive:
        decoder.set_memory_budget(found)
        assert rollout_records(decoder.decode(QUESTIONS)) == plain
    pool = decoder.model_runner.pool
    assert pool.used_bytes[0] <= kept
    if memory.row.has_kv_slot:
        assert decoder.model_runner._contexts._store.parts[0].nbytes == memory.kv_slot_bytes(rows), (
            "never grown"
        )
    reckoned = memory.kv_slot_bytes(rows) + memory.step_bytes(rows) + kept
    assert 0.5 * reckoned < alive.peak_bytes <= reckoned


@pytest.mark.parametrize("block", first_is_fast([8, None]))
def test_rows_that_gather_what_they_see_take_what_is_reckoned(tmp_path, block):
    """Where segments lie in the pool alone, with room for those of all rows."""
    decoder, memory = make(tmp_path, "independent", 3, block_size=block, head_dim=64, num_hidden_layers=2)
    plain = rollout_records(decoder.decode(QUESTIONS))
    shape, engine = decoder.denoiser.config, EngineConfig()
    shared = SharedSegmentBytes.from_config(shape, torch.float32, "varlen", engine)
    memory = replace(memory, shared=shared)
    found = DecodeBudget(memory.shared_segment_bytes(3), 3, memory.slot_tokens, memory.scratch_tokens(3))
    with shared_segments(), MemoryTracker() as alive:
        decoder.set_memory_budget(found)
        assert rollout_records(decoder.decode(QUESTIONS)) == plain
    reckoned = memory.kv_slot_bytes(3) + memory.step_bytes(3) + found.pool_bytes
    assert 0.4 * reckoned < alive.peak_bytes <= reckoned


def test_many_new_passages_run_a_few_at_a_time(tmp_path, monkeypatch):
    """A room of 200 tokens, two passages: the same answers, and a smaller bound that holds."""
    decoder, memory = make(tmp_path, "independent", 3)
    plain, whole = (
        rollout_records(decoder.decode(QUESTIONS)),
        memory.step_bytes(3) + memory.kv_slot_bytes(3),
    )
    for module in (batch_kv_cache, memory_budget):
        monkeypatch.setattr(module, "PREFILL_SCRATCH_TOKENS", 200)
    less = memory.step_bytes(3) + memory.kv_slot_bytes(3)
    found = plan_decode_budget(
        memory, EngineConfig(memory_gib=(memory.bytes_without_pool(3) + 4e5) / GIB), CPU, 3
    )
    with MemoryTracker() as alive:
        decoder.set_memory_budget(found)
        assert rollout_records(decoder.decode(QUESTIONS)) == plain
    assert alive.peak_bytes <= less + found.pool_bytes and less < whole


@pytest.mark.parametrize("settings", first_is_fast([{"temperature": 0.7}, {"commit_rule": "sampled"}]))
def test_sampling_takes_more_for_each_position(tmp_path, settings):
    _, plain = make(tmp_path, "independent", 1)
    decoder, _ = make(tmp_path, "independent", 1, vocab_size=4000)
    config, shape = DecodeConfig(**settings), decoder.denoiser.config
    one, more = (
        DecodeMemory.from_config(shape, torch.float32, c, plain.row) for c in (DecodeConfig(), config)
    )
    assert more.logit_bytes_per_position > one.logit_bytes_per_position + 4 * 4000


def test_the_batch_that_is_said_to_fit_fits_and_no_larger_one(tmp_path, monkeypatch):
    """Pools that are named count, in host memory too, where that is the device's own."""
    _, memory = make(tmp_path, "independent", 8)

    def plan(rows, gib, **pools):
        return plan_decode_budget(memory, EngineConfig(memory_gib=gib, **pools), CPU, rows).pool_bytes

    five, pools = memory.bytes_without_pool(5) / GIB, {"prefix_cache_gib": 0.2, "cpu_offload_gib": 0.2}
    assert plan(5, five + 1e-9) == 1 and plan(5, five + 0.5, **pools) == int(0.2 * GIB)
    monkeypatch.setattr("dlm_rag.decode.memory_budget.measure_free_bytes", lambda device: 3 * GIB)
    assert plan(2, 2) > GIB
    for rows, gib, more, says in (
        (8, five + 1e-9, {}, "weights take .*, a step .*decode.batch_size=5 fits"),
        (6, five + 1e-9, {}, "decode.batch_size=5 fits"),
        (1, memory.weight_bytes / GIB, {}, "not one question fits"),
        (5, five + 0.5, {**pools, "cpu_offload_gib": 0.4}, "pools 0.6 GiB"),
        (2, 4, {}, "=4 is more than the 3.0 GiB that are free on this cpu"),
    ):
        with pytest.raises(ConfigError, match=says):
            plan(rows, gib, **more)


def test_a_gpu_in_the_memory_of_the_host_has_what_the_host_has_free(monkeypatch):
    """A GB10: the driver calls taken what only caches files."""
    device, made = torch.device("cuda", 0), SimpleNamespace(is_integrated=True, total_memory=8 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: made)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 8 * GIB))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    assert has_unified_memory(device) and measure_free_bytes(device) == pytest.approx(
        measure_free_bytes(CPU), rel=0.1
    )
    made.is_integrated = False
    assert not has_unified_memory(device) and measure_free_bytes(device) == 1
    shares = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: shares.append(given))
    limit_cuda_allocator(EngineConfig(memory_gib=2), device)
    limit_cuda_allocator(EngineConfig(), device)
    limit_cuda_allocator(EngineConfig(memory_gib=2), CPU)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    limit_cuda_allocator(EngineConfig(memory_gib=4), torch.device("cuda"))
    assert shares == [(0.25, 0), (0.5, 3)], "torch takes a number here, not `cuda`"


@pytest.mark.slow
def test_training_is_held_to_the_budget_by_its_plan():
    words = [
        "train.hidden_size=64", "train.num_hidden_layers=2", "train.vocab_size=400",
        "train.passage_sets_per_step=1", "train.prompts_per_step=1",
        "train.rows_per_set=2", "train.num_generations=2", "decode.max_new_tokens=32", "retrieval.top_k=2",
        "train.world_passages=100",
    ]  # fmt: skip
    check_run_fits(load_config(None, [*words, "engine.memory_gib=0.1"]), 1, CPU)
    for more, said in (
        (["engine.memory_gib=0.001"], "alone take"),
        (["engine.memory_gib=0.003"], "a step takes"),
        (["engine.memory_gib=0.1", "engine.prefix_cache_gib=0.1"], "a step takes"),
        (["engine.memory_gib=1000000"], "GB free for it"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            check_run_fits(load_config(None, [*words, *more]), 1, CPU)
        assert "engine.memory_gib=" in str(caught.value)


def answers(path):
    """All of each line but how long it took."""
    lines = [json.loads(line) | {"seconds": None} for line in path.read_text().splitlines()]
    return {line["id"]: line for line in lines}


@pytest.mark.slow
def test_two_programs_under_budgets_finish_side_by_side(tmp_path):
    """With the answers of one that has the machine for itself."""

    def start(name, *more):
        words = ["--limit", "24", "--out", str(tmp_path / name), "decode.batch_size=4", *more]
        questions = str(ROOT / "dlm_rag/shipped/world/questions.jsonl")
        command = [sys.executable, "sample.py", "--questions", questions, *words]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    both = [start(name, "engine.memory_gib=0.15") for name in ("one", "two")]
    for process in both:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    alone = start("alone")
    assert alone.communicate(timeout=120) and alone.returncode == 0
    expected = answers(tmp_path / "alone")
    assert len(expected) == 24 and answers(tmp_path / "one") == answers(tmp_path / "two") == expected
    stamp = json.loads((tmp_path / "one.run.json").read_text())
    assert stamp["config"]["engine"]["memory_gib"] == 0.15
