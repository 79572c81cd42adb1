"""What `train --resume` goes on with: files that are what was written, and the run that was begun."""

import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_rag.commands import train as train_command
from dlm_rag.config import list_setting_fields, load_config
from dlm_rag.errors import CheckpointError, ConfigError
from dlm_rag.training.checkpoints import (
    CHANGEABLE_KEYS,
    RECORD_FILE,
    collect_settings,
    find_damaged_files,
    find_latest_checkpoint,
    skip_damaged_checkpoints,
)
from dlm_rag.training.initial_model import InitialModel
from dlm_rag.training.task import TASKS, find_task
from dlm_rag.training.trainer import Trainer, open_trainer
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser
from tests.support.training import METRICS_LINES, MICRO_SETTINGS, SINGLE_PROCESS, make_trainer
from tests.support.training_data import write_own_data

FOUR = [*MICRO_SETTINGS, "train.max_steps=4"]  # with checkpoints of steps 2 and 4


def run(folder: Path, *words: str) -> None:
    train_command.main(["--out", str(folder), *FOUR, *words])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps that nothing has touched, without its model."""
    trainer = make_trainer(folder := tmp_path_factory.mktemp("finished"), "train.max_steps=4")
    while not trainer.finished:
        trainer.step()
        if trainer.state.step % 2 == 0:
            trainer.save()
    (folder / "metrics.jsonl").write_text("".join(METRICS_LINES))
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def shard_of(checkpoint: Path) -> Path:
    (found,) = checkpoint.glob("*.safetensors")
    return found


def put(path: Path, make) -> None:
    """Gives the numbers of a shard other bytes, made of the old ones; its size stays."""
    data = path.read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    path.write_bytes(data[:begin] + make(data[begin:]))


def in_record(change):
    """Writes state.json anew with one thing changed."""

    def harm(checkpoint: Path) -> None:
        record = json.loads((checkpoint / RECORD_FILE).read_text())
        change(record)
        (checkpoint / RECORD_FILE).write_text(json.dumps(record))

    return harm


def in_shard(make):
    return lambda checkpoint: put(shard_of(checkpoint), make)


PICKLE = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n"


def write_pickle(checkpoint: Path) -> None:
    path = shard_of(checkpoint)
    path.write_bytes(PICKLE.ljust(path.stat().st_size))


HARMS = {
    "a flipped bit": (in_shard(lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]), "shard-"),
    "zeros": (in_shard(lambda data: bytes(len(data))), "shard-"),
    "a pickle": (write_pickle, "shard-"),
    "a shard too many": (lambda p: save_file({"x": torch.zeros(1)}, p / "more.safetensors"), "more.safe"),
    "a step edited": (in_record(lambda record: record["state"].update(step=3)), RECORD_FILE),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_checkpoint_that_is_not_what_was_written_gives_way_to_the_one_before(folder, harm):
    """It is named, then and later; the older one is whole."""
    change, says = HARMS[harm]
    change(folder / "checkpoints" / "step-00000004")
    told = skip_damaged_checkpoints(folder, SINGLE_PROCESS)
    assert find_latest_checkpoint(folder)[1].state.step == 2
    assert len(told) == 1 and "step-00000004" in told[0] and says in told[0], told
    assert skip_damaged_checkpoints(folder, SINGLE_PROCESS) == told


def test_every_file_is_read_where_a_process_does_not_see_all(folder, tmp_path):
    """The second does not list the first of three files yet."""
    whole, late = folder / "checkpoints" / "step-00000004", tmp_path / "late"
    record = find_latest_checkpoint(folder)[1]
    for name in "ab":
        save_file({"x": torch.full((1,), float("nan"))}, whole / f"{name}.safetensors")
    shutil.copytree(whole, late)
    (late / "a.safetensors").unlink()
    listed, found = [[file.name for file in path.glob("*.safetensors")] for path in (whole, late)], []
    for rank, path in enumerate((whole, late)):
        gathered = iter([listed])
        processes = SimpleNamespace(
            rank=rank, world_size=2, all_gather_object=lambda own, left=gathered: next(left, [own])
        )
        found += find_damaged_files(path, replace(record, digests=dict.fromkeys(listed[0], "")), processes)
    assert sorted(line.split()[0] for line in found) == sorted(listed[0])


@pytest.mark.slow
def test_a_flipped_bit_changes_no_weight_of_the_end(folder, finished, capsys):
    """The run goes on from the older checkpoint, and ends as the one that nothing has touched."""
    run(finished, "--resume")
    HARMS["zeros"][0](folder / "checkpoints" / "step-00000004")
    capsys.readouterr()
    run(folder, "--resume")
    said = capsys.readouterr().err
    assert "step-00000004" in said and "going on from step 2" in said and "learning rate" not in said
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (folder, finished))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    run(folder, "--resume")
    assert "going on from step 4" in capsys.readouterr().err


def test_where_no_checkpoint_is_whole_nothing_begins_anew(folder, capsys):
    for checkpoint in (folder / "checkpoints").iterdir():
        HARMS["zeros"][0](checkpoint)
    metrics = (folder / "metrics.jsonl").read_bytes()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="none of the checkpoints in .* is whole: .*shard-"):
            run(folder, "--resume")
    assert (folder / "metrics.jsonl").read_bytes() == metrics and "anew" not in capsys.readouterr().err


OWN = [
    *MICRO_SETTINGS, "model.path={base}/model", "data.questions={base}/questions.jsonl",
    "data.corpus={base}/corpus.jsonl", "retrieval.top_k=2", "train.passage_length=96",
]  # fmt: skip
BEGUN = {
    "sft": OWN,
    "rl": [*OWN, "train.objective=rl", "decode.gate_temperature=2"],
    "documents": [
        *MICRO_SETTINGS, "train.objective=pretrain", "train.sequence_length=64", "train.batch_tokens=256",
        "data.documents={base}/web.jsonl",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Beneath one folder a model, data, and runs from them that have saved a checkpoint at once."""
    write_own_data(base := tmp_path_factory.mktemp("begun"))
    tiny_denoiser(max_position_embeddings=512).save_pretrained(base / "model", eos_token_id=257)
    byte_tokenizer().save_pretrained(base / "model")
    for name in BEGUN:
        open_run(base, name).save()
    return base


@pytest.fixture
def base(begun, tmp_path):
    """A copy of it: everything has another path, and is the same."""
    return Path(shutil.copytree(begun, tmp_path / "base"))


def open_run(base: Path, name: str, *words: str) -> Trainer:
    given = [word.format(base=base) for word in (*BEGUN[name], *words)]
    return open_trainer(load_config(None, given), base / name)[0]


@pytest.mark.parametrize(
    ("name", "word", "says"),
    [
        ("sft", "model.block_size=4", "model.block_size=None, not 4"),
        ("sft", "train.learning_rate=0.1", "train.learning_rate=0.008, not 0.1"),
        ("sft", "decode.block_length=4", "decode.block_length=None, not 4"),
        ("sft", "train.eval_questions=2", "train.eval_questions=1, not 2"),
        ("rl", "decode.gate_temperature=1", "decode.gate_temperature=2.0, not 1.0"),
        ("documents", "train.seed=1", "train.seed=0, not 1"),
    ],
)
def test_what_a_run_depends_on_must_be_as_it_was(base, monkeypatch, name, word, says):
    """And is looked at before any weight is read."""
    monkeypatch.setattr(InitialModel, "materialize", None)
    with pytest.raises(ConfigError, match=f"begun with {says}"):
        open_run(base, name, word)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sft", ["decode.commit_threshold=0.5", "train.max_steps=99", "model.attn_implementation=sdpa"]),
        ("rl", ["decode.batch_size=3", "train.eval_questions=1", "train.save_steps=7"]),
        (
            "documents",
            ["train.eval_questions=3", "train.gradient_accumulation_steps=2", "decode.block_length=null"],
        ),
    ],
)
def test_what_changes_no_step_may_be_another(base, name, words):
    assert open_run(base, name, *words).restore()


def spoil(path: Path) -> None:
    """Changes one byte, and keeps size and time: nothing but the content tells."""
    found, data = path.stat(), bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def other_theta(path: Path) -> None:
    path.write_text(path.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))


@pytest.mark.parametrize(
    ("name", "file", "harm", "says"),
    [
        ("rl", "model/model.safetensors", spoil, "model.path"),
        ("rl", "model/config.json", other_theta, "model.path"),
        ("sft", "questions.jsonl", lambda path: replace_in(path, "town 7", "town 8"), "data.questions"),
        ("sft", "corpus.jsonl", lambda path: replace_in(path, "land 3", "land 4"), "data.corpus"),
        ("documents", "web.jsonl", lambda path: replace_in(path, "land 3", "land 4"), "data.documents"),
    ],
)
def test_other_contents_under_the_same_name_are_refused(base, monkeypatch, name, file, harm, says):
    assert open_run(base, name).restore(), "moved, and the same"
    harm(base / file)
    monkeypatch.setattr(InitialModel, "materialize", None)
    with pytest.raises(ConfigError, match=f"begun with other contents of {says}={base}"):
        open_run(base, name)


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_every_setting_is_held_or_stands_in_the_table():
    """`collect_settings` has what the table does not name, and it names what there is."""
    config = load_config(None, ["train.objective=rl"])
    sections = ("model.", "retrieval.", "data.", "train.", "decode.")
    known = {key for key in list_setting_fields() if key.startswith(sections)}
    held = set[str]()
    for objective in TASKS:
        chosen = replace(config, train=replace(config.train, objective=objective))
        held |= collect_settings(chosen, find_task(chosen.train)).keys()
    assert known >= CHANGEABLE_KEYS and known == held | CHANGEABLE_KEYS and not held & CHANGEABLE_KEYS
