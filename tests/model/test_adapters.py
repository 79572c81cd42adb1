"""LoRA adapters in PEFT's format open as the model that peft merges."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_rag.config.sections import GENERATION_FILE
from dlm_rag.errors import CheckpointError
from dlm_rag.files import hub
from dlm_rag.files.build_once import DIGESTS_FILE
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.retrieval import read_retrieval_settings


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A tiny Llama of transformers, saved as everybody saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("DLM_RAG_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base, tmp_path):
    """An adapter of peft with random weights; returns its folder and the model that peft merges."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"]))
    for name, value in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(value, std=0.3)
    tuned.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", tuned.merge_and_unload()


@pytest.mark.parametrize("beside", [None, "a.safetensors"])
def test_logits_equal_those_of_the_model_that_peft_merges(adapter, base, beside):
    folder, merged = adapter
    if beside:  # a copy that nobody loads
        shutil.copy(base / "model.safetensors", base / beside)
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        ours, theirs = Denoiser.from_pretrained(folder)(ids)[0], merged(ids).logits[0]
    assert torch.allclose(ours[1:], theirs[:-1], atol=1e-4)  # ours predict their own position


def test_a_config_beside_the_adapter_adds_a_mask_token_with_the_mean_embedding(adapter, base):
    folder, _ = adapter
    said = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "vocab_size": 65, "mask_token_id": 64}))
    opened = open_checkpoint(folder)
    rows = opened.read_tensor_rows("embed_tokens.weight", slice(0, 65))
    assert opened.config.mask_token_id == 64
    assert torch.allclose(rows[64], rows[:64].mean(0), atol=1e-5)


def test_settings_of_the_base_hold_where_the_adapter_says_none(adapter, base):
    folder, _ = adapter
    for place, top_k in ((base, 3), (folder, 2)):
        (place / GENERATION_FILE).write_text(json.dumps({"retrieval": {"top_k": top_k}}))
        carried = {"top_k": top_k}
        assert read_retrieval_settings(folder) == carried
        assert open_checkpoint(folder).config.retrieval_settings == carried


def test_it_is_merged_once_and_again_when_it_changes(adapter, base, caplog):
    folder, _ = adapter
    (base / DIGESTS_FILE).write_text("{}")  # of a base that lies in the cache itself
    before = open_checkpoint(folder).folder
    made = (before / "model.safetensors").stat().st_mtime_ns
    assert open_checkpoint(folder).folder == before and not caplog.records
    assert (before / "model.safetensors").stat().st_mtime_ns == made
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: value + 1 for name, value in tensors.items()}, folder / "adapter_model.safetensors")
    assert open_checkpoint(folder).folder != before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"r": 0}, "lora_alpha"),
        ({"r": 64}, "r=64"),
        ({"base_model_name_or_path": "/nowhere"}, "nowhere"),
    ],
)
def test_adapters_that_are_not_merged_here_are_refused(adapter, change, named):
    folder, _ = adapter
    place = folder / "adapter_config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **change}))
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(folder)


def test_an_adapter_of_a_quantized_base_is_refused(adapter, base):
    """Whose numbers are to be multiplied by scales, and the adapter's with them."""
    place = base / "config.json"
    place.write_text(
        json.dumps(json.loads(place.read_text()) | {"quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(CheckpointError, match="quantized"):
        open_checkpoint(adapter[0])


def test_an_adapter_of_another_model_is_refused(adapter):
    folder, _ = adapter
    tensors = load_file(folder / "adapter_model.safetensors")
    wide = {name: value.repeat(1, 2) if ".lora_A." in name else value for name, value in tensors.items()}
    save_file(wide, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="another model"):
        open_checkpoint(folder)


def test_an_adapter_of_another_revision_of_its_base_is_refused(adapter, monkeypatch):
    """A folder has none, whatever the config says; a snapshot of the hub is called by its own."""
    (folder, _), place = adapter, adapter[0] / "adapter_config.json"
    config = json.loads(place.read_text())
    base, resolve = Path(config["base_model_name_or_path"]), hub.resolve_hub_folder
    fetched = {"own/er": base}
    monkeypatch.setattr(
        hub, "resolve_hub_folder", lambda name, what: fetched.get(name) or resolve(name, what)
    )
    for name, revision in ((str(base), "v1"), ("own/er", "main"), ("own/er", base.name)):
        place.write_text(json.dumps({**config, "base_model_name_or_path": name, "revision": revision}))
        open_checkpoint(folder)
    place.write_text(json.dumps({**config, "base_model_name_or_path": "own/er", "revision": "v1"}))
    with pytest.raises(CheckpointError, match="revision 'v1'"):
        open_checkpoint(folder)
