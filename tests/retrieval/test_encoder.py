"""Folders of sentence-transformers: ordinary ones load, nothing in any of them is run."""

import json
import pickle

import pytest

from dlm_rag.errors import CheckpointError
from dlm_rag.retrieval.load_encoder import load_sentence_transformer

OWN = "sentence_transformers.sentence_transformer.modules"
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{OWN}.Pooling"},
]


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


def of_modules(folder):
    put(folder, "modules.json", [*MODULES, {"idx": 2, "name": "2", "path": "", "type": "evil.Evil"}])


def in_a_router(folder):
    put(
        folder,
        "modules.json",
        [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}],
    )
    put(
        folder, "router_config.json", {"types": {"query_0": "evil.Evil"}, "structure": {}, "parameters": {}}
    )


def in_a_router_within_a_router(folder):
    put(
        folder,
        "modules.json",
        [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}],
    )
    put(
        folder,
        "router_config.json",
        {"types": {"q": "sentence_transformers.models.Router"}, "structure": {}},
    )
    put(folder, "q/config.json", {"types": {"query_0": "evil.Evil"}, "structure": {}, "parameters": {}})


def of_word_vectors(folder):
    put(folder, "modules.json", [{"idx": 0, "name": "0", "path": "w", "type": f"{OWN}.WordEmbeddings"}])
    put(folder, "w/wordembedding_config.json", {"tokenizer_class": "evil.Tokens"})


def of_an_unknown_architecture(folder):
    put(
        folder,
        "config.json",
        {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Model"}},
    )


def that_generates(folder):
    put(folder, "config.json", {"custom_generate": "evil"})


def that_asks_for_trust(folder):
    put(folder, "sentence_bert_config.json", {"model_kwargs": {"trust_remote_code": True}})


def of_a_kernel(folder):
    put(folder, "sentence_bert_config.json", {"model_args": {"attn_implementation": "evil/kernel"}})


def of_an_adapter(folder):
    put(
        folder,
        "adapter_config.json",
        {"auto_mapping": {"parent_library": "evil", "base_model_class": "Evil"}},
    )


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def in_a_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder.parent / "was-run")))


def in_the_pickle_of_a_module(folder):
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    put(folder, "modules.json", [*MODULES, dense])
    put(folder, "2_Dense/config.json", {"in_features": 16, "out_features": 4})
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder.parent / "was-run")))


def in_a_pickle_beside_other_weights(folder):
    in_the_pickle_of_a_module(folder)
    (folder / "2_Dense" / "other.safetensors").write_bytes(b"")


def in_a_pickle_beside_an_index(folder):
    in_the_pickle_of_a_module(folder)
    (folder / "2_Dense" / "model.safetensors.index.json").write_text("{}")


def with_a_tokenizer_elsewhere(folder):
    put(folder, "sentence_bert_config.json", {"tokenizer_name_or_path": str(folder.parent / "elsewhere")})


def with_a_module_elsewhere(folder):
    put(folder, "modules.json", [MODULES[0], MODULES[1] | {"path": "../elsewhere"}])


def of_an_adapter_below(folder):
    put(folder, "1_Pooling/adapter_config.json", {})


def behind_a_link(folder):
    (folder / "1_Pooling").rename(folder.parent / "elsewhere")
    (folder / "1_Pooling").symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (of_modules, "modules.json names the class 'evil.Evil'"),
        (in_a_router, "router_config.json names the class 'evil.Evil'"),
        (in_a_router_within_a_router, "q/config.json names the class 'evil.Evil'"),
        (of_word_vectors, "names the class 'evil.Tokens'"),
        (of_an_unknown_architecture, "'evil' model, which only code of its own runs"),
        (that_generates, "custom_generate='evil'"),
        (that_asks_for_trust, "trust_remote_code=True"),
        (of_a_kernel, "attn_implementation='evil/kernel'"),
        (of_an_adapter, "holds an adapter"),
        (in_a_pickle, "holds pickled weights"),
        (in_the_pickle_of_a_module, "2_Dense holds pickled weights"),
        (in_a_pickle_beside_other_weights, "2_Dense holds pickled weights"),
        (in_a_pickle_beside_an_index, "2_Dense holds pickled weights"),
        (with_a_tokenizer_elsewhere, "tokenizer_name_or_path"),
        (with_a_module_elsewhere, "elsewhere"),
        (of_an_adapter_below, "1_Pooling holds an adapter"),
        (behind_a_link, "leads to another folder"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_code_in_a_folder_is_refused_and_not_run(folder, monkeypatch, harm, says):
    harm(folder)
    monkeypatch.chdir(folder)  # from which Python may import, too
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(CheckpointError, match=says) as error:
        load_sentence_transformer(str(folder), "cpu")
    assert "\n" not in str(error.value)
    assert not (folder.parent / "was-run").exists()


def test_code_beside_a_model_that_the_library_knows_is_not_run(folder):
    put(folder, "config.json", {"auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Model"}})
    put(folder, "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Tokens", None]}})
    assert load_sentence_transformer(str(folder), "cpu").encode(["a b"]).shape == (1, 16)
    assert not (folder.parent / "was-run").exists()


def test_the_code_of_these_folders_is_real(folder):
    """Where it is trusted it is run: what the tests above hold is not so by itself."""
    from sentence_transformers import SentenceTransformer

    put(folder, "config.json", {"auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Model"}})
    of_modules(folder)
    with pytest.raises(Exception):  # noqa: B017 - its class is none of a module
        SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    assert (folder.parent / "was-run").exists()


@pytest.mark.parametrize(
    ("name", "harm", "says"),
    [
        ("modules.json", "[", "the file is not JSON"),
        ("modules.json", '[{"type": 3}]', "names the class 3"),
        ("1_Pooling/config.json", '{"a": 1, "a": 2}', "the key 'a' occurs a second time"),
        ("config.json", "{}", "could not be loaded"),
        ("model.safetensors", "x", "could not be loaded"),
    ],
)
def test_a_damaged_folder_is_named(folder, name, harm, says):
    (folder / name).write_text(harm)
    with pytest.raises(CheckpointError, match=says):
        load_sentence_transformer(str(folder), "cpu")


def tensors(change):
    """A function that changes the weights of a folder, by name."""

    def harm(folder):
        from safetensors.torch import load_file, save_file

        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return harm


DENSE = "encoder.layer.0.output.dense.weight"
WRONG = {
    "a tensor is not there": (tensors(lambda found: found.pop(DENSE)), f"{DENSE} is missing"),
    "weights are not numbers": (tensors(lambda found: found[DENSE].fill_(float("nan"))), "no numbers"),
    "weights are zeros": (tensors(lambda found: [value.zero_() for value in found.values()]), "zeros"),
    "nothing pools": (lambda folder: put(folder, "modules.json", MODULES[:1]), "could not be loaded"),
    "texts of a negative length": (
        lambda folder: put(folder, "sentence_bert_config.json", {"max_seq_length": -1}),
        "could not be loaded",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_encoder_that_makes_no_vectors_is_refused(folder, wrong, capfd):
    harm, says = WRONG[wrong]
    harm(folder)
    with pytest.raises(CheckpointError, match=says):
        load_sentence_transformer(str(folder), "cpu")
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_a_pooler_that_lacks_is_made_up_the_same_at_every_start(folder):
    tensors(lambda found: found.pop("pooler.dense.weight"))(folder)
    one, other = (load_sentence_transformer(str(folder), "cpu").state_dict() for _ in range(2))
    assert all((one[name] == other[name]).all() for name in one)


def test_a_hub_id_is_found_as_a_models_is(folder, monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, **_: str({"sentence-transformers/tiny": folder}[name]),
    )
    assert load_sentence_transformer("tiny", "cpu").encode(["a"]).shape == (1, 16)


@pytest.mark.parametrize("factor", [0.0, float("nan")])
def test_weights_that_make_no_vectors_are_refused(folder, factor):
    from safetensors.torch import load_file, save_file

    weights = {name: value * factor for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="zeros, or no numbers: its weights are damaged"):
        load_sentence_transformer(str(folder), "cpu")


def test_settings_that_fail_at_the_first_text_are_named_before_any_passage(folder):
    put(folder, "sentence_bert_config.json", {"max_seq_length": "x"})
    with pytest.raises(CheckpointError, match="could not be loaded: .*not supported"):
        load_sentence_transformer(str(folder), "cpu")
