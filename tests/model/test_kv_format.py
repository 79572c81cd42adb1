"""Keys and values in int8: close to what they were, half as large, the same in every step and tier."""

import pytest
import torch

from dlm_rag.config import EngineConfig
from dlm_rag.engine.cache import KVMemory, dequantize_int8, quantize_int8
from dlm_rag.engine.runner import MaskedModelRunner
from dlm_rag.model.packed_batch import Segment, pack_rows
from tests.model.test_block_attention import ASKED, make_decoder, what_happened
from tests.support.attention import ragged_kernel
from tests.support.tiny_models import tiny_denoiser

SEGMENTS = [Segment((7, 8, 9), 0), Segment((7, 8, 9, 10), 40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_a_number_moves_by_half_a_step_of_its_token_and_head(dtype, size):
    x = (torch.randn(50, 2, 128, generator=torch.Generator().manual_seed(0)) * size).to(dtype)
    kept = quantize_int8(x)
    assert kept.dtype == torch.int8 and kept.nbytes <= 0.52 * 2 * x.numel(), "of bfloat16"
    off = (dequantize_int8(kept, dtype).double() - x.double()).abs()
    step = x.double().abs().amax(-1, keepdim=True) / 127
    rounding = x.double().abs() * torch.finfo(dtype).eps
    assert (off <= 0.51 * step + rounding + 2.0**-24).all()


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_bias_of_the_keys_is_kept_exactly(qk_norm):
    """A channel that is large for all tokens, as in Qwen2, leaves the others their precision."""
    denoiser = tiny_denoiser(qkv_bias=True, qk_norm=qk_norm)
    plain = KVMemory(tiny_denoiser(), "int8")
    with torch.inference_mode():
        for block in denoiser.layers:
            block.self_attn.k_proj.bias.zero_()
            block.self_attn.k_proj.bias[3::8] = 300.0
        memory = KVMemory(denoiser, "int8")
        rows = pack_rows(SEGMENTS, torch.device("cpu"))
        for layer, (k, v) in enumerate(denoiser.encode(rows, keep=True)[1]):
            off = []
            for kept in (memory, plain):
                places = torch.from_numpy(kept.take(len(k)))
                kept.write_layer(layer, places, k, v, rows.positions)
                off.append((kept.read_layer(layer, places)[0] - k).abs().max())
            assert qk_norm or off[0] < off[1] / 30


@pytest.mark.parametrize("shape", [{}, {"block_size": None}, {"block_size": None, "qkv_bias": True}])
def test_tokens_are_the_same_in_every_batch_pool_and_memory(corpus_file, shape):
    """What is kept is what every step reads, the first one too."""

    def decode(size, pool):
        decoder = make_decoder(corpus_file, "independent", pool, shape, batch_size=size)
        engine = EngineConfig(prefix_cache_gib=pool, cache_dtype="int8")
        decoder.model_runner = MaskedModelRunner(decoder.denoiser, decoder.tokenizer.mask_id, engine)
        return what_happened(decoder.decode(ASKED))

    expected = decode(4, 0.0)
    assert [decode(1, 1.0), decode(4, 1.0), decode(3, 1e-5)] == [expected] * 3
    with ragged_kernel():
        assert [decode(1, 1.0), decode(4, 1.0)] == [expected] * 2
