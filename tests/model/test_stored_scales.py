"""Checkpoints that are stored quantised: read as their formats say, against weights dequantised here."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_rag import Denoiser
from dlm_rag.errors import CheckpointError
from dlm_rag.model.checkpoint import open_checkpoint, save_tensors
from tests.golden.tiny_checkpoints import write_checkpoint
from tests.model.test_families import write_public
from tests.model.test_quantize import needs_torchao
from tests.support.family_checkpoints import change

CPU = torch.device("cpu")
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn


def compressed_tensors(**weights):
    kind = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True} | weights
    return {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"weights": kind, "targets": ["Linear"], "input_activations": None}},
    }  # fmt: skip


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
# quantization_config; dtype, suffix of the scales, rows and columns that share one.
FORMATS = {
    "a scale for a tensor": (compressed_tensors(strategy="tensor"), INT8, "scale", (None, None)),
    "for a row": (compressed_tensors(), INT8, "scale", (1, None)),
    "for a row, float8": (compressed_tensors(type="float"), FLOAT8, "scale", (1, None)),
    "for a group": (compressed_tensors(strategy="group", group_size=8), INT8, "scale", (1, 8)),
    "for a block": (
        compressed_tensors(strategy="block", type="float", block_structure=[16, 16]), FLOAT8, "scale",
        (16, 16),
    ),
    "DeepSeek's blocks": (FP8, FLOAT8, "scale_inv", (16, 32)),
    "DeepSeek's, one": (FP8 | {"weight_block_size": None}, FLOAT8, "scale_inv", (None, None)),
    "AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static"}, FLOAT8, "scale", (None, None)),
}  # fmt: skip


def quantise(weight, dtype, block):
    """Numbers, scales, and what both come to, block by block."""
    rows, columns = (each or size for each, size in zip(block, weight.shape, strict=True))
    numbers, found = torch.empty_like(weight, dtype=dtype), torch.empty_like(weight)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[at].abs().max() / (127 if dtype == INT8 else 448)
            part = weight[at] / scales[i, j]
            numbers[at] = (part.round() if dtype == INT8 else part).to(dtype)
            found[at] = numbers[at].float() * scales[i, j]
    return numbers, scales, found


def store(folder, name):
    """Quantises the linear layers of a checkpoint; returns all tensors as they must be read."""
    config, dtype, suffix, block = FORMATS[name]
    plain = load_file(folder / "model.safetensors")
    stored, expected = {}, {}
    for key, value in plain.items():
        stored[key] = expected[key] = value
        if value.dim() == 2 and ".layers." in key and ".gate.weight" not in key:
            stored[key], scales, expected[key] = quantise(value, dtype, block)
            stored[f"{key}_{suffix}"] = scales.flatten() if block == (None, None) else scales
            stored[f"{key.removesuffix('weight')}input_scale"] = torch.ones(1)
        if key.endswith("k_proj.weight"):
            stored[key.replace("k_proj.weight", "k_scale")] = torch.ones(1)
    (folder / "model.safetensors").unlink()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, quantization_config=config)
    return plain, expected


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["a2d-qwen3", "llada2"])
def test_weights_are_dequantised_as_their_format_says(tmp_path, name, family):
    """Also where queries, keys and values are one matrix, and experts stacked; rows alone as well."""
    write_checkpoint(family, tmp_path)
    plain, expected = store(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    found = dict(checkpoint.iterate_tensors(CPU, torch.float32))
    save_tensors(found, checkpoint.config, tmp_path / "again", {}, checkpoint)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == plain.keys()
    for key, value in expected.items():
        torch.testing.assert_close(again[key], value, rtol=1e-6, atol=0)
    assert "quantization_config" not in open_checkpoint(tmp_path / "again").raw_config
    for key, value in found.items():
        assert torch.equal(checkpoint.read_tensor_rows(key, slice(1, 3)), value[1:3])
    size = sum(value.nbytes for value in found.values())
    assert checkpoint.count_weight_bytes(4) == size, "as they are held"


@pytest.mark.parametrize("quantize", ["none", pytest.param("int8", marks=needs_torchao)])
def test_a_stored_model_answers_nearly_as_before_and_may_be_quantised_again(tmp_path, quantize):
    write_public(tmp_path, "a2d-qwen2")
    ids = torch.arange(30)[None]
    with torch.inference_mode():
        expected = Denoiser.from_pretrained(tmp_path)(ids)
        store(tmp_path, "for a row")
        found = Denoiser.from_pretrained(tmp_path, quantize=quantize)(ids)
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_scales_may_lie_in_another_shard(tmp_path):
    write_public(tmp_path, "a2d-qwen3")
    _, expected = store(tmp_path, "for a row")
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    parts = {"a": {}, "b": {}}
    for key, value in stored.items():
        parts["b" if key.endswith("_scale") else "a"][key] = value
    for name, part in parts.items():
        save_file(part, tmp_path / f"{name}.safetensors")
    homes = {key: f"{name}.safetensors" for name, part in parts.items() for key in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    found = dict(open_checkpoint(tmp_path).iterate_tensors(CPU, torch.float32))
    key = "layers.1.mlp.down_proj.weight"
    torch.testing.assert_close(found[key], expected[f"model.{key}"], rtol=1e-6, atol=0)


UNREAD = [
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"quant_method": "compressed-tensors"},
    compressed_tensors(num_bits=4),
    compressed_tensors(symmetric=False),
    compressed_tensors(strategy="token"),
    compressed_tensors() | {"format": "pack-quantized"},
    FP8 | {"weight_block_size": [0, 128]},
    FP8 | {"weight_block_size": ["128", 128]},
    FP8 | {"weight_block_size": [128]},
    [],
    "fp8",
]


@pytest.mark.parametrize("said", UNREAD, ids=str)
def test_a_format_that_is_not_read_is_refused_with_the_remedy(tmp_path, said):
    write_public(tmp_path, "a2d-qwen3")
    change(tmp_path, quantization_config=said)
    with pytest.raises(CheckpointError, match=r"is not read, only .* model.quantize=int8"):
        open_checkpoint(tmp_path)


def test_scales_of_another_shape_or_none_are_refused(tmp_path):
    write_public(tmp_path, "a2d-qwen3")
    store(tmp_path, "for a row")
    change(tmp_path, quantization_config=compressed_tensors(strategy="group", group_size=8))
    with pytest.raises(CheckpointError, match=r"has shape \[\d+, 1\], which does not fit \[\d+, 48\] of"):
        open_checkpoint(tmp_path)
    change(tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match="has the type I8, only F64"):
        open_checkpoint(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    bare = {key: value for key, value in stored.items() if not key.endswith("_scale")}
    save_file(bare, tmp_path / "model.safetensors")
    change(tmp_path, quantization_config=compressed_tensors())
    with pytest.raises(CheckpointError, match="has the type I8, only F64.* model.quantize=int8"):
        open_checkpoint(tmp_path)
