"""What `train --resume` goes on with: files that are what was written, and the run that was begun."""

import json
import os
import random
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_rag import Denoiser, Tokenizer
from dlm_rag.commands import train as train_command
from dlm_rag.config import list_setting_fields, load_config
from dlm_rag.data.synthetic_world import write_world
from dlm_rag.errors import CheckpointError, ConfigError
from dlm_rag.files.build_once import DIGESTS_FILE
from dlm_rag.files.journal import hold_file_lock
from dlm_rag.model.checkpoint import write_generation_config
from dlm_rag.training.checkpoints import (
    CHANGEABLE_KEYS,
    RECORD_FILE,
    collect_settings,
    find_damaged_files,
    find_latest_checkpoint,
    scan_checkpoints,
    skip_damaged_checkpoints,
)
from dlm_rag.training.initial_model import InitialModel
from dlm_rag.training.sources import remove_stale_worlds
from dlm_rag.training.task import TASKS, find_task
from dlm_rag.training.trainer import Trainer, open_trainer
from tests.support.paths import ROOT
from tests.support.processes import count_lines, wait_until
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser
from tests.support.training import (
    METRICS_LINES,
    MICRO_SETTINGS,
    SINGLE_PROCESS,
    clone_weights,
    make_trainer,
)
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


def in_record(change):
    """Writes state.json anew with one thing changed."""

    def harm(checkpoint: Path) -> None:
        record = json.loads((checkpoint / RECORD_FILE).read_text())
        change(record)
        (checkpoint / RECORD_FILE).write_text(json.dumps(record))

    return harm


def in_shard(make):
    """Gives the numbers of a shard other bytes, made of the old ones; its size stays."""

    def harm(checkpoint: Path) -> None:
        data = (path := shard_of(checkpoint)).read_bytes()
        begin = 8 + struct.unpack("<Q", data[:8])[0]
        path.write_bytes(data[:begin] + make(data[begin:]))

    return harm


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
    denoiser = tiny_denoiser(max_position_embeddings=512)
    denoiser.save_pretrained(base / "model", eos_token_id=257)
    own = replace(denoiser.config, decode_settings={"commit_rule": "left_to_right"})
    write_generation_config(base / "model", own)
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
        ("sft", "prompt=search_r1", "prompt=None, not search_r1"),
        ("rl", "decode.gate_temperature=1", "decode.gate_temperature=2.0, not 1.0"),
        ("rl", "train.temperature=0.5", "train.temperature=1.0, not 0.5"),
        ("rl", "decode.commit_rule=threshold", "decode.commit_rule=sampled_left_to_right, not sampled"),
        ("documents", "train.seed=1", "train.seed=0, not 1"),
    ],
)
def test_what_a_run_depends_on_must_be_as_it_was(base, monkeypatch, name, word, says):
    """And is looked at before any weight is read."""
    monkeypatch.setattr(InitialModel, "materialize", None)
    with pytest.raises(ConfigError, match=f"begun with {says}"):
        open_run(base, name, word)


def test_worlds_of_an_attempt_without_a_checkpoint_are_made_anew(tmp_path):
    asked = write_world(tmp_path / "world", 0, "test", 100, 2, hops=2)
    assert (tmp_path / "world" / "questions.jsonl").read_text().count("\n") == len(asked) == 2 * 2
    shutil.rmtree(tmp_path / "world")

    def fill():
        for name in ("validation", "documents"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "questions.jsonl").write_text("{}\n{}\n")
            (tmp_path / name / DIGESTS_FILE).write_text("{}")

    for questions, begins, kept in (
        (2, False, {"validation", "documents"}), (3, False, {"documents"}), (2, True, set())
    ):  # fmt: skip
        fill()
        remove_stale_worlds(tmp_path, questions, begins)
        assert {path.name for path in tmp_path.iterdir()} == kept
    (own := tmp_path / "documents").mkdir()
    (own / "mine.jsonl").write_text("{}")
    remove_stale_worlds(tmp_path, 2, True)
    assert (own / "mine.jsonl").is_file(), "of nobody's attempt"
    with pytest.raises(ConfigError, match="holds 'documents', which is of no run"):
        train_command.prepare_run_folder(tmp_path, resume=False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sft", ["decode.batch_size=3", "train.max_steps=99", "model.attn_implementation=sdpa"]),
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


@pytest.mark.parametrize(
    ("name", "file", "harm", "says"),
    [
        ("rl", "model/model.safetensors", spoil, "model.path"),
        ("rl", "model/config.json", lambda path: replace_in(path, ": 10000.0", ": 20000.0"), "model.path"),
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
    known = {key for key in list_setting_fields() if key.startswith((*sections, "prompt"))}
    held = set[str]()
    for objective in TASKS:
        chosen = replace(config, train=replace(config.train, objective=objective))
        held |= collect_settings(chosen, find_task(chosen.train)).keys()
    assert known >= CHANGEABLE_KEYS and known == held | CHANGEABLE_KEYS and not held & CHANGEABLE_KEYS


def test_what_the_trained_model_decodes_with_is_held():
    given = load_config(None, ["decode.commit_threshold=0.5", "decode.query_policy=question"])
    held = collect_settings(given, find_task(given.train))
    assert held["decode.commit_threshold"] == 0.5 and held["decode.query_policy"] == "question"


def test_a_resumed_run_is_the_run_that_was_not_stopped_bit_for_bit(tmp_path):
    whole = make_trainer(tmp_path / "whole")
    for _ in range(8):
        whole.step()
    first = make_trainer(tmp_path / "stopped")
    for _ in range(5):
        first.step()
        if first.state.step in (2, 4):
            first.save()
    second = make_trainer(tmp_path / "stopped")
    assert second.restore() and second.state.step == 4
    while second.state.step < 8:
        second.step()
    assert second.state == whole.state
    ours, theirs = clone_weights(second), clone_weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_with_the_same_weights(tmp_path):
    """Real processes: one runs through, one is killed twice while it trains or saves."""

    def start(folder, *more):
        command = [sys.executable, "train.py", "--out", str(tmp_path / folder), *MICRO_SETTINGS, *more]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)

    whole = start("whole")
    rng, metrics = random.Random(0), tmp_path / "killed" / "metrics.jsonl"
    for attempt in range(2):
        process = start("killed", *["--resume"][: bool(attempt)])
        wait_until(lambda least=2 * attempt: count_lines(metrics) > least, process)
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    _, said = (done := start("killed", "--resume")).communicate()
    assert done.returncode == 0 and "going on from step" in said, said
    _, said = whole.communicate()
    assert whole.returncode == 0, said
    ours, theirs = (load_file(tmp_path / run / "model/model.safetensors") for run in ("killed", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(8)), "each step is in the metrics once"
    assert "exact_match_4_hops" in lines[-1]
    model = tmp_path / "whole" / "model"
    Tokenizer.from_pretrained(model)
    assert Denoiser.from_pretrained(model).config.evidence_layout == "independent"
    card = json.loads((model / "training.json").read_text())
    assert card["config"]["train"]["max_steps"] == 8
    assert card["machines"][0]["attention"] == "sdpa" and card["machines"][0]["torch"] == torch.__version__


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_leaves_the_last_checkpoint(tmp_path):
    make_trainer(tmp_path).save()
    command = [sys.executable, "train.py", "--resume", "--out", str(tmp_path), *MICRO_SETTINGS]
    limited = f"ulimit -f 200; exec {shlex.join(command)}"  # files of 200 KiB
    done = subprocess.run(["bash", "-c", limited], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "the checkpoint of step 2 could not be written" in done.stderr and "intact" in done.stderr
    trainer = make_trainer(tmp_path)
    assert trainer.restore()
    assert all(value.isfinite().all() for value in clone_weights(trainer).values())


def test_a_folder_is_trained_in_by_one_run_at_a_time(tmp_path):
    other = pytest.raises(ConfigError, match=f"the run in {tmp_path} is being written by another process")
    with hold_file_lock(tmp_path / "train.lock", "the run"), other:
        run(tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_anew_and_says_so(tmp_path, capsys):
    """What it has left: its lock, a world half written, perhaps metrics."""
    (tmp_path / "validation.building").mkdir()
    (tmp_path / "train.lock").touch()
    run(tmp_path, "train.max_steps=1", "--resume")
    assert f"{tmp_path} has no checkpoint: the run begins again" in capsys.readouterr().err
    assert (tmp_path / "model" / "README.md").exists()
    assert find_latest_checkpoint(tmp_path)[1].state.step == 1
    assert not (tmp_path / "train.lock").exists()
    with pytest.raises(ConfigError, match="holds a run already: add --resume to go on"):
        run(tmp_path)


def cut_shard(checkpoint):
    os.truncate(path := shard_of(checkpoint), path.stat().st_size - 1)


BROKEN = {  # what lies beside two whole checkpoints, by its name: what makes it, what is said
    "step-00000009": (Path.touch, "state.json cannot be read (Not a directory)"),
    "step-00000008": (Path.mkdir, "state.json cannot be read (No such file"),
    "step-last": (Path.mkdir, "its name is not that of a checkpoint"),
    "step-00000004": (cut_shard, ".safetensors is cut short"),
    "step-00000011": ('{"format": 3, "settings": {}, "state": []}', "state.json has changed"),
}


def test_what_is_no_whole_checkpoint_is_passed_over_and_left_alone(tmp_path, capsys):
    trainer = make_trainer(tmp_path)
    for _ in range(2):
        trainer.step()
        trainer.step()
        trainer.save()
    folder = tmp_path / "checkpoints"
    for name, (harm, _) in BROKEN.items():
        if isinstance(harm, str):
            (folder / name).mkdir()
            (folder / name / "state.json").write_text(harm)
        else:
            harm(folder / name)
    passed = {line.split(" is passed over: ")[0]: line for line in scan_checkpoints(tmp_path)[1]}
    for name, (_, says) in BROKEN.items():
        assert says in passed.pop(str(folder / name)), name
    assert not passed
    again = make_trainer(tmp_path)
    assert again.restore() and again.state.step == 2
    again.step()
    again.save()
    assert find_latest_checkpoint(tmp_path)[0].name == "step-00000003"
    assert {path.name for path in folder.iterdir()} == {*BROKEN, "step-00000002", "step-00000003"}
    again.step()
    again.save()
    assert find_latest_checkpoint(tmp_path)[0].name == "step-00000004", "what was broken is written anew"


@pytest.mark.slow
def test_control_c_saves_a_checkpoint_and_a_second_ends_at_once(tmp_path):
    """A real process; what it says is how to go on, and the run that goes on is the whole one's."""

    def interrupt(folder, *more, times=1):
        words = [*MICRO_SETTINGS, "train.save_steps=1000", "train.max_steps=100000", *more]
        process = subprocess.Popen(
            [sys.executable, "train.py", "--out", str(folder), *words], cwd=ROOT, stderr=subprocess.PIPE,
            text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        wait_until(lambda: count_lines(folder / "metrics.jsonl") > 0, process)
        for number in range(times):
            time.sleep(1.2 * number)
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 130 and "stopping after this step" in err and "Traceback" not in err
        return err

    assert "which is saved: --resume goes on" in interrupt(tmp_path)
    assert find_latest_checkpoint(tmp_path)[1].state.step > 0
    # Steps of several seconds, so that the second comes in the one that the first has let go on.
    err = interrupt(tmp_path / "long", "train.passage_sets_per_step=200", times=2)
    assert "interrupted" in err and "stopped after step" not in err


def test_a_run_that_did_not_say_its_layout_goes_on(tmp_path):
    checkpoints = make_trainer(tmp_path)._checkpoints
    checkpoints._check_settings(SimpleNamespace(settings={"model.evidence_layout": None}, fingerprints={}))
    with pytest.raises(ConfigError, match="begun with model.evidence_layout=joint, not independent"):
        other = {"model.evidence_layout": "joint"}
        checkpoints._check_settings(SimpleNamespace(settings=other, fingerprints={}))
