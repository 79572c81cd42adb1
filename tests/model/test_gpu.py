"""What only a GPU can show, in at most five minutes on one: `python -m pytest -m gpu`.

Most checks are functions of a device; the fast tests run them on the CPU, where the answer is known:
what fails on a GPU only is the GPU's.
"""

import copy
import json
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, prepare_decoder
from dlm_rag.config import EngineConfig, load_config
from dlm_rag.engine.cache import KVMemory
from dlm_rag.engine.runner import MaskedModelRunner
from dlm_rag.evaluation.metrics import compute_exact_match
from dlm_rag.machine import default_pool_bytes, measure_free_bytes
from dlm_rag.model.layers import ATTENTION_BACKENDS, compute_attention, get_backend_problem
from dlm_rag.model.packed_batch import MemoryRows, Segment, pack_rows
from dlm_rag.model.quantize import _quantize_linear
from dlm_rag.questions import read_questions
from dlm_rag.training.distributed import DistributedContext
from dlm_rag.training.trainer import open_trainer
from tests.support.attention import random_rows, sight_of
from tests.support.block_attention import (
    MASK,
    block_denoiser,
    dense_reference_states,
    top_confidences,
    walk_decode_views,
)
from tests.support.decoding import QUESTIONS, make_decoder, rollout_records
from tests.support.golden_traces import TRACES, check_trace
from tests.support.paths import ROOT, SHARED
from tests.support.tiny_models import tiny_denoiser
from tests.support.torchrun_training_cases import TRAINING_CASES, run_training_case

CPU = torch.device("cpu")
ALONE = DistributedContext(0, 1, 0)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
CUDA = pytest.param(torch.device("cuda"), marks=ON_GPU, id="cuda")
DEVICES = pytest.mark.parametrize("device", [pytest.param(CPU, id="cpu"), CUDA])
ON_A_GPU = pytest.mark.parametrize("device", [CUDA])  # of which the CPU has faster tests
LOW = (torch.bfloat16, torch.float16)
KERNELS = pytest.mark.parametrize(
    ("device", "kernel", "dtype"),
    [
        *(pytest.param(CPU, "sdpa", dtype, id=f"cpu-sdpa-{dtype}") for dtype in (torch.float32, *LOW)),
        *(
            pytest.param(torch.device("cuda"), kernel, dtype, marks=ON_GPU, id=f"cuda-{kernel}-{dtype}")
            for kernel in (*ATTENTION_BACKENDS, "indexed")
            for dtype in ((torch.float32, *LOW) if kernel == "sdpa" else LOW)
        ),
    ],
)
HEADS = (8, 2, 64)  # heads, key-value heads, head width
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}  # which every kernel takes


def usable(kernel, device, dtype):
    """Skips where a kernel is not installed, or not for such a GPU."""
    if reason := get_backend_problem(kernel, device, dtype):
        pytest.skip(f"{kernel}: {reason}")


def close(found, expected, values):
    """Attention in a low precision rounds its weights once and its result once.

    Each costs half of the precision, of the largest value at most. In float32 what counts are sums in
    another order, of up to thousands of keys.
    """
    assert found.isfinite().all()
    steps = 1 if found.dtype in LOW else 64
    bound = steps * torch.finfo(found.dtype).eps * float(values.abs().max()) + 1e-5
    worst = float((found.float().cpu() - expected).abs().max())
    assert worst <= bound, f"{worst:.2e} off where rounding explains {bound:.2e}"


ROWS = {  # lengths of queries and keys; of blocks
    "even": ((96, 96, 96), (96, 96, 96), None),
    "ragged": ((1, 37, 300, 128), (1, 37, 300, 128), None),
    "more keys": ((5, 64, 1), (600, 64, 257), None),
    "one query each": ((1, 1, 1), (700, 3, 256), None),
    "some without queries": ((0, 5, 0, 2), (7, 90, 1, 64), None),
    "none or one query each": ((0, 1, 1), (7, 90, 300), None),
    "a long context": ((4,), (3000,), None),
    "causal": ((1, 37, 300), (1, 37, 300), 1),
    "blocks": ((1, 37, 300), (1, 37, 300), 8),
    "blocks longer than a row": ((1, 37, 300), (1, 37, 300), 200),
}


@KERNELS
@pytest.mark.parametrize("rows", ROWS)
def test_every_kernel_gives_what_sdpa_gives_in_float32(device, kernel, dtype, rows):
    usable(kernel, device, dtype)
    queries, keys, block = ROWS[rows]
    q, k, v = (x.to(dtype).float() for x in random_rows(queries, keys, *HEADS))
    expected = compute_attention(q, k, v, sight_of(queries, keys, block), "sdpa")
    there = (x.to(device, dtype) for x in (q, k, v))
    found = compute_attention(*there, sight_of(queries, keys, block, device), kernel)
    assert found.dtype == dtype
    close(found, expected, v)


STORED = {  # tokens of each row that lie in the memory already, and its own
    "ragged": ((300, 0, 77), (40, 64, 8)),
    "one token each": ((255, 256, 700), (1, 1, 1)),
    "a long context": ((3000,), (64,)),
}


@KERNELS
@pytest.mark.parametrize("rows", STORED)
@pytest.mark.parametrize("reads", ["all", "few"])
def test_every_kernel_reads_rows_that_lie_in_a_memory(device, kernel, dtype, rows, reads):
    """Here and there, in a memory in which nothing but the rows is a number."""
    usable(kernel, device, dtype)
    seen, own = STORED[rows]
    keys = tuple(a + b for a, b in zip(seen, own, strict=True))
    read = [range(n) if reads == "all" else range(n - 1, n) for n in own]
    queries = tuple(map(len, read))
    q, k, v = (x.to(dtype).float() for x in random_rows(queries, keys, *HEADS))
    expected = compute_attention(q, k, v, sight_of(queries, keys), "sdpa")
    shape = dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), HEADS, strict=True))
    denoiser = tiny_denoiser(num_hidden_layers=1, **shape).to(device, dtype)
    memory = KVMemory(denoiser, budget_bytes=9000 * KVMemory(denoiser).token_bytes)
    memory.layer(0).fill_(torch.nan)
    memory.give_back(np.random.default_rng(0).permutation(memory.take(6000)))
    before, own_keys, own_values = [memory.take(n) for n in seen], [], []
    for places, row_k, row_v in zip(before, k.split(keys), v.split(keys), strict=True):
        n = len(places)
        memory.write(places, torch.stack((row_k[:n], row_v[:n]))[None].to(device, dtype), 0)
        own_keys.append(row_k[n:])
        own_values.append(row_v[n:])
    by_row = kernel == "indexed" or (kernel == "sdpa" and device.type == "cpu")
    context = MemoryRows(memory, before, [memory.take(n) for n in own], by_row)
    packed = pack_rows([Segment((1,) * n, 0) for n in own], device, read=read, context=context)
    there = packed.gather_keys_values(*(torch.cat(x).to(device, dtype) for x in (own_keys, own_values)), 0)
    close(compute_attention(q.to(device, dtype), *there, packed.last_layer_metadata, kernel), expected, v)


@KERNELS
@pytest.mark.parametrize("order", ["recompute", "no_evidence"])
def test_finished_blocks_are_kept_with_every_kernel(device, kernel, dtype, order):
    """Against the definition as a mask: kernels without masks get the blocks row by row.

    Both in float64 for the kernel that does it: sharp toy weights make much of rounding in float32.
    """
    dtype = torch.float64 if dtype == torch.float32 else dtype
    usable(kernel, device, dtype)
    denoiser = block_denoiser(**WIDE, evidence_layout="independent", finished_block_context=order).double()
    there = copy.deepcopy(denoiser).to(device, dtype)
    there.attention = kernel
    proposer = MaskedModelRunner(there, MASK, EngineConfig(prefix_cache_gib=1))
    for view in walk_decode_views(denoiser.config, order, 3):
        (found,) = proposer.propose([view])()
        confidence, _ = top_confidences(denoiser, dense_reference_states(denoiser, view))
        off = np.abs(found.confidence - confidence.numpy())
        assert off.mean() < (0.1 if dtype in LOW else 1e-6)


@KERNELS
@pytest.mark.parametrize("rows", ["ragged", "more keys", "causal", "blocks"])
def test_every_kernel_has_the_gradients_of_sdpa_in_float32(device, kernel, dtype, rows):
    usable(kernel, device, dtype)
    queries, keys, block = ROWS[rows]
    inputs = [x.to(dtype).float() for x in random_rows(queries, keys, *HEADS)]
    weights = torch.randn(sum(queries), *HEADS[::2], generator=torch.Generator().manual_seed(1))
    gradients = []
    for place, kind, name in ((CPU, torch.float32, "sdpa"), (device, dtype, kernel)):
        there = [x.to(place, kind).requires_grad_() for x in inputs]
        found = compute_attention(*there, sight_of(queries, keys, block, place), name)
        gradients.append(torch.autograd.grad(found, there, weights.to(place, kind)))
    bound = 2 * torch.finfo(dtype).eps if dtype in LOW else 1e-4
    for expected, found in zip(*gradients, strict=True):
        off = (found.float().cpu() - expected).norm() / expected.norm()
        assert off < bound, f"{off:.2e} of the gradient's norm"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", TRACES)
def test_golden_traces_in_float32(name):
    if not (SHARED / "golden").is_dir():
        pytest.skip("the reference data golden/ is not here (set DLM_RAG_SHARED)")
    check_trace(SHARED / "golden", name, torch.device("cuda"))


def decoded(corpus_file, device, layout, engine, **settings):
    decoder = make_decoder(corpus_file, layout, top_k=3, batch_size=2, **settings)
    decoder.denoiser.to(device)
    decoder.model_runner = MaskedModelRunner(decoder.denoiser, 256, engine)
    return rollout_records(decoder.decode(QUESTIONS * 2)), decoder.model_runner.cache_stats


@DEVICES
@pytest.mark.parametrize(("method", "rounding"), [("int8", 0.01), ("nvfp4", 0.15)])
def test_a_quantised_product_is_close_to_the_plain_one_alone_and_in_a_batch(device, method, rounding):
    """Of rows of very different sizes; rounding: what it does to a product of random numbers."""
    pytest.importorskip("torchao")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(192, 128, generator=generator).mul(0.02).bfloat16()
    x = torch.randn(40, 128, generator=generator) * torch.logspace(-4, 4, 40)[:, None]
    layer = torch.nn.Linear(128, 192, bias=False, device=device)
    layer, x = _quantize_linear(layer, weight.to(device), method), x.bfloat16()
    expected = x.double() @ weight.double().T
    with torch.inference_mode():
        found = layer(x.to(device)).cpu().double()
        alone = torch.cat([layer(row[None].to(device)) for row in x]).cpu().double()
        assert layer(x[:0].to(device)).shape == (0, 192)
    size = expected.norm(dim=1)
    assert ((found - expected).norm(dim=1) < rounding * size).all()
    assert ((found - alone).norm(dim=1) <= 0.01 * size).all()


@DEVICES
@pytest.mark.parametrize("layout", ["prefix", "independent"])
@pytest.mark.parametrize("overlap", ["none", "pipeline"])
def test_a_small_pool_changes_no_token(corpus_file, device, layout, overlap):
    """It holds a few passages, which leave and come back all the time."""
    plain, _ = decoded(corpus_file, device, layout, EngineConfig(prefix_cache_gib=0.0))
    small = EngineConfig(prefix_cache_gib=4e-5)
    ours, reuse = decoded(corpus_file, device, layout, small, overlap=overlap)
    assert ours == plain
    if layout == "independent":
        assert reuse.evicted_segments > 5


@DEVICES
def test_a_pool_whose_size_nobody_named_is_smaller_than_what_is_free(device):
    free = measure_free_bytes(device)
    assert 0 < default_pool_bytes(device) < 0.8 * free
    if device.type == "cuda":
        held = torch.empty(2**30, dtype=torch.uint8, device=device)
        assert default_pool_bytes(device) < 0.8 * (free - held.nbytes / 2)
        del held
        assert measure_free_bytes(device) > free - 2**28, "what the allocator keeps is free to us"


def words_for(case, device, *more):
    return [*TRAINING_CASES[case], f"model.device={device}", *more]


@DEVICES
def test_training_steps_are_those_of_the_cpu(device, tmp_path):
    """In float32; products in TF32 would be a hundred times farther off."""
    found = []
    for place in (CPU, device):
        trainer, _ = open_trainer(
            load_config(None, words_for("sft", place, "train.dtype=float32")), tmp_path
        )
        steps = [trainer.step() for _ in range(3)]
        found.append([(m["loss"], m["gradient_norm"], m["pointer_loss"]) for m in steps])
    assert found[1][0] == pytest.approx(found[0][0], rel=3e-5), "with the same weights"
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


@ON_A_GPU
def test_training_in_bfloat16_goes_through_validation_and_comes_back(device, tmp_path, monkeypatch):
    """Steps, a checkpoint, the validation by the decoder, an export, and half of the steps again."""
    monkeypatch.setitem(TRAINING_CASES, "here", words_for("sft bfloat16", device))
    found = run_training_case("here", tmp_path, ALONE)
    assert found["again"] == pytest.approx(found["loss"][2:], rel=1e-3)
    assert 0 < found["scores"]["nelbo_per_token"] < 10
    monkeypatch.setitem(TRAINING_CASES, "there", words_for("sft", CPU, "train.dtype=float32"))
    (tmp_path / "float32").mkdir()
    assert found["loss"] == pytest.approx(
        run_training_case("there", tmp_path / "float32", ALONE)["loss"], rel=3e-2
    )


@ON_A_GPU
def test_one_process_with_one_shard(device, tmp_path, monkeypatch):
    """FSDP over NCCL (gloo on a CPU): the steps of the whole model, validated, saved, gone on with."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [*launcher, "-m", "tests.support.torchrun_one_process", str(tmp_path), device.type]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    for case, dtype, near in (("sft", "float32", 1e-3), ("sft bfloat16", "bfloat16", 1e-2)):
        ours = json.loads((tmp_path / f"{case} sharded" / "found.json").read_text())
        monkeypatch.setitem(TRAINING_CASES, "whole", words_for(case, device, f"train.dtype={dtype}"))
        (tmp_path / f"{case} whole").mkdir()
        theirs = run_training_case("whole", tmp_path / f"{case} whole", ALONE)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=near)
        assert ours["again"] == pytest.approx(ours["loss"][2:], rel=near)
        assert ours["scores"].keys() == theirs["scores"].keys()


@ON_A_GPU
def test_compiled_layers_are_the_same_layers(device):
    plain, compiled = (tiny_denoiser(num_hidden_layers=3).to(device) for _ in range(2))
    torch._dynamo.reset()  # graphs of other tests would serve
    compiled.compile_layers()
    with torch.inference_mode():
        for lengths in ((5, 9), (64, 3, 7), (31,)):
            rows = pack_rows(
                [Segment((7,) * n, 0) for n in lengths], device, read=[(0, n - 1) for n in lengths]
            )
            found, expected = (d.encode(rows)[0] for d in (compiled, plain))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert 2 <= compiled.compilations <= 6


@ON_A_GPU
def test_compiled_training_steps_are_the_same_steps(device, tmp_path):
    found = []
    for more in ("train.compile=false", "train.compile=true"):
        words = words_for("sft", device, "train.dtype=float32", more)
        trainer, _ = open_trainer(load_config(None, words), tmp_path)
        found.append([trainer.step()["loss"] for _ in range(3)])
    assert found[1] == pytest.approx(found[0], rel=1e-3)


@contextmanager
def without_waits(device):
    """Raises where anything but `to_host` waits for the GPU; on a CPU nothing can."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@DEVICES
@pytest.mark.parametrize("layout", ["joint", "prefix", "independent"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block", [None, 4])
def test_decode_steps_wait_in_the_marked_place_only(corpus_file, device, layout, dtype, block):
    engine = EngineConfig(prefix_cache_gib=4e-5)
    settings = {"temperature": 0.5, "overlap": "pipeline"}
    decoder = make_decoder(corpus_file, layout, batch_size=2, **settings)
    decoder.denoiser.config = replace(decoder.denoiser.config, block_size=block)
    for parameter in decoder.denoiser.to(device).parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))  # the rotary frequencies stay as they are
    decoder.model_runner = MaskedModelRunner(decoder.denoiser, 256, engine)
    decoder.decode(QUESTIONS)
    decoder.model_runner.reset_cache()
    with without_waits(device):
        assert all(not rollout.error for rollout in decoder.decode(QUESTIONS))


TRAINED = {
    "sft": ("sft", []),
    "sft, muon": ("sft muon", []),
    "pretrain": ("pretrain", []),
    "pretrain, selective": ("pretrain", ["train.activation_checkpointing=selective"]),
}


@ON_A_GPU
@pytest.mark.parametrize("way", TRAINED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_training_steps_wait_in_the_marked_place_only(device, way, dtype, tmp_path):
    case, words = TRAINED[way]
    config = load_config(None, words_for(case, device, f"train.dtype={dtype}", *words))
    for name in ("first", "again"):  # compilers wait for the GPU, too, and have nothing left to do again
        trainer, _ = open_trainer(config, tmp_path / name)
        trainer.step()
        with without_waits(device) if name == "again" else nullcontext():
            for _ in range(2):
                assert trainer.step()["loss"] > 0


@DEVICES
def test_the_shipped_model_answers(device):
    """As it is chosen by itself: bfloat16 and the fastest kernel on a GPU, float32 on a CPU."""
    config = fill_in_shipped_files(
        load_config(None, [f"model.device={device}", "decode.batch_size=16"]), []
    )
    asked = read_questions(config.questions)[: 16 if device.type == "cpu" else 64]
    rollouts = prepare_decoder(config, asked).load().decode(asked)
    right = [compute_exact_match(r.answer, q.golden_answers) for r, q in zip(rollouts, asked, strict=True)]
    assert sum(right) / len(right) > 0.7, "the page of results says 80 and more"
