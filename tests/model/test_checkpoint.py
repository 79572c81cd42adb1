"""Checkpoint folders: what loads, and what is refused by name before any weight is read."""

import contextlib
import json
import shutil
import socket
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_rag import Denoiser
from dlm_rag.errors import CheckpointError
from dlm_rag.model.checkpoint import open_checkpoint
from tests.support.tiny_models import tiny_denoiser


@pytest.fixture
def folder(tmp_path):
    tiny_denoiser().save_pretrained(tmp_path / "model", prompt={"head": "{question}"})
    return tmp_path / "model"


def test_who_may_read_one_file_of_a_checkpoint_may_read_all(folder):
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_denoiser_comes_back_the_same(tmp_path, tied):
    denoiser = tiny_denoiser(qk_norm=True, shifted=True, tie_word_embeddings=tied)
    denoiser.save_pretrained(tmp_path, prompt={"head": "{question}"})
    again = Denoiser.from_pretrained(tmp_path)
    assert again.config == denoiser.config
    ids = torch.arange(10)[None]
    torch.testing.assert_close(again(ids), denoiser(ids), rtol=0, atol=0)
    assert open_checkpoint(tmp_path).raw_config["prompt"] == {"head": "{question}"}
    assert (again.lm_head.weight is again.embed_tokens.weight) == tied


def test_weights_arrive_in_the_dtype_that_was_asked_for_and_positions_keep_their_precision(folder):
    denoiser = Denoiser.from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in denoiser.parameters()} == {torch.bfloat16}
    before = tiny_denoiser().inverse_frequencies
    for after in (denoiser, tiny_denoiser().to(torch.bfloat16)):
        torch.testing.assert_close(after.inverse_frequencies, before, rtol=0, atol=0)


@pytest.mark.slow
def test_loading_takes_no_second_copy_of_the_weights(tmp_path):
    """The peak of a fresh process that loads 150 MB stays under one copy and a half more."""
    import subprocess
    import sys

    tiny_denoiser(hidden_size=512, intermediate_size=4096, num_hidden_layers=5).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 120e6
    code = (
        "import torch, transformers, dlm_rag.model.checkpoint, dlm_rag\n"
        "read = lambda: open('/proc/self/status').read()\n"
        "peak = lambda: int(read().split('VmHWM:')[1].split()[0]) * 1024\n"
        "before = peak()\n"
        f"dlm_rag.Denoiser.from_pretrained({str(tmp_path)!r})(torch.zeros(1, 4, dtype=torch.long))\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1.5 * size


def test_shards_may_be_links_as_in_the_hubs_cache(folder, tmp_path):
    blob = tmp_path / "blobs" / "0123"
    blob.parent.mkdir()
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    write_index(folder, norm="model.safetensors")
    assert Denoiser.from_pretrained(folder).config == tiny_denoiser().config


def test_a_tensor_in_two_shards_is_refused(folder):
    shutil.copy(folder / "model.safetensors", folder / "more.safetensors")
    write_index(folder, norm="model.safetensors", head="more.safetensors")
    with pytest.raises(CheckpointError, match="twice"):
        open_checkpoint(folder)


def test_any_byte_of_the_weights_is_another_fingerprint(tmp_path):
    """The byte in the middle of what samples would have left out, among others."""
    tiny_denoiser(hidden_size=128, intermediate_size=512).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole, first = path.read_bytes(), open_checkpoint(tmp_path).fingerprint
    assert len(whole) > 2 * 64 * 4096, "most of it lies between 64 blocks of 4 kB"
    found = {first}
    for at in (len(whole) // 64 * 32 + 6000, len(whole) - 1, len(whole) // 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        found.add(open_checkpoint(tmp_path).fingerprint)
    path.write_bytes(whole)
    assert len(found) == 4 and open_checkpoint(tmp_path).fingerprint == first


def test_any_file_that_is_read_is_another_fingerprint_and_no_other(folder):
    """By rule: whatever is fetched from the hub, in texts of any name."""
    names = [
        "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
        "special_tokens_map.json", "added_tokens.json", "generation_config.json", "chat_template.jinja",
        "chat_templates/tool.jinja", "something_new.json",
    ]  # fmt: skip
    whole, found = (folder / "config.json").read_text(), {open_checkpoint(folder).fingerprint}
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        for text in (" ", "  "):
            (folder / name).write_text((whole if name == "config.json" else "{}") + text)
            found.add(open_checkpoint(folder).fingerprint)
    assert len(found) == 2 * len(names) + 1
    for name in ("README.md", "training.json", "a.jsonl", "a.jsonl.run.json", "scores.json", "own_code.py",
                 ".hidden.json", "pytorch_model.bin", "other.safetensors"):  # fmt: skip
        (folder / name).write_text("{}")
    copy = shutil.copytree(folder, folder.parent / "copy")
    assert found > {open_checkpoint(folder).fingerprint} == {open_checkpoint(copy).fingerprint}


def write_index(folder, **homes):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))


def test_a_tensor_that_the_config_does_not_ask_for_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"layers.1.mlp.bias": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="layers.1.mlp.bias, which does not belong to its config"):
        open_checkpoint(folder)


def test_from_the_hub_only_data_is_fetched_never_code_or_pickles(monkeypatch, folder, caplog):
    from fnmatch import fnmatch

    def download(name, allow_patterns, local_files_only=False, revision=None):
        assert name == "owner/model" and revision is None
        if local_files_only:
            raise FileNotFoundError
        fetched = ["config.json", "model-00001-of-00002.safetensors", "merges.txt", "chat_template.jinja"]
        left = ["modeling_dream.py", "pytorch_model.bin", "model.pt", "tokenizer.model"]
        assert all(any(fnmatch(file, p) for p in allow_patterns) for file in fetched)
        assert not any(fnmatch(file, p) for p in allow_patterns for file in left)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    with caplog.at_level("INFO", logger="dlm_rag"):
        assert open_checkpoint("owner/model").folder == folder
    assert "fetching 'owner/model' into" in caplog.text


@pytest.mark.parametrize("online", [True, False])
def test_what_another_library_has_cached_in_part_is_completed(monkeypatch, folder, caplog, online):
    """Only a whole download leaves a list of the files; without the hub, what there is has to do."""
    calls = []

    def download(name, allow_patterns, local_files_only=False, revision=None):
        calls.append(local_files_only)
        assert local_files_only or revision == folder.name, "not what is newest by now"
        return str(folder)

    def get_tree(name):
        raise FileNotFoundError

    def ask_hub(*_, **__):
        if not online:
            raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.get_cached_repo_tree", get_tree)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", ask_hub)
    assert open_checkpoint("owner/model").folder == folder
    assert calls == [True, False][: 1 + online] and ("maybe not whole" in caplog.text) != online
    monkeypatch.setattr("huggingface_hub.get_cached_repo_tree", lambda name: [])
    assert open_checkpoint("owner/model").folder == folder and calls[-1]


@pytest.mark.parametrize("silent", [False, True], ids=["closed port", "black hole"])
def test_without_a_network_the_remedy_is_said_at_once(monkeypatch, silent):
    """A black hole takes no connection up and refuses none: the queue of a server that never answers."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("dlm_rag.files.hub.HUB_ANSWER_SECONDS", 0.5)
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        place = hub.getsockname()
        for _ in range(4 if silent else 0):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(place)
        if not silent:
            hub.close()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{place[1]}")
        start = time.perf_counter()
        with pytest.raises(CheckpointError, match="from the hub: .*; name a folder, or run `hf download"):
            open_checkpoint("nobody/nothing-at-all")
    assert time.perf_counter() - start < 20


def test_a_model_that_is_written_over_another_is_the_one_that_is_read(tmp_path, monkeypatch):
    """In shards over one file, and in one file over shards."""
    ids = torch.arange(10)[None]
    for seed, size in enumerate((10**9, 20_000, 10**9)):
        monkeypatch.setattr("dlm_rag.model.checkpoint.SHARD_BYTES", size)
        denoiser = tiny_denoiser(seed)
        denoiser.save_pretrained(tmp_path)
        assert torch.equal(Denoiser.from_pretrained(tmp_path)(ids), denoiser(ids))


@pytest.mark.parametrize("other", [False, True])
def test_a_head_in_the_file_that_is_not_the_embedding_is_used(tmp_path, caplog, other):
    """As transformers does, whatever tie_word_embeddings says; a copy of the embedding stays tied."""
    denoiser = tiny_denoiser(tie_word_embeddings=True)
    denoiser.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["embed_tokens.weight"] + other
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    again = Denoiser.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, head)
    assert (again.lm_head.weight is again.embed_tokens.weight) != other
    assert ("holds another lm_head.weight" in caplog.text) == other
    again.save_pretrained(tmp_path / "saved")
    assert torch.equal(Denoiser.from_pretrained(tmp_path / "saved").lm_head.weight, head)
    tensors["lm_head.weight"] = tensors.pop("embed_tokens.weight")  # alone
    save_file(tensors, tmp_path / "model.safetensors")
    again = Denoiser.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, tensors["lm_head.weight"])
