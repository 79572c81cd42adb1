"""Low precision: close to a dequantised reference, rows alone as in a batch, counted to the byte."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from dlm_rag import Denoiser
from dlm_rag.commands.encode import PassageEncoder
from dlm_rag.commands.prepare_decoder import prepare_decoder
from dlm_rag.config import DecodeConfig, ModelConfig, load_config
from dlm_rag.config.fields import list_choices
from dlm_rag.decode.memory_budget import DecodeMemory, LongestRow
from dlm_rag.errors import ConfigError
from dlm_rag.evidence.evidence_store import describe_context
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.layers import Embedding, Linear, Router
from dlm_rag.model.memory_tracker import MemoryTracker
from dlm_rag.model.quantize import (
    METHODS,
    QuantizedLinear,
    check_quantize,
    count_scratch_bytes,
    count_weight_bytes,
    describe_precision,
    find_problem,
    list_quantized_weights,
)
from dlm_rag.questions import Question
from tests.golden.tiny_checkpoints import CONFIGS, write_checkpoint
from tests.model.test_block_attention import ASKED, make_decoder, what_happened
from tests.model.test_families import PUBLIC, write_public
from tests.support.setup_matrix import EXPERTS
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser

CPU = torch.device("cpu")
HERE = ["int8", "int8_weight", "fp8"]
TORCHAO = pytest.param(
    "nvfp4_weight", marks=pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape, dtype=torch.float32, size=1.0, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def round_rows(x, method):
    """What a row becomes that is stored in 8 bits with a scale of its own, in float64."""
    x = x.double()
    if method == "fp8":
        scale = x.abs().amax(1, keepdim=True) / 448
        return (x / scale).float().to(torch.float8_e4m3fn).double() * scale
    scale = x.abs().amax(1, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", HERE)
def test_a_product_is_that_of_the_rounded_rows(method, dtype):
    weight, x, bias = (
        random(96, 64, dtype=dtype, size=0.02),
        random(70, 64, dtype=dtype, seed=1),
        random(96),
    )
    tokens = x.double() if method == "int8_weight" else round_rows(x, method)
    expected = tokens @ round_rows(weight, method).T + bias.double()
    found = QuantizedLinear(weight, nn.Parameter(bias.to(dtype)), method)(x)
    assert found.dtype == dtype
    # A number half-way between two may be rounded either way, in float32 and in float64.
    off, unit = (found.double() - expected).abs(), torch.finfo(dtype).eps
    assert (off <= 2e-3 + 4 * unit * expected.abs().clamp(min=1)).all() and off.mean() < 2e-4 + unit


@pytest.mark.parametrize("method", [*HERE, TORCHAO])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(method, dtype):
    """Nor on a neighbour a thousand times larger, nor on one that is not finite, which stays so."""
    layer, x = QuantizedLinear(random(96, 64), None, method), random(40, 64, dtype=dtype, seed=1)
    x[7] *= 1000
    whole, alone = layer(x), torch.cat([layer(row[None]) for row in x])
    if method == "int8":
        assert torch.equal(whole, alone)
    else:  # whose sums are as exact as those that are not quantised
        largest = alone.double().abs().amax(1, keepdim=True)
        assert ((whole.double() - alone.double()).abs() <= 8 * torch.finfo(dtype).eps * largest).all()
    x[3, 5], x[4, 6] = torch.inf, torch.nan
    spoilt = layer(x)
    assert not spoilt[3:5].isfinite().any()
    others = [n for n in range(40) if n not in (3, 4)]
    assert torch.equal(spoilt[others], whole[others])
    assert layer(x[:0]).shape == (0, 96) and not layer(torch.zeros(2, 64, dtype=dtype)).any()


def unswizzle(scales, rows, columns):
    """Scales (rows, columns) in float32 out of cuBLAS's tiles of 128 x 4."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    tile = row // 128 * -(-columns // 4) + column // 4
    flat = (scales if scales.is_contiguous() else scales.t()).flatten()
    return flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4].float()


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def scaled_mm(a, b, scale_a, scale_b, bias=None, out_dtype=None):
    """`torch._scaled_mm` with scales of blocks as CUDA computes it, in float32, and what that refuses."""
    assert a.is_contiguous() and b.t().is_contiguous()
    assert not any(width % 16 for width in (a.shape[1], *b.shape)), "as in torch's ScaledBlas.cpp"
    factors = []
    for numbers, scales in ((a, scale_a), (b.t(), scale_b)):
        block = 32
        if numbers.dtype == torch.float4_e2m1fn_x2:  # the first of a pair is in the lower half
            block, packed = 16, numbers.view(torch.uint8).int()
            numbers = E2M1[torch.stack((packed & 15, packed >> 4), 2).flatten(1)]
        rows, columns = len(numbers), numbers.shape[1] // block
        assert scales.numel() == -(-rows // 128) * -(-columns // 4) * 512
        factors.append(numbers.float() * unswizzle(scales, rows, columns).repeat_interleave(block, 1))
    return (factors[0] @ factors[1].t()).to(out_dtype)


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nvfp4_weights_are_multiplied_in_the_tokens_dtype_where_bfloat16_is_emulated(monkeypatch, dtype):
    """The same weights as elsewhere, where the tokens are rounded to bfloat16."""
    layer, x = (
        QuantizedLinear(random(64, 128, size=0.02), None, "nvfp4_weight"),
        random(8, 128, dtype=dtype, seed=1),
    )
    weights, rounded = layer(torch.eye(128)).t(), layer(x)
    monkeypatch.setattr("dlm_rag.model.quantize.has_bfloat16", lambda device: False)
    found, true = layer(x), x.double() @ weights.double().t()
    assert torch.equal(layer(torch.eye(128)).t(), weights) and found.dtype == dtype
    assert (found - true).abs().max() < (rounded - true).abs().max() / 3


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.parametrize("shape", [(256, 128, 40), (160, 64, 5), (32, 96, 130)])
@pytest.mark.parametrize(("method", "rounding"), [("mxfp8", 1 / 16), ("nvfp4", 1 / 4)])
def test_what_blackwell_is_given_is_the_product(monkeypatch, method, rounding, shape):
    """Numbers and layout of scales, read here as cuBLAS does, for rows and blocks of very different size.

    rounding: at most so much of a row's norm is rounded away, of a token's and of a weight's.
    """
    monkeypatch.setattr("torchao.prototype.mx_formats.inference_workflow.is_sm_at_least_100", lambda: True)
    monkeypatch.setattr("torch._scaled_mm", scaled_mm)
    rows, width, tokens = shape
    weight, x = random(rows, width, size=0.02), random(tokens, width, seed=1)
    for value in (weight, x):
        value *= torch.exp2(random(len(value), width // 16, size=3).round()).repeat_interleave(16, 1)
    weight[1] *= 1e-4
    x[:3] *= torch.tensor([[1e-5], [1e5], [0]])
    layer = QuantizedLinear(weight, None, method)
    found, expected = layer(x), x.double() @ weight.double().T
    norms = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    assert ((found - expected).abs() <= (2 * rounding + rounding**2) * norms).all()
    alone = torch.cat([layer(row[None]) for row in x])
    assert ((alone - found).abs() <= 2**-7 * norms).all()


def test_widths_that_torch_refuses_are_refused_before_weights_are_read(monkeypatch):
    """Rows of NVFP4 with 16 bytes or more: 48 numbers are 24 of them."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr("dlm_rag.model.quantize.find_spec", lambda name: True)
    config = tiny_denoiser(hidden_size=48, intermediate_size=96, head_dim=32).config
    check_quantize("nvfp4_weight", torch.device("cuda"), config)
    with pytest.raises(ConfigError, match="multiples of 32"):
        check_quantize("nvfp4", torch.device("cuda"), config)


def load(folder, **settings):
    return Denoiser.from_pretrained(folder, **settings)


@pytest.mark.parametrize("method", HERE)
@pytest.mark.parametrize("family", sorted({*CONFIGS, *PUBLIC}))
def test_every_family_loads_quantised(tmp_path, family, method):
    """All that multiplies inside the layers, nothing else; counted as it is held; close to what it was."""
    write_public(tmp_path, family) if family in PUBLIC else write_checkpoint(family, tmp_path)
    multiple = METHODS[method].multiple
    plain, config = load(tmp_path), open_checkpoint(tmp_path).config
    if any(width % multiple for w in list_quantized_weights(plain).values() for width in w.shape[-2:]):
        with pytest.raises(ConfigError, match=f"widths that are multiples of {multiple}, and layers.0"):
            load(tmp_path, quantize=method)
        return
    denoiser = load(tmp_path, quantize=method)
    plain_kinds = [m for m in denoiser.modules() if isinstance(m, Linear | Embedding | Router)]
    assert {type(m) for m in plain_kinds if m not in (denoiser.lm_head, denoiser.embed_tokens)} <= {Router}
    assert sum(p.nbytes for p in denoiser.parameters()) == count_weight_bytes(config, 4, method)
    assert (denoiser.lm_head.weight is denoiser.embed_tokens.weight) == config.tie_word_embeddings
    ids = torch.arange(30)[None]
    with torch.inference_mode():
        found, expected = denoiser(ids), plain(ids)
    assert found.isfinite().all()
    if config.experts is None:  # a token that goes to another expert is another one
        assert (found - expected).norm() < {"fp8": 0.3}.get(method, 0.1) * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", [None, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_loading_takes_no_second_copy(tmp_path, monkeypatch, method, experts, dtype):
    monkeypatch.setattr("dlm_rag.model.checkpoint.MAX_MAPPED_BYTES", 10_000)
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 24, "experts": experts}
    tiny_denoiser(**wide).to(torch.bfloat16).save_pretrained(tmp_path)
    with MemoryTracker() as alive:
        denoiser = load(tmp_path, dtype=dtype, quantize=method)
    held = sum(p.nbytes for p in denoiser.parameters())
    assert held <= alive.peak_bytes <= 1.15 * held
    assert held == open_checkpoint(tmp_path).count_weight_bytes(dtype.itemsize, method)


@pytest.mark.parametrize("method", HERE)
@pytest.mark.parametrize("shape", [{}, {"block_size": None, "qkv_bias": True}, {"experts": EXPERTS}])
def test_tokens_are_the_same_in_every_batch(corpus_file, tmp_path, shape, method):
    tiny_denoiser(**{"block_size": 4} | shape).save_pretrained(tmp_path)

    def decode(size):
        decoder = make_decoder(corpus_file, "independent", 1.0, shape, batch_size=size)
        denoiser = load(tmp_path, quantize=method)
        decoder.denoiser = decoder.model_runner.denoiser = denoiser
        decoder.model_runner.reset_cache()
        return what_happened(decoder.decode(ASKED))

    assert decode(1) == decode(4)


@pytest.mark.parametrize("method", [*HERE, TORCHAO])
def test_in_float16_sums_of_layers_are_float32_here_too(tmp_path, method):
    """Which is an autocast, in which inputs are wider than results."""
    tiny_denoiser(qkv_bias=True, qk_norm=True).save_pretrained(tmp_path)
    ids, wide = torch.arange(30)[None], load(tmp_path, quantize=method)
    low = load(tmp_path, dtype=torch.float16, quantize=method)
    with torch.inference_mode():
        expected, found = wide(ids), low(ids)
        with torch.autocast("cpu", torch.bfloat16):
            cast = wide(ids)
    assert found.dtype == torch.float16 and cast.dtype == torch.bfloat16
    for each in (found, cast):
        assert (each.float() - expected).norm() < 0.15 * expected.norm()


def test_what_is_quantised_is_said_and_kept_apart(tmp_path):
    tiny_denoiser().save_pretrained(tmp_path)
    plain, denoiser = load(tmp_path), load(tmp_path, quantize="int8")
    assert describe_precision(plain) == "cpu float32"
    size = sum(p.nbytes for p in denoiser.parameters()) / 1000
    assert describe_precision(denoiser) == (
        f"cpu float32 with int8 in the linear layers of 2 transformer layers (weights of {size:.0f} kB)"
    )
    contexts = [json.loads(describe_context(each, "auto")) for each in (plain, denoiser)]
    assert [context.pop("quantize") for context in contexts] == ["none", "int8"]
    assert contexts[0] == contexts[1], "the same weights"
    denoiser.layers[0].self_attn.q_proj.weight_scale.mul_(2)
    with pytest.raises(ConfigError, match="have changed since"):
        describe_context(denoiser, "auto")


def test_the_layer_that_is_dequantised_at_a_time_is_counted():
    config = tiny_denoiser(hidden_size=256, intermediate_size=2048).config
    layer, x = QuantizedLinear(random(2048, 256), None, "int8_weight"), random(1, 256)
    with MemoryTracker() as alive, torch.inference_mode():
        layer(x)
    counted = count_scratch_bytes(config, "int8_weight")
    assert counted <= alive.peak_bytes < 1.05 * counted
    row = LongestRow((), 8, 8, False)
    steps = [
        DecodeMemory.from_config(config, torch.float32, DecodeConfig(), row, None, method).step_bytes(1)
        for method in ("int8", "int8_weight")
    ]
    assert steps[1] - steps[0] == counted


def test_a_job_loads_counts_and_names_its_precision(tmp_path, corpus_file):
    folder = tmp_path / "model"
    tiny_denoiser(evidence_layout="independent").save_pretrained(folder, eos_token_id=257)
    byte_tokenizer().save_pretrained(folder)
    words = [f"model.path={folder}", f"retrieval.corpus={corpus_file}", "decode.max_new_tokens=8"]
    config = load_config(None, [*words, "model.quantize=int8", f"engine.store={tmp_path / 'store'}"])
    prepared = prepare_decoder(config, [Question("1", "Who wrote Emma?")])
    assert prepared.answers_depend_on()["model.quantize"] == "int8"
    decoder = prepared.load()
    assert prepared.weight_bytes == sum(p.nbytes for p in decoder.denoiser.parameters())
    assert "cpu float32 with int8 in the linear layers of 2 transformer layers" in decoder.describe()
    _, denoiser = PassageEncoder(config)._store
    assert describe_context(denoiser, "auto") == describe_context(decoder.denoiser, "auto")
    engine = replace(config.engine, memory_gib=1.0)
    budgets = [
        prepare_decoder(replace(config, engine=engine, model=model), []).budget
        for model in (config.model, replace(config.model, quantize="none"))
    ]
    assert budgets[0].pool_bytes != budgets[1].pool_bytes, "what is left of a budget is the pool's"


def test_quantised_numbers_are_neither_converted_nor_saved(tmp_path):
    tiny_denoiser().save_pretrained(tmp_path)
    for method in ("int8", "fp8"):
        denoiser = load(tmp_path, quantize=method).to(CPU)
        with pytest.raises(ConfigError, match="quantised weights keep their dtype"):
            denoiser.to(torch.bfloat16)
        assert denoiser.dtype == torch.float32, "nothing is changed by what is refused"
        with pytest.raises(ConfigError, match="quantised weights are not saved"):
            denoiser.save_pretrained(tmp_path / "again")
    denoiser.layers = nn.ModuleList()
    with pytest.raises(ConfigError, match="finds no linear layers"):
        list_quantized_weights(denoiser)


def test_the_names_of_the_setting_are_those_of_the_table():
    assert list_choices(ModelConfig.__dataclass_fields__["quantize"]) == ("none", *METHODS)


def test_a_name_that_is_no_precision_is_refused_with_the_nearest(tmp_path):
    tiny_denoiser().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="nearest: 'int8'"):
        load(tmp_path, quantize="int9")


CAPABILITIES = {
    (7, 0): "int8_weight", (7, 5): "int8, int8_weight", (8, 9): "int8, int8_weight, fp8",
    (12, 1): "int8, int8_weight, fp8",
}  # fmt: skip


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_a_gpu_cannot_compute_is_refused_with_what_it_can(monkeypatch, capability):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("dlm_rag.model.quantize.find_spec", lambda name: None)
    gpu, config = torch.device("cuda"), tiny_denoiser().config
    works = CAPABILITIES[capability]
    for method in METHODS:
        if method in works.split(", "):
            check_quantize(method, gpu, config)
            continue
        with pytest.raises(ConfigError, match=f"set one that works here: {works}$"):
            check_quantize(method, gpu, config)
    assert ("torchao" in find_problem("nvfp4", gpu)) == (capability >= (10, 0))
