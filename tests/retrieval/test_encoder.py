"""Folders of sentence-transformers: ordinary ones load, nothing in any of them is run."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_rag.config import RetrievalConfig
from dlm_rag.errors import CheckpointError
from dlm_rag.retrieval import dense, load_retriever
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.retrieval.dense import load_sentence_transformer
from tests.support.passages import write_jsonl_file

OWN = "sentence_transformers.sentence_transformer.modules"
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{OWN}.Pooling"},
]
ROUTER = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}]
DENSE_MODULE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
EVIL = {"auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Model"}}


@pytest.fixture
def folder(tmp_path):
    """A tiny encoder, and beside it a file of code that says when it is run."""
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path / "encoder"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=30, max_position_embeddings=32, **sizes)).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxy"]
    BertTokenizer(vocab={word: n for n, word in enumerate(words)}).save_pretrained(folder)
    put(folder, "modules.json", MODULES)
    put(folder, "1_Pooling/config.json", {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True})
    ran = tmp_path / "was-run"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\nModel = Tokens = Evil\n")
    return folder


def put(folder, name, settings):
    """Writes settings, those of an object beside what is there."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    there = json.loads(path.read_text()) if path.is_file() and isinstance(settings, dict) else {}
    path.write_text(json.dumps(there | settings if isinstance(settings, dict) else settings))


def test_an_ordinary_folder_loads(folder):
    assert load_sentence_transformer(str(folder), "cpu").encode(["a b"]).shape == (1, 16)


@pytest.mark.parametrize("method", ["dense", "hybrid"])
def test_other_weights_are_another_search_and_cut_passages_are_said(folder, tmp_path, caplog, method):
    texts = [{"id": str(n), "contents": "a b " * length} for n, length in enumerate((1, 80, 90))]
    corpus = open_corpus(write_jsonl_file(tmp_path / "c.jsonl", texts), tmp_path / "index")
    config, found, place = (
        RetrievalConfig(method=method, embedding_model=str(folder)),
        [],
        "model.safetensors",
    )
    for scale in (1.0, 1.0, 2.0):
        tensors = {name: scale * value for name, value in load_file(folder / place).items()}
        save_file(tensors, folder / place, {"format": "pt"})
        found.append(load_retriever(config, corpus).fingerprint)
    assert found[0] == found[1] != found[2]
    assert "2 passages may exceed" in caplog.text


@pytest.mark.parametrize("method", ["dense", "hybrid"])
def test_it_is_searched_by_and_another_prompt_has_its_own_index(folder, corpus_file, method):
    built = folder.parent / "index"
    settings = {"method": method, "embedding_model": str(folder), "index_dir": str(built)}
    for more in ({}, {}, {"passage_prompt": "p: "}):
        assert len(load_retriever(corpus_file, top_k=3, **settings, **more).search("Tacoma")) == 3
    assert sum(path.is_dir() for path in built.glob("*/dense-*")) == 2


def test_bfloat16_is_widened_where_a_gpu_would_emulate_it(folder, monkeypatch):
    place = folder / "model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(place).items()}, place, {"format": "pt"})
    put(folder, "config.json", {"dtype": "bfloat16"})
    for there, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(dense, "has_bfloat16", lambda device, there=there: there)
        assert {p.dtype for p in load_sentence_transformer(str(folder), "cpu").parameters()} == {dtype}


HARMS = {  # files, with what they say
    "a module": {"modules.json": [*MODULES, {"idx": 2, "name": "2", "path": "", "type": "evil.Evil"}]},
    "a router": {
        "modules.json": ROUTER,
        "router_config.json": {"types": {"query_0": "evil.Evil"}, "structure": {}, "parameters": {}},
    },
    "an unknown architecture": {"config.json": EVIL | {"model_type": "evil"}},
    "an adapter": {
        "adapter_config.json": {"auto_mapping": {"parent_library": "evil", "base_model_class": "Evil"}}
    },
    "an adapter below": {"1_Pooling/adapter_config.json": {}},
    "a kernel": {"sentence_bert_config.json": {"model_args": {"attn_implementation": "evil/kernel"}}},
}
HARMLESS = {  # what the libraries pass over
    "trust": {
        "sentence_bert_config.json": {"model_kwargs": {"trust_remote_code": True}},
        "config.json": EVIL,
    },
    "a tokenizer": {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["evil.Tokens", None]}}},
}


@pytest.fixture
def within(folder, monkeypatch):
    """The working directory, from which Python may import."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.parametrize("harm", HARMS)
def test_code_in_a_folder_is_refused_and_not_run(within, harm):
    for name, settings in HARMS[harm].items():
        put(within, name, settings)
    with pytest.raises(CheckpointError) as error:
        load_sentence_transformer(str(within), "cpu")
    assert "\n" not in str(error.value)
    assert not (within.parent / "was-run").exists()


@pytest.mark.parametrize("place", ["modules.json", "sentence_bert_config.json", "1_Pooling"])
def test_other_folders_are_not_read(folder, place):
    """What lies there would load."""
    elsewhere = folder.parent / "elsewhere"
    if place == "modules.json":
        (folder / "1_Pooling").rename(elsewhere)
        put(folder, place, [MODULES[0], MODULES[1] | {"path": "../elsewhere"}])
    elif place == "1_Pooling":
        (folder / place).rename(elsewhere)
        (folder / place).symlink_to(elsewhere)
    else:
        put(folder, place, {"tokenizer_name_or_path": str(folder)})
    with pytest.raises(CheckpointError, match=place):
        load_sentence_transformer(str(folder), "cpu")


@pytest.mark.parametrize("harm", HARMLESS)
def test_code_beside_a_model_that_the_library_knows_is_not_run(within, harm):
    for name, settings in HARMLESS[harm].items():
        put(within, name, settings)
    assert load_sentence_transformer(str(within), "cpu").encode(["a b"]).shape == (1, 16)
    assert not (within.parent / "was-run").exists()


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    ("place", "beside"),
    [("", None), ("", "model.safetensors.index.json"), ("2_Dense", "other.safetensors")],
)
def test_pickles_are_refused(folder, place, beside):
    put(folder, "modules.json", [*MODULES, DENSE_MODULE])
    put(folder, "2_Dense/config.json", {"in_features": 16, "out_features": 4})
    (folder / place / "model.safetensors").unlink(missing_ok=True)
    (folder / place / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder.parent / "was-run")))
    if beside is not None:
        (folder / place / beside).write_text("{}")
    with pytest.raises(CheckpointError, match=f"{place} holds pickled weights"):
        load_sentence_transformer(str(folder), "cpu")
    assert not (folder.parent / "was-run").exists()


def test_the_code_of_these_folders_is_real(folder):
    """Where it is trusted it is run: what the tests above hold is not so by itself."""
    from sentence_transformers import SentenceTransformer

    put(folder, "config.json", EVIL)
    put(folder, "modules.json", HARMS["a module"]["modules.json"])
    with pytest.raises(Exception):  # noqa: B017 - its class is none of a module
        SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    assert (folder.parent / "was-run").exists()


def tensors(change):
    """A function that changes the weights of a folder, by name."""

    def harm(folder):
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return harm


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


DENSE = "encoder.layer.0.output.dense.weight"
DAMAGES = {
    "modules are not JSON": (text("modules.json", "["), "modules.json.* not JSON"),
    "a tensor is not there": (tensors(lambda found: found.pop(DENSE)), f"{DENSE} is missing"),
    "not numbers": (tensors(lambda found: found[DENSE].fill_(float("nan"))), "weights are damaged"),
    "zeros": (tensors(lambda found: [value.zero_() for value in found.values()]), "weights are damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_named_before_any_passage(folder, damage, capfd):
    harm, says = DAMAGES[damage]
    harm(folder)
    with pytest.raises(CheckpointError, match=says):
        load_sentence_transformer(str(folder), "cpu")
    assert "LOAD REPORT" not in capfd.readouterr().err
