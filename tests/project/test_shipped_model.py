"""What comes with the package: a world, and a model that answers about it by reading."""

import json
import subprocess
import sys
from statistics import fmean

import pytest
from safetensors import safe_open

from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER
from dlm_rag.config import DecodeConfig
from dlm_rag.data.synthetic_world import write_world
from dlm_rag.evaluation.metrics import score_rollout
from dlm_rag.questions import read_questions
from tests.support.paths import ROOT

MODEL, WHOLE, WORLD = SHIPPED_FOLDER / "model", SHIPPED_FOLDER / "whole", SHIPPED_FOLDER / "world"


def test_the_shipped_world_is_what_its_seed_makes(tmp_path):
    write_world(tmp_path, seed=7, split="test", passages=2000, per_hop=100)
    for name in ("corpus.jsonl", "questions.jsonl"):
        assert (tmp_path / name).read_bytes() == (WORLD / name).read_bytes()


@pytest.mark.parametrize(("folder", "config"), [(MODEL, "world_blocks.yaml"), (WHOLE, "world.yaml")])
def test_the_shipped_models_are_small_and_say_where_they_come_from(folder, config):
    assert sum(path.stat().st_size for path in SHIPPED_FOLDER.glob("*/*.safetensors")) < 40e6
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    card = json.loads((folder / "training.json").read_text())
    assert card["commit"] and "dirty" not in card["commit"]
    assert f"train.py --config {config}" in card["command"]
    assert json.loads((folder / "config.json").read_text())["evidence_layout"] == "independent"


@pytest.fixture(scope="module")
def questions():
    asked = read_questions(WORLD / "questions.jsonl")
    return [question for question in asked if question.hops == 2 and not question.labels][:20]


def exact_match(questions, query):
    denoiser, tokenizer = Denoiser.from_pretrained(MODEL), Tokenizer.from_pretrained(MODEL)
    config = DecodeConfig(query_policy=query, batch_size=20)
    rollouts = Decoder(denoiser, load_retriever(WORLD / "corpus.jsonl"), tokenizer, config).decode(
        questions
    )
    return fmean(score_rollout(r, q).exact_match for r, q in zip(rollouts, questions, strict=True))


def test_retrieving_while_denoising_is_what_makes_the_answers_right(questions):
    """20 questions of two hops, about words that training never saw, in wordings that it did."""
    interleaved, static = exact_match(questions, "proxy"), exact_match(questions, "question")
    assert interleaved >= 0.7 and static <= 0.15


@pytest.mark.slow
def test_sample_without_arguments_answers():
    done = subprocess.run([sys.executable, "sample.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 8 and all(answer["citations"] for answer in answers)
    silent = {answer["id"] for answer in answers if answer.get("abstained")}
    assert silent == {"q300"}, "which is answered with decode.blocks_at_once=1, at more forwards"
    assert all(bool(answer["answer"]) == (answer["id"] not in silent) for answer in answers)
