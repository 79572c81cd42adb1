"""Runs of several phases, and the configs of real machines shrunk to a toy size."""

import json

import pytest

from dlm_rag import Denoiser, Tokenizer
from dlm_rag.commands import train as train_command
from dlm_rag.config import load_config
from dlm_rag.errors import ConfigError, UserError
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser
from tests.support.training import MICRO_SETTINGS
from tests.support.training_data import write_own_data


def train(folder, *words):
    train_command.main(["--out", str(folder), *words])


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


PHASES = [
    *MICRO_SETTINGS, "train.optimizer=adamw", "train.learning_rate=0.001",
    "train.phases.read.objective=pretrain", "train.phases.read.max_steps=3",
    "train.phases.read.sequence_length=64", "train.phases.read.batch_tokens=256",
    "train.phases.long.objective=pretrain", "train.phases.long.max_steps=2",
    "train.phases.long.sequence_length=128", "train.phases.long.batch_tokens=256",
    "train.phases.long.rope_theta=50000", "train.phases.long.parallel=fsdp",
    "train.phases.answer.max_steps=3", "train.phases.answer.rope_theta=50000",
]  # fmt: skip


@pytest.mark.slow
def test_phases_follow_one_another_and_a_stopped_run_ends_the_same(tmp_path):
    train(tmp_path / "whole", *PHASES)
    lines = metrics_of(tmp_path / "whole")
    assert [line["phase"] for line in lines] == ["read"] * 3 + ["long"] * 2 + ["answer"] * 3
    assert [line["step"] for line in lines] == list(range(8))
    assert "nelbo_per_token" in lines[2] and "exact_match" in lines[7]
    assert Denoiser.from_pretrained(tmp_path / "whole" / "model").config.rope_theta == 50000
    later = ("phases.answer", "phases.long", "_set", "worlds", "steps_per_world", "eval_questions")
    short = [word for word in PHASES if not any(name in word for name in later)]
    train(tmp_path / "stopped", *short)
    train(tmp_path / "stopped", *PHASES, "--resume")
    again = metrics_of(tmp_path / "stopped")
    assert [line["loss"] for line in again] == [line["loss"] for line in lines], "bit for bit"


def test_what_is_wrong_with_the_last_phase_is_said_before_the_first(tmp_path):
    missing = ["data.questions=none.jsonl", "data.corpus=none.jsonl"]
    with pytest.raises(UserError, match=r"none\.jsonl"):
        train(tmp_path / "run", *(word for word in PHASES if "world" not in word), *missing)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("train.phases.a.stps=3", r"train.phases.a.stps is unknown \(nearest: 'max_steps'\)"),
        ("train.phases.a.max_steps=few", "train.phases.a.max_steps=few"),
        ("train.phases.a.max_steps=0", "train.phases.a.max_steps=0 must be"),
        ("train.phases.a.seed=1", "train.phases.a.seed belongs to the run"),
        ("train.phases.a=3", "train.phases.a=3"),
        ("data.questions=q.jsonl", "data.questions needs data.corpus too"),
    ],
)
def test_a_wrong_phase_is_one_sentence(word, match):
    with pytest.raises(ConfigError, match=match):
        load_config(None, [word], effects=True)


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny public-style denoiser."""
    folder = tmp_path / "checkpoint"
    tiny_denoiser(max_position_embeddings=512).save_pretrained(folder, eos_token_id=257)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def own_data(tmp_path):
    return write_own_data(tmp_path)


TOY = [
    "model.device=cpu", "train.dtype=float32", "decode.max_new_tokens=64", "retrieval.top_k=2",
    "train.passage_length=96", "train.world_passages=100", "train.eval_questions=1",
]  # fmt: skip
SFT = [
    "train.max_steps=2", "train.passage_sets_per_step=4", "train.rows_per_set=2",
    "train.save_steps=2", "train.eval_steps=2",
]  # fmt: skip
PARTS = {"open": 128, "short": 128, "long": 512}
B200 = [
    *(f"train.phases.{name}.{key}" for name, length in PARTS.items() for key in (
        "max_steps=2", "gradient_accumulation_steps=1", f"sequence_length={length}",
        f"batch_tokens={2 * length}",
    )),
    "train.phases.answer.max_steps=2",
    "train.phases.answer.passage_sets_per_step=2",
    "train.phases.answer.rows_per_set=2",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v100x4"])
def test_the_config_of_a_machine_runs_at_a_toy_size(checkpoint, tmp_path, name):
    if name == "v100x4":
        pytest.importorskip("peft")
    train(tmp_path / "run", "--config", f"{name}.yaml", "--model", str(checkpoint), *TOY, *SFT)
    (_, last) = metrics_of(tmp_path / "run")
    assert last["exact_match"] >= 0 and last["tokens_per_second"] > last["supervised_tokens_per_second"] > 0
    model = Denoiser.from_pretrained(tmp_path / "run" / "model")
    assert model.config.evidence_layout == "independent"
    assert Tokenizer.from_pretrained(tmp_path / "run" / "model").mask_id == 256


@pytest.mark.slow
def test_learning_by_reward_on_a_machine_runs_at_a_toy_size(checkpoint, tmp_path):
    """A price on forwards: where nothing is answered, rollouts differ in nothing else."""
    small = [
        *(word for word in SFT if not any(part in word for part in ("_per_set", "passage_sets", "worlds"))),
        "train.prompts_per_step=4", "train.num_generations=4", "train.gradient_accumulation_steps=2",
        "train.forward_cost=0.01", "decode.max_new_tokens=32", "decode.commit_threshold=0.05",
    ]  # fmt: skip
    words = ["--config", "gb300_rl.yaml", "--model", str(checkpoint), *TOY, *small]
    train(tmp_path / "run", *words)
    (_, last) = metrics_of(tmp_path / "run")
    assert last["exact_match"] >= 0 and last["gradient_norm"] > 0
    assert {"rollout", "forward", "backward"} <= last["stage_seconds"].keys()
    assert Denoiser.from_pretrained(tmp_path / "run" / "model").config.evidence_layout == "independent"


@pytest.mark.slow
def test_the_phases_of_b200_run_at_a_toy_size_on_own_data(autoregressive_qwen, own_data, tmp_path):
    data = [
        f"data.documents.web={own_data}/web.jsonl", f"data.documents.quality={own_data}/quality.jsonl",
        f"data.questions={own_data}/questions.jsonl", f"data.corpus={own_data}/corpus.jsonl",
    ]  # fmt: skip
    train(
        tmp_path / "run", "--config", "b200.yaml", "--model", str(autoregressive_qwen),
        *(word for word in TOY if "world" not in word), *B200, *data,
    )  # fmt: skip
    lines = metrics_of(tmp_path / "run")
    assert [line["phase"] for line in lines[::2]] == ["open", "short", "long", "answer"]
    model = Denoiser.from_pretrained(tmp_path / "run" / "model")
    assert model.config.shifted and model.config.mask_token_id == 257
    assert model.config.max_position_embeddings == 513, "as long as the longest phase was"
