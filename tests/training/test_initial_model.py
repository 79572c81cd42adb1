"""What a run begins with: public checkpoints in, public checkpoints out."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dlm_rag import Denoiser, Tokenizer
from dlm_rag.config import load_config
from dlm_rag.errors import ConfigError
from dlm_rag.model.checkpoint import Checkpoint
from dlm_rag.training.checkpoints import gather_full_state_dict
from dlm_rag.training.distributed import DistributedContext, apply_fsdp
from dlm_rag.training.initial_model import merge_lora_weights, open_initial_model
from dlm_rag.training.trainer import make_optimizers
from tests.support.tiny_models import write_autoregressive_checkpoint
from tests.support.training import build_denoiser

CPU = torch.device("cpu")
IDS = torch.arange(24).view(2, 12) * 7 % 256


@pytest.fixture(params=[(Qwen2Config, Qwen2ForCausalLM), (LlamaConfig, LlamaForCausalLM)])
def autoregressive(request, tmp_path):
    return write_autoregressive_checkpoint(tmp_path / "ar", *request.param)


def test_adaptation_begins_with_the_model_as_it_was(autoregressive):
    """Causal, the denoiser is the autoregressive model: row i - 1 predicts token i."""
    folder, model = autoregressive
    origin = open_initial_model(load_config(None, [f"model.path={folder}", "train.objective=pretrain"]))
    assert origin.config.mask_token_id == 257 and origin.config.shifted, "one token more than there were"
    assert origin.config.block_length is None, "tokens of the whole canvas are written together"
    denoiser = build_denoiser(origin)
    with torch.no_grad():
        expected = model(IDS).logits
        found = denoiser(IDS, block=1)
    torch.testing.assert_close(found[:, 1:, :257], expected[:, :-1], atol=1e-5, rtol=1e-5)


def test_an_export_is_read_by_us_and_by_the_public_class(autoregressive, tmp_path):
    folder, model = autoregressive
    (folder / "generation_config.json").write_text("{}", encoding="utf-8-sig")  # with a byte order mark
    origin = open_initial_model(load_config(None, [f"model.path={folder}", "train.objective=pretrain"]))
    denoiser = build_denoiser(origin)
    with torch.no_grad():
        denoiser.layers[0].mlp.up_proj.weight.mul_(1.1)
    origin.export(tmp_path / "out", gather_full_state_dict(denoiser), torch.float32)
    again = Denoiser.from_pretrained(tmp_path / "out")
    assert again.config.evidence_layout == "independent"
    assert Tokenizer.from_pretrained(tmp_path / "out").mask_id == 257
    public = type(model).from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        ours = again(IDS, block=1)
        torch.testing.assert_close(ours[:, 1:], public(IDS).logits[:, :-1], atol=1e-5, rtol=1e-5)


def test_qwen3_is_trained_and_decodes_on_one_prompt_without_thoughts(tmp_path):
    folder, _ = write_autoregressive_checkpoint(tmp_path / "ar", Qwen3Config, Qwen3ForCausalLM)
    template = "{{ messages[0].content }}{% if enable_thinking is false %}<no>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    origin = open_initial_model(load_config(None, [f"model.path={folder}", "train.objective=pretrain"]))
    state = gather_full_state_dict(build_denoiser(origin))
    origin.export(tmp_path / "out", state, torch.float32)
    readers = origin.tokenizer, Tokenizer.from_pretrained(tmp_path / "out")
    prompts = {bytes(t for t in each.build_prompt("Who?", []).ids if t < 256) for each in readers}
    assert len(prompts) == 1 and b"<no>" in prompts.pop()
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    del raw["thinks"]  # of a version before, which asked for thoughts
    (tmp_path / "out" / "config.json").write_text(json.dumps(raw))
    assert b"<no>" not in bytes(t for t in Tokenizer.from_pretrained(tmp_path / "out")._suffix if t < 256)


def test_what_attention_in_blocks_does_not_go_with_is_refused():
    words = ["model.evidence_layout=joint", "decode.finished_block_context=no_evidence"]
    with pytest.raises(ConfigError, match="evidence_layout"):
        open_initial_model(load_config(None, ["model.block_size=8", *words]))


def test_an_autoregressive_model_must_be_adapted_first(autoregressive):
    with pytest.raises(ConfigError, match="train it with train.objective=pretrain first"):
        open_initial_model(load_config(None, [f"model.path={autoregressive[0]}"]))


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_a_public_denoiser_goes_out_as_it_came_in(golden, tmp_path, name):
    folder = golden / "checkpoints" / name
    origin = open_initial_model(load_config(None, [f"model.path={folder}", "model.evidence_layout=joint"]))
    denoiser = build_denoiser(origin)
    tensors = gather_full_state_dict(denoiser)
    origin.export(tmp_path, tensors, torch.float32)
    ids = torch.arange(40).view(2, 20) * 13 % 1500
    with torch.no_grad():
        torch.testing.assert_close(
            Denoiser.from_pretrained(tmp_path)(ids), Denoiser.from_pretrained(folder)(ids)
        )
    theirs, ours = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path))
    changed = {key for key in theirs if ours[key] != theirs[key]}
    assert changed <= {"torch_dtype"} and ours["model_type"] == theirs["model_type"]


def test_adapters_alone_are_trained_and_merge_into_the_weights(golden, tmp_path):
    pytest.importorskip("peft")
    folder = golden / "checkpoints" / "tiny-llada"
    config = load_config(None, [f"model.path={folder}", "train.lora_rank=4"])
    origin = open_initial_model(config)
    denoiser = build_denoiser(origin)
    trained = {name for name, value in denoiser.named_parameters() if value.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    (muon,) = make_optimizers(denoiser, config.train)
    assert len(muon.param_groups[0]["params"]) == len(trained), "nothing is left for a second optimizer"
    with torch.no_grad():
        for name, value in denoiser.named_parameters():
            if "lora_B" in name:
                value.normal_(0, 0.002)  # mostly less than bfloat16 tells apart
        plain = Denoiser(origin.config)
        plain.load_state_dict(merge_lora_weights(denoiser.state_dict()))
        expected = denoiser(IDS)
        torch.testing.assert_close(plain(IDS), expected, atol=1e-4, rtol=1e-4)
        original = Denoiser.from_pretrained(folder)(IDS)
        origin.export(tmp_path, denoiser.state_dict())
        exported = Denoiser.from_pretrained(tmp_path)(IDS)
    change = F.mse_loss(expected, original)
    assert F.mse_loss(exported, expected) < 1e-6 * change


def test_adapters_on_a_model_of_adapters_keep_what_those_learned(golden, tmp_path):
    """Frozen weights may be in bfloat16 in memory; what is written comes from the file."""
    pytest.importorskip("peft")
    path = golden / "checkpoints" / "tiny-llada"
    for out in (tmp_path / "first", tmp_path / "second"):
        origin = open_initial_model(load_config(None, [f"model.path={path}", "train.lora_rank=4"]))
        denoiser = build_denoiser(origin, torch.bfloat16)
        with torch.no_grad():
            for name, value in denoiser.named_parameters():
                if "lora_B" in name and out.name == "first":
                    value.normal_(0, 0.002)
        origin.export(path := out, denoiser.state_dict())
        raw = json.loads((out / "config.json").read_text())
        assert raw["dtype"] == raw["torch_dtype"] == "float32"
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.fixture
def as_rank():
    """Lets this process be one of several, whose collectives do nothing."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def be(rank, count):
        if dist.is_initialized():
            dist.destroy_process_group()
        _clear_sharding_prop_cache()  # which knows meshes of the rank before
        dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())

    yield be
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "words",
    [
        ["model.path={folder}", "train.objective=pretrain"],
        ["model.path={folder}", "train.objective=pretrain", "train.lora_rank=4"],
        ["train.hidden_size=64", "train.num_hidden_layers=2", "train.vocab_size=401"],
    ],
    ids=["a wider vocabulary", "adapters", "fresh and tied"],
)
def test_a_process_has_its_rows_of_the_same_weights_and_reads_no_others(
    autoregressive_qwen, as_rank, monkeypatch, words
):
    """Three ranks in shards against one process without: bit for bit, in the bytes of a third."""
    words = [word.format(folder=autoregressive_qwen) for word in words]
    origin = open_initial_model(load_config(None, words))
    expected = build_denoiser(origin, torch.bfloat16).state_dict()
    asked, read = [], Checkpoint.read_tensor_rows

    def rows(self, name, which):
        found = read(self, name, which)
        asked.append((name, found.nbytes))
        return found

    monkeypatch.setattr(Checkpoint, "read_tensor_rows", rows)
    tensors = origin.checkpoint.iterate_tensors(CPU, torch.float32) if origin.checkpoint else ()
    whole_bytes = [tensor.nbytes for _, tensor in tensors]
    for rank in range(3):
        as_rank(rank, 3)
        asked.clear()
        denoiser = origin.build_on_meta(torch.bfloat16)
        processes = DistributedContext(rank, 3, rank)
        apply_fsdp(torch.nn.Sequential(denoiser), denoiser, processes, CPU, torch.float32)
        origin.materialize(denoiser, CPU)
        for name, value in denoiser.named_parameters():
            whole, own = expected[name], value.to_local()
            size = -(-len(whole) // 3)
            part = whole[rank * size : (rank + 1) * size]
            assert own.dtype == whole.dtype and torch.equal(own, part), name
        # The last one makes the new token of the means of all.
        means = 2 * 257 * 32 * 4 if rank == 2 and origin.checkpoint else 0
        assert sum(size for _, size in asked) <= sum(whole_bytes) / 3 * 1.05 + means
        assert not asked or max(size for _, size in asked) < sum(whole_bytes) / 3
