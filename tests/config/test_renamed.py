"""Settings that had other names: a person is told the new one, files of older versions still open."""

import json
from dataclasses import replace

import pytest
import yaml

from dlm_rag.config import dump_config, list_setting_fields, load_config
from dlm_rag.config import renamed as table
from dlm_rag.config.renamed import upgrade_settings
from dlm_rag.decode.trace_file import read_trace, read_trace_header
from dlm_rag.errors import ConfigError
from dlm_rag.training.fingerprint import collect_phase_settings, collect_run_settings
from dlm_rag.training.tasks import find_task
from tests.support.passages import write_jsonl_file
from tests.support.traces import HEADER, make_rollout_with, write_rollouts

KEYS = [
    (f"{section}.{old}".removeprefix("."), f"{section}.{new}".removeprefix("."))
    for section, names in table._RENAMED.items()
    for old, new in names.items()
    if " " not in new
]
REMOVED = [
    (f"{section}.{old}", reason)
    for section, names in table._RENAMED.items()
    for old, reason in names.items()
    if " " in reason
]


def test_every_new_name_is_a_setting_and_no_old_one_is():
    known = list_setting_fields()
    assert {new for _, new in KEYS} <= set(known) and not {old for old, _ in KEYS} & set(known)


@pytest.mark.parametrize(("old", "new"), KEYS)
def test_an_old_key_is_answered_with_the_new_one(old, new, tmp_path):
    with pytest.raises(ConfigError, match=f"{new}\\b"):
        load_config(None, [f"{old}=1"])
    section, _, leaf = old.rpartition(".")
    (tmp_path / "old.yaml").write_text(yaml.safe_dump({section: {leaf: 1}} if section else {leaf: 1}))
    with pytest.raises(ConfigError, match=f"{new}\\b"):
        load_config(str(tmp_path / "old.yaml"))
    if section == "train" and leaf != "vocabulary":
        with pytest.raises(ConfigError, match=new.replace("train.", "train.phases.a.")):
            load_config(None, [f"train.phases.a.{leaf}=1"])


WORDS = [
    "decode.max_new_tokens=32", "decode.finished_block_context=no_evidence",
    "decode.retrieval_gate=policy_head", "decode.query_policy=question", "retrieval.method=dense",
    "retrieval.bm25_query=sentences",
    "train.objective=rl", "train.trainable=policy_heads", "train.prompts_per_step=3",
    "train.passage_sets_per_step=3", "train.num_generations=5", "train.rows_per_set=5",
    "train.phases.a.max_steps=7", "train.phases.b.save_steps=3", "engine.prefix_cache_gib=2",
    "f1_rule=squad",
]  # fmt: skip


def with_old_names(tree: dict) -> dict:
    """A tree of settings as versions before the table wrote it."""
    back = {name: {new: old for old, new in names.items()} for name, names in table._RENAMED.items()}

    def renamed(section: str, settings: dict) -> dict:
        found = {}
        for name, value in settings.items():
            if section == "train" and name == "phases":
                value = {phase: renamed("train", own) for phase, own in value.items()}
            old = back.get(section, {}).get(name, name)
            found[old] = value
        return found

    sections = {name: renamed(name, own) for name, own in tree.items() if isinstance(own, dict)}
    return renamed("", {name: own for name, own in tree.items() if not isinstance(own, dict)}) | sections


def test_a_config_that_an_older_version_stored_is_read_as_it_was(tmp_path):
    config = load_config(None, WORDS)
    old = with_old_names(yaml.safe_load(dump_config(config)))
    assert old["decode"]["canvas_length"] == 32 and old["train"]["phases"]["a"]["steps"] == 7
    (tmp_path / "stored.yaml").write_text(yaml.safe_dump(old))
    assert load_config(str(tmp_path / "stored.yaml"), stored=True) == config
    with pytest.raises(ConfigError):
        load_config(str(tmp_path / "stored.yaml"))


def test_a_trace_that_an_older_version_wrote_is_the_same_trace(tmp_path):
    own = HEADER.settings | {"query_policy": "question"}
    rollouts = [make_rollout_with(), replace(make_rollout_with(settings=own), id="q2")]
    new = write_rollouts(tmp_path / "new.jsonl", HEADER, rollouts)
    header, *lines = map(json.loads, new.read_text().splitlines())
    for line in (header, *(line for line in lines if "settings" in line)):
        line["settings"] = with_old_names({"decode": line["settings"]})["decode"]
    old = write_jsonl_file(tmp_path / "old.jsonl", [header, *lines])
    assert '"canvas_length": 3' in old.read_text() and '"query": "question"' in old.read_text()
    assert read_trace_header(old) == read_trace_header(new)
    assert list(read_trace(old)) == list(read_trace(new))


@pytest.mark.parametrize("objective", ["sft", "rl"])
def test_a_run_that_an_older_version_began_goes_on(objective):
    """Every setting that a run depends on comes back from what it was called in a checkpoint."""
    config = load_config(None, [*WORDS, f"train.objective={objective}", "train.trainable=null"])
    for phase in config.train.get_phase_configs().values():
        held = collect_run_settings(config) | collect_phase_settings(config, phase, find_task(phase))
        tree: dict = {}
        for key, value in held.items():
            section, _, name = key.partition(".")
            tree.setdefault(section, {})[name] = value
        old = with_old_names(tree)
        flat = {f"{section}.{name}": value for section, own in old.items() for name, value in own.items()}
        assert {key: upgrade_settings(flat)[key] for key in held} == held


@pytest.mark.parametrize(("key", "reason"), REMOVED)
def test_a_removed_setting_is_explained_and_dropped_from_stored_files(key, reason):
    with pytest.raises(ConfigError, match=f"{key} .* removed: .*leave it out"):
        load_config(None, [f"{key}=0"])
    assert upgrade_settings({key: None, "retrieval.top_k": 3}) == {"retrieval.top_k": 3}
    kept = {key: 1.0} if key.startswith("decode.") else {}  # which has changed answers
    assert upgrade_settings({key: 1.0}) == kept
    section, _, leaf = key.partition(".")
    tree = {section: {leaf: 1.0}} if section != "train" else {"train": {"phases": {"a": {leaf: 1.0}}}}
    expected = (
        {section: {leaf: 1.0} if kept else {}} if section != "train" else {"train": {"phases": {"a": {}}}}
    )
    assert upgrade_settings(tree) == expected
