"""The plan of a benchmark: what was measured, else what shapes say; and what cannot be run, beforehand."""

import socket

import pytest

from dlm_rag.commands import benchmark
from dlm_rag.commands.benchmark_plan import plan_cell
from dlm_rag.errors import ConfigError
from dlm_rag.files.hub import SHIPPED_FOLDER
from dlm_rag.model.quantize import count_weight_bytes
from dlm_rag.training.planning.gpu_specs import GPU_SPECS
from dlm_rag.training.planning.known_checkpoints import KNOWN_CHECKPOINTS, read_known_config
from tests.commands.test_benchmark import write_benchmark

FLASH = "inclusionAI/LLaDA2.0-flash"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """In an empty folder, without a network."""

    def refuse(*_, **__):
        raise AssertionError("a plan asks the network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def plan(file, out, machine):
    cells = [*benchmark.list_cells(benchmark.read_benchmark(file), out)]
    return {cell: plan_cell(cell, GPU_SPECS[machine]) for cell in cells}


def test_what_cannot_be_run_is_named_and_the_others_are_planned(tmp_path):
    models = {
        "fits": "--model GSAI-ML/LLaDA-8B-Instruct", "large": f"--model {FLASH}",
        "unknown": "--model no/such", "typo": "decode.comit_threshold=0.5",
        "served": "--model openai://localhost:9/v1/it",
    }  # fmt: skip
    world = SHIPPED_FOLDER / "world"
    words = f"questions={world / 'questions.jsonl'} --corpus {world / 'corpus.jsonl'} limit=3"
    file = write_benchmark(tmp_path, models=models, datasets={"d": words}, precisions=["int8"])
    plans = {cell.model: found for cell, found in plan(file, tmp_path / "out", "h100").items()}
    assert not plans["fits"].problem and plans["fits"].seconds > 0
    assert " are there" in plans["large"].problem and plans["large"].memory > GPU_SPECS["h100"].memory
    assert "no/such" in plans["unknown"].problem and "commit_threshold" in plans["typo"].problem
    assert plans["fits"].questions == plans["served"].questions == 3
    assert plans["served"].memory is plans["served"].seconds is None, "whose machine is not known"
    assert plans["unknown"].seconds is None


def test_the_plan_of_all_cells_runs_nothing(tmp_path, capsys):
    file = write_benchmark(tmp_path, models={"m": ""}, datasets={"d": "limit=5"})
    benchmark.main([file, "--out", str(tmp_path / "out"), "--plan", "--machine", "h100"])
    said = capsys.readouterr().out
    assert "all that are left" in said and "kWh" in said and not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="add --machine"):
        benchmark.main([file, "--out", str(tmp_path / "out"), "--plan"])


def test_shapes_that_are_known_weigh_what_is_published():
    """Bytes of the safetensors in bfloat16 on the hub, to their two or three digits."""
    published = {"JetLM/SDAR-8B-Chat": 16.4e9, "GSAI-ML/LLaDA-8B-Instruct": 16.0e9}
    for path, size in published.items():
        assert count_weight_bytes(read_known_config(path), 2) == pytest.approx(size, rel=0.01)
    assert (
        KNOWN_CHECKPOINTS["pauljngr/sardi-dream-7b"] == KNOWN_CHECKPOINTS["Dream-org/Dream-v0-Instruct-7B"]
    )
