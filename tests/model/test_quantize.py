"""Weights in low precision: every family loads, tokens are those of any batch, memory is counted."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from dlm_rag import Denoiser
from dlm_rag.errors import ConfigError
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.quantize import METHODS, check_quantize, count_weight_bytes, list_quantized_weights
from tests.golden.tiny_checkpoints import CONFIGS, write_checkpoint
from tests.model.test_block_attention import ASKED, make_decoder, what_happened
from tests.model.test_families import PUBLIC, write_public
from tests.support.setup_matrix import EXPERTS
from tests.support.tiny_models import tiny_denoiser

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
DISTANCE = {"int8": 0.1, "nvfp4": 0.6}  # of the logits of random weights


def load(folder, **settings):
    return Denoiser.from_pretrained(folder, **settings)


def count_held_bytes(model):
    """Bytes of the parameters as they lie in memory: torchao's tell those of what they stand for."""
    total = 0
    for value in model.parameters():
        inner = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else ()
        total += sum(getattr(value, name).nbytes for name in inner) if inner else value.nbytes
    return total


@needs_torchao
@pytest.mark.parametrize("method", METHODS)
def test_float16_which_sums_in_float32_is_refused(tmp_path, method):
    write_checkpoint(sorted(CONFIGS)[0], tmp_path)
    with pytest.raises(ConfigError, match="no float16"):
        load(tmp_path, quantize=method, dtype=torch.float16)


@needs_torchao
@pytest.mark.parametrize("method", METHODS)
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
    changed = {name for name, value in denoiser.named_parameters() if type(value) is not nn.Parameter}
    assert all(name.startswith("layers.") for name in changed)
    assert len(changed) >= len(list_quantized_weights(plain)), "of experts one each"
    if method == "int8":  # scales of nvfp4 come in tiles
        assert count_held_bytes(denoiser) == count_weight_bytes(config, 4, method)
    assert (denoiser.lm_head.weight is denoiser.embed_tokens.weight) == config.tie_word_embeddings
    ids = torch.arange(30)[None]
    with torch.inference_mode():
        found, expected = denoiser(ids), plain(ids)
    assert found.isfinite().all()
    if config.experts is None:  # a token that goes to another expert is another one
        assert (found - expected).norm() < DISTANCE[method] * expected.norm()


@needs_torchao
@pytest.mark.parametrize("method", METHODS)
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


@needs_torchao
def test_quantised_numbers_are_neither_moved_nor_saved(tmp_path):
    tiny_denoiser().save_pretrained(tmp_path)
    denoiser = load(tmp_path, quantize="int8")
    with pytest.raises(ConfigError, match="quantised weights stay as they are"):
        denoiser.to(torch.bfloat16)
    assert denoiser.dtype == torch.float32, "nothing is changed by what is refused"
    with pytest.raises(ConfigError, match="quantised weights are not saved"):
        denoiser.save_pretrained(tmp_path / "again")
    denoiser.layers = nn.ModuleList()
    with pytest.raises(ConfigError, match="finds no linear layers"):
        list_quantized_weights(denoiser)


def test_what_cannot_be_quantised_is_refused_before_weights_are_read(monkeypatch):
    config = tiny_denoiser().config
    with pytest.raises(ConfigError, match="nearest: 'int8'"):
        check_quantize("int9", config, torch.float32)
    monkeypatch.setattr("dlm_rag.model.quantize.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"int8 needs torchao: pip install 'dlm_rag\[quantize\]'"):
        check_quantize("int8", config, torch.float32)
