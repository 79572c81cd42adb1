"""The config tree: strict keys, types and bounds, defaults in one place."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dlm_rag.commands.arguments import parse_command_line
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files
from dlm_rag.config import (
    CONFIG_FOLDER,
    Config,
    DecodeConfig,
    dump_config,
    list_setting_fields,
    load_config,
)
from dlm_rag.config.fields import fill_unset, replace_settings
from dlm_rag.errors import ConfigError
from dlm_rag.files.hub import SHIPPED_FOLDER


def test_later_sources_win(tmp_path):
    (tmp_path / "a.yaml").write_text("decode: {seed: 1, max_new_tokens: 32}\nretrieval: {top_k: 3}\n")
    config = load_config(str(tmp_path / "a.yaml"), ["decode.seed=2"])
    assert (config.decode.seed, config.decode.max_new_tokens, config.retrieval.top_k) == (2, 32, 3)


@pytest.mark.parametrize("text", ["query: ", "007", "1e5", "a #b", "${x}", "", "x=y"])
def test_texts_are_taken_as_they_are_typed(text):
    assert load_config(None, [f"retrieval.query_prompt={text}"]).retrieval.query_prompt == text
    assert load_config(None, ["model.path=null"]).model.path is None


def test_dumped_tree_loads_to_the_same_config(tmp_path):
    assert load_config() == Config()
    words = ["decode.block_length=32", "retrieval.corpus=x", "retrieval.query_prompt=${x} \\${y} 'z'"]
    config = load_config(None, words)
    (tmp_path / "dump.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "dump.yaml")) == config


def test_a_dump_leaves_unset_what_a_checkpoint_may_say(tmp_path):
    path = tmp_path / "dump.yaml"
    path.write_text(dump_config(load_config(None, ["decode.seed=3", "retrieval.top_k=7"])))
    again = load_config(str(path))
    assert (again.decode.given, again.retrieval.given) == ({"seed"}, {"top_k"})
    own = fill_unset(again.decode, {"blocks_at_once": 3, "seed": 5})
    assert (own.blocks_at_once, own.seed) == (3, 3)


def test_a_setting_that_is_given_as_its_default_stays_given():
    """Where shipped files are filled in: a checkpoint's own value does not replace it."""
    config = load_config(None, ["retrieval.top_k=7", "retrieval.corpus=context", "questions=x.jsonl"])
    filled = fill_in_shipped_files(config, []).retrieval
    assert filled.corpus == "x.jsonl" and fill_unset(filled, {"top_k": 5}).top_k == 7


@pytest.mark.parametrize("path", sorted(CONFIG_FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_config_is_valid_and_holds_only_what_differs(path):
    config = load_config(path.name, effects=True)
    assert config == load_config(path.stem)
    assert config != Config()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("decode.comit_threshold=1", "nearest: 'decode.commit_threshold'"),
        ("decode.block_size=3", "nearest: 'decode.block_length'"),
        *((f"{key}=3", f"nearest: '{right}'") for key, right in (
            ("top_k", "retrieval.top_k"), ("retrieval.k", "retrieval.top_k"),
            ("train.lr", "train.learning_rate"), ("decode.steps", "decode.steps_per_block"),
            ("train.batch_size", "train.passage_sets_per_step"), ("wandb.project", "train.wandb"),
        )),
        *((f"decode.commit_threshold={value}",) * 2 for value in ("1.5", "nan", "abc")),
        *((f"retrieval.top_k={value}",) * 2 for value in ("2.5", "0")),
        ("decode.early_stopping=maybe", "decode.early_stopping=maybe"),
        ("energy=yes", "energy=yes is not one of auto, none"),
        ("decode.query_policy=proxi", "nearest: 'proxy'"),
        ("decode=3", "unknown key 'decode'"),
        ("decode.seed=", "decode.seed="),
        ("decode.seed=[1", "decode.seed"),
    ],
)  # fmt: skip
def test_bad_setting_is_one_sentence_that_names_the_key(word, says):
    with pytest.raises(ConfigError, match=says.replace("(", r"\(").replace("[", r"\[")):
        load_config(None, [word])


def test_values_that_change_nothing_build_nothing():
    settings = DecodeConfig(commit_threshold=0.5)
    assert replace_settings(settings, commit_threshold=0.5) is settings
    changed = replace_settings(settings, commit_threshold=0.5, seed=3)
    assert changed == DecodeConfig(commit_threshold=0.5, seed=3) and settings.seed == 0
    assert replace(settings, seed=3).given == changed.given == {"commit_threshold", "seed"}
    tree = {"decode": asdict(DecodeConfig())}
    unset = {"mode", "commit_rule", "finished_block_context", "abstain"}  # None is none of their names
    assert TypeAdapter(Config).validate_python(tree).decode.given == tree["decode"].keys() - unset, (
        "of a file"
    )
    with pytest.raises(ConfigError, match="commit_threshold=7"):
        replace_settings(settings, commit_threshold=7)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("decode:\n  seed: [1\n", "line 3"),
        ("decode:\n  sede: 1\n", "unknown key 'decode.sede'"),
        ("decode: 3\n", "decode is a section"),
        ("- 1\n", "holds no settings"),
        ("decode: {seed: 1, seed: 2}\n", "bad.yaml .* line 1"),
        ("decode: {seed: yes}\n", "must be a number"),
    ],
)
def test_bad_yaml_names_file_or_key(tmp_path, text, says):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_config(str(tmp_path / "bad.yaml"))


# Anything at all: a config that can be written and read again, or a sentence.

ATOMS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["${x}", "1e9"])
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(list(list_setting_fields()))
MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def is_answered(folder, words) -> None:
    """The words are refused in a sentence, or are a config that is the same once dumped and loaded."""
    try:
        config = load_config(*words)
    except ConfigError as error:
        assert str(error) and "Traceback" not in str(error)
        return
    (folder / "dump.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(str(folder / "dump.yaml")) == config


@MANY
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_any_text_as_yaml(text, tmp_path):
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    is_answered(tmp_path, [str(tmp_path / "c.yaml")])


@MANY
@given(key=KEYS, value=VALUES)
def test_any_value_at_any_key(key, value, tmp_path):
    for name in reversed(key.split(".")):
        value = {name: value}
    (tmp_path / "c.yaml").write_text(json.dumps(value))
    is_answered(tmp_path, [str(tmp_path / "c.yaml")])


@MANY
@given(words=st.lists(st.tuples(KEYS | st.text(), VALUES.map(str)), max_size=3))
def test_any_words(words, tmp_path):
    is_answered(tmp_path, [None, [f"{key}={value}" for key, value in words]])


@pytest.mark.parametrize(
    ("path", "stemmer"),
    [
        ("dlm_rag/shipped/smollm2", "english"),
        (SHIPPED_FOLDER / "smollm2", "english"),
        ("nobody/on-hub", "none"),
    ],
)
def test_a_model_of_a_file_searches_as_one_of_a_flag_unless_it_is_on_the_hub(tmp_path, path, stemmer):
    (tmp_path / "c.yaml").write_text(f"model: {{path: {path}}}\n")
    assert (
        parse_command_line("", ["--config", f"{tmp_path}/c.yaml"]).fill_retrieval().bm25_stemmer == stemmer
    )


FLAGS = st.sampled_from(["--out", "--limit", "--questions", "-", "--"])


@MANY
@given(words=st.lists(st.text() | KEYS | FLAGS, max_size=4))
def test_any_command_line(words):
    try:
        line = parse_command_line("", words, typed=True)
    except (ConfigError, SystemExit):
        return
    assert isinstance(line.config, Config)
    assert not {*line.questions} & {*list_setting_fields()}
