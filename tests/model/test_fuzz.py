"""Checkpoints changed at random: each loads or is refused in a sentence, and soon."""

import json
import shutil
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlm_rag.errors import CheckpointError, QuestionError
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.tokenizer import Tokenizer
from tests.support.properties import hypothesis_settings
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser

MOST_SECONDS = 30  # of one example; most take a hundredth of one
RANDOM = hypothesis_settings(60)
NUMBERS = (
    st.integers() | st.floats() | st.sampled_from([0, 1, 2, 3, 4, 8, 32, 10**7, 2**31, 2**63, 10**400, -1])
)
WORDS = st.sampled_from(
    ["llama", "qwen2", "yarn", "llama3", "linear", "dynamic", "independent", "no", "rope_type"]
)
SCALARS = st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=5)
ROPE_KEYS = (
    "rope_type type factor rope_theta low_freq_factor high_freq_factor original_max_position_embeddings "
    "beta_fast mscale truncate partial_rotary_factor"
).split()
KEYS = st.sampled_from([*ROPE_KEYS, "head", "fact", "tail"]) | st.text(max_size=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    tiny_denoiser(qk_norm=True).save_pretrained(folder, eos_token_id=257, prompt={"head": "{question}"})
    byte_tokenizer().save_pretrained(folder)
    return folder


def loads(folder) -> bool:
    """Whether a folder loads; anything but one sentence of why not is an error of the test."""
    start = time.perf_counter()
    try:
        checkpoint = open_checkpoint(folder)
        Tokenizer.from_pretrained(checkpoint).build_prompt("Who wrote Emma?", ["Emma is a novel."])
        Denoiser.from_pretrained(checkpoint)
        return True
    except (CheckpointError, QuestionError) as error:
        assert len(str(error)) < 1500
        return False
    finally:
        assert time.perf_counter() - start < MOST_SECONDS


def test_the_folder_that_is_changed_loads(good):
    assert loads(good)


def changed(good, tmp_path):
    folder = tmp_path / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(good, folder)


KEYS_OF = {
    "config.json": (
        "model_type vocab_size hidden_size num_hidden_layers num_attention_heads head_dim "
        "num_key_value_heads intermediate_size max_position_embeddings rms_norm_eps rope_theta "
        "rope_scaling qk_norm qkv_bias tie_word_embeddings mask_token_id shifted evidence_layout "
        "passage_length canvas_length block_length eos_token_id prompt rope_parameters auto_map experts "
        "partial_rotary_factor block_size block_grid"
    ),
    "tokenizer_config.json": (
        "chat_template eos_token mask_token bos_token added_tokens_decoder extra_special_tokens "
        "additional_special_tokens model_max_length tokenizer_class init_inputs split_special_tokens "
        "add_prefix_space backend padding_side"
    ),
}


@pytest.mark.parametrize("name", KEYS_OF)
@given(data=st.data())
@RANDOM
def test_any_value_at_any_key_of_the_settings(good, tmp_path, name, data):
    keys = st.sampled_from(KEYS_OF[name].split())
    path = changed(good, tmp_path) / name
    changes = data.draw(st.dictionaries(keys, VALUES, min_size=1, max_size=3))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    loads(path.parent)


@given(
    name=st.sampled_from(["model.safetensors", "tokenizer.json", "config.json"]),
    start=st.floats(0, 1),
    within=st.sampled_from([16, 2000, 10**9]),
    cut=st.integers(0, 40),
    put=st.binary(max_size=20)
    | st.sampled_from([b"[" * 3000, b'"special":false', b"9" * 30, b"{}", b'"a":1,']),
)
@RANDOM
def test_any_bytes_at_any_place_of_a_file(good, tmp_path, name, start, within, cut, put):
    """Bytes are taken out of a file at its head, or anywhere, and others put in their place."""
    folder = changed(good, tmp_path)
    path = folder / name
    whole = path.read_bytes()
    at = int(start * min(within, len(whole)))
    path.write_bytes(whole[:at] + put + whole[at + cut :])
    loads(folder)


@given(path=st.lists(st.integers(0, 30), max_size=5), value=VALUES)
@RANDOM
def test_any_value_at_any_place_of_the_tokenizer(good, tmp_path, path, value):
    folder = changed(good, tmp_path)
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    node = raw
    for step in path:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = keys[step % len(keys)]
        if not isinstance(node[key], dict | list) or not node[key] or step == path[-1]:
            node[key] = value
            break
        node = node[key]
    file.write_text(json.dumps(raw))
    loads(folder)
