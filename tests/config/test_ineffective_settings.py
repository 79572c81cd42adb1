"""Settings without effect: what fields declare in `only_with`, checked over the whole tree."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from dlm_rag.config import list_setting_fields, load_config
from dlm_rag.config.fields import (
    CheckedSettings,
    check_effects,
    find_idle_settings,
    get_field_metadata,
    setting,
    settings_dataclass,
)
from dlm_rag.config.sections import DecodeConfig
from dlm_rag.errors import ConfigError


def load(words: str, file: str | None = None):
    return load_config(file, words.split(), effects=True)


def test_every_declared_need_is_a_setting_or_a_fact_of_checkpoints():
    fields = list_setting_fields()
    for item in fields.values():
        assert {*get_field_metadata(item, "only_with")} <= {*fields, "attention_blocks"}, item.name


@pytest.mark.parametrize(
    ("words", "key", "need"),
    [
        ("train.num_generations=3", "train.num_generations=3", "train.objective=rl"),
        ("train.steps_per_world=3 data.corpus=x data.questions=q", "steps_per_world=3", "corpus=null"),
        ("train.hidden_size=64 model.path=x", "train.hidden_size=64", "model.path=null"),
        ("decode.tokens_per_step=2 decode.commit_rule=sampled", "_per_step=2", "rule=threshold"),
        ("decode.schedule=rounded", "decode.schedule=rounded", "decode.steps_per_block"),
        ("decode.blocks_at_once=2 decode.commit_rule=top_k", "blocks_at_once=2", "commit_rule=threshold"),
        ("decode.query_threshold=1 decode.query_policy=question", "threshold=1.0", "policy=proxy"),
        ("decode.retrieval_interval=2 decode.query_policy=question", "interval", "query_policy=proxy"),
        ("retrieval.query_prompt=x", "retrieval.query_prompt=x", "retrieval.method=dense"),
        ("retrieval.timeout=3", "retrieval.timeout=3.0", "retrieval.url"),
        ("retrieval.url=http://h:1 retrieval.method=dense", "retrieval.method=dense", "milvus://"),
        ("retrieval.url=http://h:1 retrieval.min_score_ratio=0.9", "ratio=0.9", "retrieval.url=null"),
        ("engine.prefix_cache_gib=0 engine.store=x", "engine.store=x", "cache_gib=null"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_is_refused_with_what_it_needs(words, key, need):
    with pytest.raises(ConfigError) as caught:
        load(words)
    assert key in str(caught.value) and "no effect" in str(caught.value) and need in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "decode.query_threshold=0 decode.query_policy=question",  # the default
        "decode.tokens_per_step=2",  # the rule is the checkpoint's
        "retrieval.url=milvus://h:1/c retrieval.method=dense",
        "decode.commit_threshold=0.4 decode.commit_rule=mine:rule",  # a rule of one's own may read it
    ],
)
def test_a_setting_that_may_have_an_effect_is_not(words, monkeypatch):
    monkeypatch.setattr("dlm_rag.config.fields.list_choices", lambda item: ())
    load(words)


def test_a_file_is_a_recipe_that_words_may_change(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("decode: {query_threshold: 0.5}\ntrain: {pointer_loss_weight: 0.5}\n")
    load("decode.query_policy=question", str(path))


def test_of_several_configs_one_must_read_it():
    proxy, static = load(""), load("decode.query_policy=question")
    proxy.decode.query_threshold = static.decode.query_threshold = 0.5
    check_effects([(proxy, ["decode.query_threshold"]), (static, ["decode.query_threshold"])])
    with pytest.raises(ConfigError, match="query_threshold"):
        check_effects([(static, ["decode.query_threshold"])])


def test_what_a_checkpoint_does_not_read_is_found_once_it_is_open():
    given, rule = DecodeConfig(tokens_per_step=2), {"decode.commit_rule": "sampled"}
    assert [*find_idle_settings("decode", given, rule)] == ["tokens_per_step"]  # its own rule
    blocks = find_idle_settings("decode", DecodeConfig(query_window=3), {"attention_blocks": False})
    assert "has no effect on a model whose attention has no blocks" in blocks["query_window"]


@settings_dataclass
class Drinks(CheckedSettings):
    kind: str = setting("tea", table="drinks:KINDS")
    minutes: int = setting(3)
    milk: bool = setting(False)


def test_entries_of_a_table_say_what_they_read(monkeypatch):
    module = ModuleType("drinks")
    module.KINDS = {"tea": SimpleNamespace(settings=("minutes",)), "water": SimpleNamespace(settings=())}
    monkeypatch.setitem(sys.modules, "drinks", module)
    assert not find_idle_settings("drinks", Drinks(minutes=4, milk=True), {"drinks.kind": "tea"})
    idle = find_idle_settings("drinks", Drinks(minutes=4), {"drinks.kind": "water"})
    assert idle == {"minutes": "4 has no effect with drinks.kind=water: it needs drinks.kind=tea"}
    assert Drinks(kind="mine:cocoa").kind == "mine:cocoa"
    with pytest.raises(ConfigError, match="tea, water or module:function"):
        Drinks(kind="cocoa")
