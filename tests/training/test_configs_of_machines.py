"""The configs of real machines shrunk to a toy size."""

import json

import pytest

from dlm_rag import Denoiser, Tokenizer
from dlm_rag.commands import train as train_command
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser
from tests.support.training_data import write_own_data


def train(folder, *words):
    train_command.main(["--out", str(folder), *words])


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny public-style denoiser, which names no evidence layout."""
    folder = tmp_path / "checkpoint"
    tiny_denoiser(max_position_embeddings=512).save_pretrained(folder, eos_token_id=257)
    raw = json.loads((folder / "config.json").read_text())
    del raw["evidence_layout"]
    (folder / "config.json").write_text(json.dumps(raw))
    byte_tokenizer().save_pretrained(folder)
    return folder


TOY = [
    "model.device=cpu", "train.dtype=float32", "decode.max_new_tokens=64", "retrieval.top_k=2",
    "train.passage_length=96", "train.world_passages=100", "train.eval_questions=1",
]  # fmt: skip
SFT = [
    "train.max_steps=2", "train.passage_sets_per_step=4", "train.rows_per_set=2",
    "train.save_steps=2", "train.eval_steps=2",
]  # fmt: skip


@pytest.mark.slow
def test_the_config_of_a_machine_runs_at_a_toy_size(checkpoint, tmp_path):
    pytest.importorskip("peft")
    train(tmp_path / "run", "--config", "v100x4.yaml", "--model", str(checkpoint), *TOY, *SFT)
    (_, last) = metrics_of(tmp_path / "run")
    assert last["exact_match"] >= 0 and last["tokens_per_second"] > last["supervised_tokens_per_second"] > 0
    model = Denoiser.from_pretrained(tmp_path / "run" / "model")
    assert model.config.evidence_layout == "independent"
    assert Tokenizer.from_pretrained(tmp_path / "run" / "model").mask_id == 256


@pytest.mark.slow
def test_learning_by_reward_on_a_machine_runs_at_a_toy_size(checkpoint, tmp_path):
    """By their forwards: where nothing is answered, rollouts differ in nothing else."""
    small = [
        *(word for word in SFT if not any(part in word for part in ("_per_set", "passage_sets", "worlds"))),
        "train.prompts_per_step=4", "train.num_generations=4", "train.gradient_accumulation_steps=2",
        "train.reward=forwards", "decode.max_new_tokens=32", "decode.commit_threshold=0.05",
    ]  # fmt: skip
    words = ["--config", "gb300_rl.yaml", "--model", str(checkpoint), *TOY, *small]
    train(tmp_path / "run", *words)
    (_, last) = metrics_of(tmp_path / "run")
    assert last["exact_match"] >= 0 and last["gradient_norm"] > 0
    assert {"rollout", "forward", "backward"} <= last["stage_seconds"].keys()
    assert Denoiser.from_pretrained(tmp_path / "run" / "model").config.evidence_layout == "independent"


@pytest.mark.slow
def test_an_autoregressive_model_becomes_a_denoiser_that_learns_to_answer(autoregressive_qwen, tmp_path):
    """As the head of b200.yaml says, at a toy size, on data of one's own."""
    data = write_own_data(tmp_path)
    small = ["train.max_steps=2", "train.gradient_accumulation_steps=1", "train.sequence_length=128"]
    words = ["--config", "b200.yaml", *small, "train.batch_tokens=256", f"data.documents={data}/web.jsonl"]
    train(
        tmp_path / "run", "--model", str(autoregressive_qwen), *words, *TOY[:2], "decode.max_new_tokens=64"
    )
    model = Denoiser.from_pretrained(tmp_path / "run" / "model")
    assert model.config.shifted and model.config.mask_token_id == 257
    (tmp_path / "short.json").write_text('{"head": "{question}", "fact": "{passage}"}')
    answers = [f"data.questions={data}/questions.jsonl", f"data.corpus={data}/corpus.jsonl"]
    answers += [f"prompt={tmp_path}/short.json"]
    words = [*(word for word in (*TOY, *SFT) if "world" not in word), *answers]
    train(tmp_path / "next", "--config", "gb300.yaml", "--model", str(tmp_path / "run" / "model"), *words)
    (_, last) = metrics_of(tmp_path / "next")
    assert last["loss"] > 0 and last["exact_match"] >= 0
