"""The plan of a benchmark: what was measured, else what shapes say; and what cannot be run, beforehand."""

import socket

import pytest

from dlm_rag.commands import benchmark, benchmark_plan
from dlm_rag.commands.benchmark_plan import Cost, measure_done, plan_cell
from dlm_rag.files.hub import SHIPPED_FOLDER
from dlm_rag.model.quantize import count_weight_bytes
from dlm_rag.training.planning.gpu_specs import GPU_SPECS
from dlm_rag.training.planning.known_checkpoints import KNOWN_CHECKPOINTS, read_known_config
from tests.commands.test_benchmark import FakeEvaluate, run, write_benchmark

FLASH = "inclusionAI/LLaDA2.0-flash"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """In an empty folder, without a network."""

    def refuse(*_, **__):
        raise AssertionError("a plan asks the network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    benchmark_plan.open_planned_words.cache_clear()


def plan(file, out, machine):
    cells = [*benchmark.list_cells(benchmark.read_benchmark(file), out)]
    spec, measured = GPU_SPECS.get(machine), measure_done([cell for cell in cells if cell.is_done])
    return {cell: plan_cell(cell, spec, measured, not machine) for cell in cells}


@pytest.mark.slow
def test_the_families_of_the_paper_are_planned_without_data_network_or_weights(tmp_path, capsys):
    plans = plan("paper", tmp_path / "out", "h100")
    assert len({cell.model for cell in plans}) == 8 and len(plans) == 40
    for cell, found in plans.items():
        assert found.source == "estimated" and found.joules > 0
        assert found.problem.startswith("data/wiki-18.jsonl.gz is not there"), "and it fits"
        alike = next(p for c, p in plans.items() if (c.model, c.dataset) == (cell.model, "nq"))
        assert found.seconds / found.questions == pytest.approx(alike.seconds / alike.questions)
    assert {found.questions for found in plans.values()} == {7405, 12_576, 2417, 125, 3610}
    benchmark.main(["paper", "--out", str(tmp_path / "out"), "--plan", "--machine", "h100"])
    said = capsys.readouterr().out
    assert "brings it" in said and "forwards" in said and "40 of 40" in said
    assert not (tmp_path / "out").exists()


def test_what_was_measured_counts_before_any_estimate(tmp_path, monkeypatch):
    file = write_benchmark(
        tmp_path, models={"m": ""}, datasets={"a": "limit=5", "b": "limit=7"}, precisions=["none", "int8"]
    )
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, file, tmp_path / "out", FakeEvaluate(most=2))
    plans = {
        (cell.dataset, cell.precision): found for cell, found in plan(file, tmp_path / "out", "").items()
    }
    none, int8 = plans["b", "none"], plans["b", "int8"]
    assert none.questions == 7 and none.source == int8.source == "measured"
    assert none.seconds == int8.seconds == pytest.approx(7 * (0.5 + 0.75))
    assert int8.joules == pytest.approx(7 * (2 + 1)) and none.joules is None
    assert 0 < int8.memory < none.memory
    other = {(c.dataset, c.precision): p for c, p in plan(file, tmp_path / "out", "gb10").items()}
    assert other["b", "none"].source == "estimated"
    cost = Cost(None, 2.0, None)
    (cell,) = (c for c in plan(file, tmp_path / "out", "") if (c.dataset, c.precision) == ("b", "none"))
    twice, once = (
        plan_cell(
            cell,
            GPU_SPECS["gb10"],
            {("m", "none", p): cost._replace(forwards=n) for p in ("interleaved", "static")},
            False,
        )
        for n in (2.0, 1.0)
    )
    assert twice.seconds == pytest.approx(2 * once.seconds), "as many forwards as were measured"


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
    assert " of " in plans["large"].problem and plans["large"].memory > GPU_SPECS["h100"].memory
    assert "no/such" in plans["unknown"].problem and "commit_threshold" in plans["typo"].problem
    assert plans["served"].memory is plans["served"].seconds is None, "whose machine is not known"
    assert plans["unknown"].seconds is None


def test_shapes_that_are_known_weigh_what_is_published():
    """Bytes of the safetensors in bfloat16 on the hub, to their two or three digits."""
    published = {"JetLM/SDAR-8B-Chat": 16.4e9, "GSAI-ML/LLaDA-8B-Instruct": 16.0e9}
    for path, size in published.items():
        assert count_weight_bytes(read_known_config(path), 2) == pytest.approx(size, rel=0.01)
    assert (
        KNOWN_CHECKPOINTS["pauljngr/sardi-dream-7b"] == KNOWN_CHECKPOINTS["Dream-org/Dream-v0-Instruct-7B"]
    )
