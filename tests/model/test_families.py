"""The public families that denoise in blocks: their configs, masks and logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dlm_rag import Denoiser
from dlm_rag.config import Config
from dlm_rag.errors import CheckpointError, ConfigError
from dlm_rag.model.checkpoint import open_checkpoint, save_tensors
from dlm_rag.training.initial_model import make_training_shape
from dlm_rag.training.step_memory import MemoryTracker
from tests.golden.tiny_checkpoints import write_checkpoint
from tests.support.attention import run_with_mask
from tests.support.family_checkpoints import change
from tests.support.tiny_models import tiny_denoiser

MASK = 99
# family: the class of transformers whose names it has, its own keys, and what they must come to.
PUBLIC = {
    "sdar": (
        ("Qwen3", {"head_dim": 12}), {"block_size": 4},
        {"block_size": 4, "block_grid": "prompt", "block_length": 4, "shifted": False},
    ),
    "Fast_dLLM_Qwen": (
        ("Qwen2", {}), {"bd_size": 16},
        {"block_size": 16, "block_grid": "prompt", "block_length": 8, "shifted": True},
    ),
    "a2d-qwen3": (
        ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}), {},
        {"block_size": None, "block_length": 32, "shifted": False, "qk_norm": True},
    ),
    "a2d-qwen2": (
        ("Qwen2", {}), {"attention_block": 8},
        {"block_size": 8, "block_grid": "canvas", "block_length": 8, "shifted": False},
    ),
    "a2d-llama": (("Llama", {}), {}, {"block_size": None, "shifted": False, "qkv_bias": False}),
    "sdar_moe": (
        ("Qwen3Moe", {"head_dim": 12, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
         | {"num_experts": 8, "norm_topk_prob": True}),
        {"block_size": 8, "num_experts": 8},
        {"block_size": 8, "block_grid": "prompt", "shifted": False, "dense_layers": 0},
    ),
}  # fmt: skip


def write_public(folder, family):
    """A random model of transformers' class with the family's config around it; returns the model."""
    import transformers

    (name, settings), keys, _ = PUBLIC[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=100, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, **settings,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # biases and norms start at 0 and 1, which hides mistakes
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    change(folder, model_type=family, mask_token_id=MASK, **keys)
    return model


def sight(length, block):
    """(length, length) who sees whom: its own block of tokens and those before; None: everybody."""
    number = torch.arange(length) // (block or length)
    return number[None, :] <= number[:, None]


@pytest.mark.parametrize("family", PUBLIC)
def test_logits_equal_those_of_transformers_under_the_familys_attention(tmp_path, family):
    model, expected = write_public(tmp_path, family), PUBLIC[family][2]
    denoiser = Denoiser.from_pretrained(tmp_path)
    assert {name: getattr(denoiser.config, name) for name in expected} == expected
    ids, allowed = torch.randint(0, 100, (40,)), sight(40, denoiser.config.block_size)
    mask = torch.zeros(1, 1, 40, 40).masked_fill(~allowed, -torch.inf)
    with torch.no_grad():
        theirs = model(ids[None], attention_mask=mask).logits[0]
        ours = denoiser.compute_token_logits(run_with_mask(denoiser, ids, torch.arange(40), allowed))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# Logits of the public classes; the length of blocks that is set, and that of the checkpoint with its grid.
GOLDEN = {
    "sdar": (4, None, "prompt"), "fast-dllm-v2": (None, 32, "prompt"), "a2d-qwen3": (None, None, "canvas"),
    "llada2": (8, 32, "prompt"), "llada22": (None, 8, "prompt"), "lladamoe": (None, None, "canvas"),
    "sdar_moe": (4, None, "prompt"),
}  # fmt: skip


def write_golden(folder, name):
    """The tiny checkpoint behind golden logits; returns these, and whether row i predicts token i + 1."""
    write_checkpoint(name, folder)
    path = Path(__file__).parents[1] / "golden" / f"{name}.safetensors"
    with safe_open(path, "pt") as file:
        return load_file(path), file.metadata()["row i predicts"] == "i + 1"


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_equal_those_of_the_public_modelling_code(tmp_path, name):
    (golden, shifted), (block, own, grid) = write_golden(tmp_path, name), GOLDEN[name]
    denoiser = Denoiser.from_pretrained(open_checkpoint(tmp_path, block))
    config = denoiser.config
    assert (config.shifted, config.block_size, config.block_grid) == (shifted, block or own, grid)
    if own:
        assert open_checkpoint(tmp_path).config.block_size == own
    if not config.experts:  # then the rounding of the reference alone is left, the same on every processor
        denoiser = denoiser.double()
    with torch.no_grad():
        ours, theirs = denoiser(golden["input_ids"]), golden["logits"]
    if shifted:
        ours, theirs = ours[:, 1:], theirs[:, :-1]
    assert (ours - theirs).abs().max() < 1e-5 * theirs.std()


def test_the_logits_of_nemotron_labs_diffusion_in_both_its_ways(tmp_path):
    """All in place, all causal, and a block in place behind causal text."""
    golden, _ = write_golden(tmp_path, "nemotron-labs-diffusion")
    denoiser, ids = Denoiser.from_pretrained(tmp_path).double(), golden["input_ids"]
    assert denoiser.config.block_size == 32 and denoiser.config.predicts_next_block
    for name, block, causal in (("whole", 48, 0), ("causal", 1, 47), ("logits", None, 32)):
        with torch.no_grad():
            ours, theirs = denoiser(ids, block), golden[name]
        # Theirs are states row by row: a causal one predicts the next token.
        expected = torch.cat((theirs[:, :causal], theirs[:, causal + 1 :]), 1)
        assert (ours[:, 1:] - expected).abs().max() < 1e-5 * theirs.std()


@pytest.mark.parametrize("tied", [False, True])
def test_nemotron_labs_diffusion_has_the_layers_of_ministral_3(tmp_path, tied):
    """The class of transformers, with other shapes; its scale of queries changes every few tokens."""
    import transformers

    torch.manual_seed(1)
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 0.5,
    }  # fmt: skip
    config = transformers.Ministral3Config(
        vocab_size=100, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=64, rope_parameters=rope,
        sliding_window=None, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.Ministral3ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = {
        name: name.replace("model.", "encoder.").replace("lm_head", "diffusion_head") for name in tensors
    }
    save_file({names[name]: value for name, value in tensors.items()}, tmp_path / "model.safetensors")
    change(tmp_path, model_type="nemotron_labs_diffusion", mask_token_id=MASK, block_size=8)
    denoiser, ids = Denoiser.from_pretrained(tmp_path), torch.randint(0, 100, (2, 40))
    places = torch.arange(40)
    blocks = (places <= places[:, None]) | ((places >= 32) & (places[:, None] >= 32))
    with torch.no_grad():
        found, theirs = denoiser(ids), model(ids, attention_mask=blocks.float().log()[None, None]).logits
        causal, their_causal = denoiser(ids, 1), model(ids).logits
    expected = torch.cat((theirs[:, :32], theirs[:, 33:]), 1)
    torch.testing.assert_close(found[:, 1:], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(causal[:, 1:], their_causal[:, :-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_type": "nemotron_labs_diffusion_vlm"}, {"dlm_paradigm": "autoregressive"},
        {"sliding_window": 8}, {"mask_token_id": None}, {"attention_block": 0}, {"vision_config": {"a": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_what_nemotron_labs_diffusion_cannot_be_is_refused(tmp_path, wrong):
    write_checkpoint("nemotron-labs-diffusion", tmp_path)
    change(tmp_path, **wrong)
    with pytest.raises(CheckpointError) as found:
        open_checkpoint(tmp_path)
    assert "\n" not in str(found.value)


def test_stacks_of_experts_are_read_into_their_place(tmp_path):
    """Beside what is loaded nothing is held but the one tensor that is being read."""
    write_public(tmp_path, "sdar_moe")
    with MemoryTracker() as alive:
        held = dict(open_checkpoint(tmp_path).iterate_tensors(torch.device("cpu"), torch.bfloat16))
    largest = max(value.nbytes for value in load_file(tmp_path / "model.safetensors").values())
    whole = sum(value.nbytes for value in held.values())
    stack = held["layers.0.mlp.experts.gate_up_proj"].nbytes
    assert whole <= alive.peak_bytes <= whole + largest < whole + stack


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        (name, whole)
        for name in ("llada2", "lladamoe", "sdar_moe", "fast-dllm-v2")
        for whole in (False, True)
    ]
    + [("nemotron-labs-diffusion", False), ("llada22", False)],
)
def test_a_public_folder_that_is_written_again_holds_the_same(tmp_path, name, whole, monkeypatch):
    """Whole, and in shards that cut through a layer's experts; any rows of a tensor alike."""
    write_golden(tmp_path / "first", name)
    first = open_checkpoint(tmp_path / "first", 0 if whole else GOLDEN.get(name, (16,))[0])
    tensors = dict(first.iterate_tensors(torch.device("cpu"), torch.float32))
    for size in (10**9, 40_000):
        monkeypatch.setattr("dlm_rag.model.checkpoint.SHARD_BYTES", size)
        folder = tmp_path / str(size)
        save_tensors(tensors, first.config, folder, {}, first)
        again = open_checkpoint(folder)
        assert again.config == first.config
        found = dict(again.iterate_tensors(torch.device("cpu"), torch.float32))
        assert found.keys() == tensors.keys()
        for key, value in tensors.items():
            assert torch.equal(found[key], value)
            rows = slice(len(value) // 4, len(value) // 2)
            assert torch.equal(again.read_tensor_rows(key, rows), value[rows])
        files = [load_file(path) for path in folder.glob("*.safetensors")]
        assert len(files) > 1 or size == 10**9
        theirs = load_file(tmp_path / "first" / "model.safetensors")
        assert theirs.keys() == {key for file in files for key in file}
        assert all(torch.equal(file[key], theirs[key]) for file in files for key in file)


def test_the_length_of_blocks_may_be_set(tmp_path):
    write_public(tmp_path, "sdar")
    for given, block in ((None, 4), (8, 8), (1, 1), (0, None)):
        config = open_checkpoint(tmp_path, given).config
        assert (config.block_size, config.block_length) == (block, block)
    tiny_denoiser(block_size=4).save_pretrained(tmp_path / "ours")
    for given, block in ((None, 4), (8, 8), (0, None)):
        assert open_checkpoint(tmp_path / "ours", given).config.block_size == block
    change(tmp_path, block_size=None)
    assert open_checkpoint(tmp_path, 16).config.block_size == 16
    with pytest.raises(CheckpointError, match="'block_size' is missing: set model.block_size"):
        open_checkpoint(tmp_path)


def token(text, number):
    return {"id": number, "content": text, "special": True}


MASK_FILES = {
    "settings": {"tokenizer_config.json": {"added_tokens_decoder": {"7": {"content": "<|MASK|>"}}}},
    "tokenizer": {"tokenizer.json": {"added_tokens": [token("<|x|>", 6), token("<|MASK|>", 7)]}},
    "declared": {
        "tokenizer_config.json": {
            "mask_token": "<hole>", "added_tokens_decoder": {"6": {"content": "<|MASK|>"}},
        },
        "tokenizer.json": {"added_tokens": [token("<hole>", 7)]},
    },
    "declared as an object": {
        "tokenizer_config.json": {"mask_token": {"content": "<hole>", "lstrip": False}},
        "tokenizer.json": {"added_tokens": [token("<|MASK|>", 6), token("<hole>", 7)]},
    },
}  # fmt: skip


@pytest.mark.parametrize("files", MASK_FILES.values(), ids=MASK_FILES)
def test_the_mask_is_the_tokenizers_where_the_config_does_not_say_it(tmp_path, files):
    write_public(tmp_path, "sdar")
    assert open_checkpoint(tmp_path).config.mask_token_id == MASK
    change(tmp_path, mask_token_id=None)
    for wrong in ('{"added_tokens": [1]}', '{"mask_token": ["x"]}'):
        (tmp_path / "tokenizer.json").write_text(wrong)
        with pytest.raises(CheckpointError, match=r"tokenizer.json has a token that is none"):
            open_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"'mask_token_id' is missing, .* has not added '<\|MASK\|>'"):
        open_checkpoint(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert open_checkpoint(tmp_path).config.mask_token_id == 7


def test_nemotron_labs_diffusion_is_not_trained(tmp_path):
    """Its rows would have to predict the first token of a block from the text before it."""
    write_checkpoint("nemotron-labs-diffusion", tmp_path)
    with pytest.raises(ConfigError, match="only train.objective=rl"):
        make_training_shape(Config(), open_checkpoint(tmp_path).config)
