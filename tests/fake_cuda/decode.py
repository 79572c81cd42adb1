"""Decoding on a CUDA device that is not there; run by tests/fake_cuda/test_fake_cuda.py."""

import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, prepare_decoder
from dlm_rag.config import DecodeConfig, EngineConfig, load_config
from dlm_rag.diffusion_gemma.decoding import DiffusionGemma
from dlm_rag.engine.runner import MaskedModelRunner
from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.machine import choose_dtype
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.families import find_family
from dlm_rag.model.packed_batch import RowInput
from dlm_rag.questions import read_questions
from dlm_rag.tokenizer import Prompt
from dlm_rag.training.specs import KNOWN_CHECKPOINTS
from dlm_rag.training.step_memory import replace_with_empty_weights
from tests.fake_cuda.checked_kernels import checked_kernels
from tests.fake_cuda.device import CUDA, PACKAGE, fake_cuda
from tests.support.decoding import QUESTIONS
from tests.support.setup_matrix import DECODING_SETUPS, EXPERTS, make_setup_decoder
from tests.support.tiny_diffusion_gemma import write_tiny_gemma
from tests.support.tiny_models import tiny_denoiser

STEP_TRAFFIC = [("in", "to_device"), ("out", "start_copy"), ("wait", "wait")]
FACTS = [((10, 11), (20, 21, 22)), ((20, 21, 22),), ((30,), (10, 11), (40, 41))]


# What the device sees.

BROKEN = [
    (lambda x: torch.tensor([0, 1], device=CUDA), "in, waiting"),
    (lambda x: torch.zeros(3).to(CUDA, non_blocking=True), "in, waiting"),
    (lambda x: torch.zeros(3, pin_memory=True)[1:].to(CUDA, non_blocking=True), "in"),
    (lambda x: x[:, np.array([0, 1])], "in, waiting"),
    (lambda x: x.cpu().numpy(), "out, waiting"),
    (lambda x: torch.zeros(3, pin_memory=True).copy_(x[0], non_blocking=True), "out"),
    (lambda x: float(x.sum()), "wait"),
    (lambda x: x[x > 0], "wait"),
    (lambda x: torch.equal(x, x), "wait"),
    (lambda x: torch.cuda.current_stream().record_event().synchronize(), "wait"),
]


@pytest.mark.parametrize(("broken", "said"), BROKEN)
def test_copies_and_waits_are_noted(broken, said):
    with fake_cuda() as seen, torch.inference_mode():
        x = torch.zeros(4, 3, device=CUDA)
        try:
            broken(x)
        except RuntimeError as error:
            assert said == "wait" and str(error).endswith("waits for the device")
    assert set(seen) == {(said, "the test")}


def test_what_stays_on_the_device_is_no_traffic():
    with fake_cuda() as seen:
        x = torch.zeros(4, 3, device=CUDA)
        for fine in (x + torch.zeros(()), x.new_zeros(3), x[1:, 0].sum(), x.half()):
            assert fine.device == CUDA
    assert not seen


@pytest.mark.parametrize("product", [torch.mm, lambda a, b: torch.addmm(a, a, b)])
def test_products_of_two_dtypes_are_refused_as_torch_refuses_them(product):
    a, b = torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        product(a, b)
    with fake_cuda(), pytest.raises(RuntimeError, match="got numbers of"):
        product(*(torch.empty_like(x, device=CUDA) for x in (a, b)))


# Steps.


def views_of(shape, layout, drawn=None, soft=None, **asked):
    """Three rows of other lengths, each at another point of its canvas; the last has one position left."""
    found = []
    for slot, facts in enumerate(FACTS):
        laid = lay_out_prompt(Prompt((1, 2, 3), facts, (4,)), shape, layout)
        canvas, rng = np.full(8 + slot, 256), np.random.default_rng(slot)
        positions = np.arange(len(canvas)) if slot < 2 else np.array([5])
        if drawn or soft:
            sizes = (2, len(positions)) if soft else len(positions)
            asked |= {"quantiles": rng.random(sizes), "soft_threshold": soft, "temperature": drawn or 0.0}
        found.append(RowInput(slot, laid, canvas, positions, **asked))
    return found


def steps(denoiser, layout, engine, **asked):
    """What four steps send, one after another; before the third another passage comes into one row."""
    proposer = MaskedModelRunner(denoiser, 256, engine)
    views = views_of(denoiser.config, layout, **asked)
    for again in range(4):
        if again == 2:
            laid = lay_out_prompt(
                Prompt((1, 2, 3), ((50, 51), (20, 21, 22)), (4,)), denoiser.config, layout
            )
            views[1] = replace(views[1], laid_out_prompt=laid)
        calls = denoiser.flop_count.calls
        proposals = proposer.propose(views)()
        assert denoiser.flop_count.calls == calls + 1, "new passages run in the same call"
        assert [len(found.token_ids) for found in proposals] == [8, 9, 1]
        yield


def denoiser_on_gpu(dtype=torch.bfloat16, attention="auto", **shape):
    denoiser = tiny_denoiser(passage_length=6, **shape).to(CUDA, dtype)
    denoiser.attention = attention
    return denoiser


ASKED = {
    "likeliest": {},
    "drawn": {"drawn": 0.7},
    "spread": {"needs_entropy": True},
    "by lot": {"soft": (1.0, 0.9, 1.0)},
    "copied words": {"barred": np.arange(258) > 97},
}
POOLS = {"no pool": (0.0, False), "pool, shifted": (1.0, True)}


@pytest.mark.parametrize(("layout", "asked"), [("independent", way) for way in ASKED] + [
    ("joint", "likeliest"), ("prefix", "drawn")
])  # fmt: skip
@pytest.mark.parametrize(("prefix_cache_gib", "shifted"), POOLS.values(), ids=POOLS)
def test_a_decode_step_is_one_call_one_copy_in_and_one_out(layout, shifted, asked, prefix_cache_gib):
    with fake_cuda() as seen:
        denoiser = denoiser_on_gpu(shifted=shifted)
        seen.clear()
        for _ in steps(denoiser, layout, EngineConfig(prefix_cache_gib=prefix_cache_gib), **ASKED[asked]):
            assert seen == STEP_TRAFFIC
            seen.clear()


@pytest.mark.parametrize("asked", ASKED)
def test_a_step_of_a_graph_is_one_copy_in_and_one_out(asked):
    with fake_cuda() as seen, checked_kernels() as calls:
        denoiser, captured = denoiser_on_gpu(attention="indexed"), []
        seen.clear()
        for _ in steps(denoiser, "independent", EngineConfig(cuda_graphs=True), **ASKED[asked]):
            assert seen == STEP_TRAFFIC
            captured.append(len(calls))
            seen.clear()
        assert {*calls} == {"indexed"} and captured[0] < captured[1] and captured[-1] == captured[-2]


@pytest.mark.parametrize(
    ("order", "kernel"), [("recompute", "sdpa"), ("recompute", "varlen"), ("no_evidence", "flash")]
)
def test_blocks_that_are_finished_cost_no_call_and_no_copy_of_their_own(order, kernel):
    """A step is one call, whatever was finished, found or moved before it."""
    with fake_cuda() as seen, checked_kernels(flash=True) as calls:
        denoiser = denoiser_on_gpu(
            attention=kernel, block_size=4, evidence_layout="independent", finished_block_context=order
        )
        proposer = MaskedModelRunner(denoiser, 256, EngineConfig(prefix_cache_gib=1.0))
        for step, finished in enumerate((0, 4, 4, 8)):
            views = []
            for slot, facts in enumerate(FACTS):
                laid = lay_out_prompt(Prompt((1, 2, 3), facts[step % 2 :], (4,)), denoiser.config)
                positions = np.arange(finished, finished + 8)
                views.append(
                    RowInput(slot, laid, np.full(finished + 8, 256), positions, finished_length=finished)
                )
            before = denoiser.flop_count.calls
            seen.clear()
            proposer.propose(views)()
            assert denoiser.flop_count.calls == before + 1 and seen == STEP_TRAFFIC
        assert set(calls) == {kernel}


def test_logits_that_are_read_out_in_parts_come_out_in_one_copy():
    with fake_cuda() as seen:
        denoiser = denoiser_on_gpu()
        proposer = MaskedModelRunner(denoiser, 256, EngineConfig(prefix_cache_gib=0.0))
        laid = lay_out_prompt(Prompt((1,), (), ()), denoiser.config, "joint")
        whole = RowInput(0, laid, np.full(2000, 256), np.arange(2000))
        seen.clear()
        proposer.propose([whole, RowInput(1, laid, np.full(3, 7), np.arange(0))])()
        assert seen == STEP_TRAFFIC


KERNELS = {  # what is there -> capability, flash-attn, torch's active kernel -> what is called
    "volta": ((7, 0), False, None, "sdpa"),
    "turing": ((7, 5), True, None, "sdpa"),
    "ampere": ((8, 0), False, None, "varlen"),
    "ampere, flash-attn": ((8, 0), True, None, "flash"),
    "hopper, FA3": ((9, 0), False, "FA3", "varlen"),
    "spark": ((12, 1), False, None, "varlen"),
}


@pytest.mark.parametrize("there", KERNELS)
@pytest.mark.parametrize(("layout", "heads", "pool"), [("joint", 1, 0.0), ("independent", 4, 1.0)])
def test_the_kernel_and_the_dtype_follow_the_generation(there, layout, heads, pool):
    capability, flash, implementation, called = KERNELS[there]
    with fake_cuda(capability) as seen, checked_kernels(flash, implementation) as calls:
        dtype = choose_dtype("auto", CUDA)
        assert dtype == (torch.float16 if capability < (8, 0) else torch.bfloat16)
        denoiser = denoiser_on_gpu(dtype, num_key_value_heads=heads, qkv_bias=True, qk_norm=True)
        seen.clear()
        for _ in steps(denoiser, layout, EngineConfig(prefix_cache_gib=pool)):
            assert seen == STEP_TRAFFIC
            seen.clear()
    assert set(calls) == {called}


def test_64_rows_of_llada_8b_share_200_passages():
    """Each sees 7 of them; each with its own, keys and values would take 36 GiB."""
    public = KNOWN_CHECKPOINTS["GSAI-ML/LLaDA-8B-Instruct"]
    shape = find_family(public).read_config(public)
    shape = replace(shape, passage_length=100, evidence_layout="independent")
    most_gib = 8
    engine = EngineConfig(cache_dtype="int8", prefix_cache_gib=most_gib)
    rng = np.random.default_rng(0)
    with fake_cuda(), checked_kernels() as calls:
        with torch.device("meta"):
            denoiser = Denoiser(shape).to(torch.bfloat16)
        with CUDA:
            denoiser = replace_with_empty_weights(denoiser)
        denoiser.attention = "auto"
        denoiser.set_rope_theta(shape.rope_theta)
        runner = MaskedModelRunner(denoiser, 126336, engine)
        views = []
        for row in range(64):
            facts = [(int(n), *[7] * 99) for n in rng.choice(200, 7, replace=False)]
            laid = lay_out_prompt(Prompt((row, *[1] * 27), tuple(facts), (2,) * 4), shape)
            views.append(RowInput(row, laid, np.full(100, 126336), np.arange(100)))
        for _ in range(2):  # the first step is the one that encodes
            before = denoiser.flop_count.calls
            runner.propose(views)()
        assert denoiser.flop_count.calls == before + 1, "all rows in one call"
    assert set(calls) == {"varlen"}
    assert 0.6 * most_gib < runner.cache.used_bytes / 2**30 <= most_gib
    assert runner.cache.memory.capacity == runner.cache.budget_tokens, "it has not grown"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_experts_wait_in_bfloat16_not_at_all_and_else_where_it_says_so(dtype):
    with fake_cuda() as seen:
        denoiser = denoiser_on_gpu(dtype, experts=EXPERTS)
        seen.clear()
        for _ in steps(denoiser, "independent", EngineConfig(prefix_cache_gib=1.0)):
            # Two products a layer: what goes in, what comes out.
            waits = [] if dtype == torch.bfloat16 else [("out, waiting", "multiply_by_expert")] * 4
            assert seen == [STEP_TRAFFIC[0], *waits, *STEP_TRAFFIC[1:]]
            seen.clear()


# The whole loop.


def decoder_on_gpu(corpus_file, way, dtype=torch.bfloat16):
    return make_setup_decoder(corpus_file, way, lambda denoiser: denoiser.to(CUDA, dtype))


@pytest.mark.parametrize("way", DECODING_SETUPS)
def test_answers_come_out_in_one_copy_a_step(corpus_file, way):
    with fake_cuda() as seen:
        decoder, steps = decoder_on_gpu(corpus_file, way), []
        propose = decoder.model_runner.propose
        decoder.model_runner.propose = lambda inputs: (steps.append(len(inputs)), propose(inputs))[1]
        seen.clear()
        rollouts = decoder.decode(QUESTIONS)
        assert [rollout.error for rollout in rollouts] == [""] * len(QUESTIONS)
        assert set(STEP_TRAFFIC) == set(seen)
        assert Counter(seen)[STEP_TRAFFIC[1]] == Counter(seen)[STEP_TRAFFIC[2]] == len(steps)


def test_the_shipped_model_is_read_onto_the_device_and_answers(monkeypatch):
    # Which waits for the contents of weights.
    monkeypatch.setattr("dlm_rag.model.checkpoint._check_values", lambda *_: None)
    with fake_cuda((7, 0)) as seen:
        config = fill_in_shipped_files(
            load_config(None, ["model.device=cuda", "decode.max_new_tokens=4"]), []
        )
        asked = read_questions(config.questions)[:2]
        decoder = prepare_decoder(config, asked).load()
        seen.clear()
        assert not any(rollout.error for rollout in decoder.decode(asked))
        assert decoder.denoiser.device.type == "cuda" and set(seen) == set(STEP_TRAFFIC)


def test_what_goes_to_the_store_and_comes_back_is_not_waited_for(corpus_file):
    class Store(dict):
        def add(self, segment, kept, ready):
            assert kept.device.type == "cpu" and ready is not None
            self[segment] = kept

        def get_all(self, segments):
            return [*map(self.get, segments)]

    with fake_cuda() as seen:
        decoder = decoder_on_gpu(corpus_file, "independent")
        store = decoder.model_runner.cache.store = Store()
        decoder.decode(QUESTIONS)
    assert len(store) > 3 and decoder.model_runner.cache_stats.store_segments > 3
    assert {("out", "_copy_to_host"), ("in", "write")} <= {*seen}
    assert not {("out, waiting", "_copy_to_host"), ("in, waiting", "write")} & {*seen}


# Uniform noise.


def test_a_model_of_uniform_noise_answers(tmp_path, corpus_file):
    checkpoint = open_checkpoint(write_tiny_gemma(tmp_path))
    with fake_cuda() as seen:
        denoiser = DiffusionGemma(checkpoint, CUDA, torch.bfloat16)
        settings = DecodeConfig(max_new_tokens=24, batch_size=2)
        retriever = load_retriever(corpus_file, top_k=2)
        decoder = Decoder(denoiser, retriever, Tokenizer.from_pretrained(checkpoint), settings)
        seen.clear()
        rollouts = decoder.decode(QUESTIONS)
    assert [rollout.error for rollout in rollouts] == [""] * len(QUESTIONS)
    # transformers begins every cache with an empty tensor that it sends.
    assert {note for note in seen if note[0] != "in, waiting"} == set(STEP_TRAFFIC)


# Faults that are planted.


def move_frequencies(monkeypatch, denoiser):
    denoiser.inverse_frequencies = torch.zeros(4)


def wait_for_a_value(monkeypatch, denoiser):
    read_out = Denoiser.compute_token_logits

    def waits(self, hidden):
        assert hidden.sum().item() == 0
        return read_out(self, hidden)

    monkeypatch.setattr(Denoiser, "compute_token_logits", waits)


def widen_the_head(monkeypatch, denoiser):
    denoiser.lm_head.to(torch.float32)


@pytest.mark.parametrize(
    ("plant", "says", "file", "line"),
    [
        (move_frequencies, "two devices, c", "denoiser.py", "places * self.inverse_frequencies"),
        (wait_for_a_value, "_local_scalar_dense.default waits", "decode.py", "hidden.sum().item()"),
        (widen_the_head, "aten.mm.default got numbers of", "denoiser.py", "self.lm_head"),
    ],
)
def test_a_fault_is_found_where_it_is(monkeypatch, plant, says, file, line):
    with fake_cuda():
        denoiser = denoiser_on_gpu()
        plant(monkeypatch, denoiser)
        with pytest.raises(RuntimeError, match=says) as found:
            next(steps(denoiser, "independent", EngineConfig()))
    frames = traceback.extract_tb(found.value.__traceback__)
    last = [frame for frame in frames if frame.filename.startswith((PACKAGE, __file__))][-1]
    assert Path(last.filename).name == file and line in last.line
