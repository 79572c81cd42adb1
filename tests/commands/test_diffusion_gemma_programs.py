"""DiffusionGemma under the programs: comparisons, workers."""

import json
import sys
from importlib.util import find_spec
from unittest.mock import patch

import pytest

from dlm_rag.cli import run_program
from dlm_rag.commands import evaluate, sample
from dlm_rag.decode.trace_file import read_trace
from tests.support.passages import write_jsonl_file
from tests.support.rollouts import strip_times_and_confidences
from tests.support.serving import GEMMA_SETTINGS
from tests.support.tiny_diffusion_gemma import write_tiny_gemma

WORDS = ["--model", "gemma", "--corpus", "corpus.jsonl", "retrieval.top_k=2", "energy=none"]
WORDS += [f"decode.{name}={value}" for name, value in GEMMA_SETTINGS.items()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_gemma(tmp_path_factory.mktemp("served") / "gemma", t_min=1e-3, t_max=0.5)


@pytest.fixture
def folder(tmp_path, tiny, corpus_file, monkeypatch):
    """Where the programs run."""
    (tmp_path / "gemma").symlink_to(tiny)
    rows = [
        {"id": f"n{n}", "question": f"Who wrote book number {n}?", "golden_answers": ["Jane Austen"]}
        for n in range(6)
    ]
    write_jsonl_file(tmp_path / "q.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def called(program, *words):
    """Runs a program here with the tiny model: its exit code."""
    with (
        patch.object(sys, "argv", ["dlm-rag", *WORDS, "--questions", "q.jsonl", *words]),
        pytest.raises(SystemExit) as stop,
    ):
        run_program(program.main)
    return stop.value.code


def timeless(path):
    return [
        {k: v for k, v in json.loads(line).items() if k not in ("seconds", "steps")}
        for line in path.read_text().splitlines()
    ]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'dlm_rag[workers]'")
def test_workers_answer_as_one_process_does(folder, ray_token, capsys):
    words = ("--out", "a.jsonl", "--trace", "t.jsonl")
    assert called(sample, *words) == 0
    others = tuple(word.replace(".jsonl", "-w.jsonl") for word in words)
    assert called(sample, *others, "workers=2") == 0
    one, other = (
        {rollout.id: strip_times_and_confidences(rollout) for rollout in read_trace(folder / name)}
        for name in ("t.jsonl", "t-w.jsonl")
    )
    assert other == one and len(one) == 6
    assert "2 workers" in capsys.readouterr().err
    assert called(evaluate, "--out", "runs", "--compare", "interleaved,static", "workers=2") == 0
    settings = json.loads((folder / "runs" / "scores.json").read_text())["settings"]
    searches = {name: found["groups"]["all"]["searches"]["mean"] for name, found in settings.items()}
    assert searches["static"] == 1 < searches["interleaved"]
    record = {line["id"]: line for line in timeless(folder / "runs" / "interleaved" / "answers.jsonl")}
    assert {name: line["response"] for name, line in record.items()} == {
        name: rollout.response for name, rollout in one.items()
    }
