"""Sweeps: every combination once, weights and indexes read once, a front that nothing beats, kills."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlm_rag.commands import evaluate, prepare_decoder
from dlm_rag.commands.prepare_decoder import PreparedDecoder
from dlm_rag.evaluation.compare import expand_sweep, parse_compared_settings, parse_sweep
from dlm_rag.evaluation.metrics import SCORE_METRICS, Estimate
from dlm_rag.evaluation.tables import build_overview_table, compute_pareto_front, plot_pareto
from dlm_rag.model.denoiser import Denoiser
from tests.support.evaluations import EVALUATED, make_evaluation_folder
from tests.support.paths import ROOT
from tests.support.processes import wait_until

GRID = ("--sweep", "decode.commit_threshold=0.9,0.1", "retrieval.top_k=2,1")
NAMES = [f"decode.commit_threshold={tau}+retrieval.top_k={k}" for tau in (0.9, 0.1) for k in (2, 1)]
WORDS = (*EVALUATED, "decode.max_new_tokens=24")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_evaluation_folder(tmp_path_factory.mktemp("sweep"), 4)


def scores_of(folder: Path, *, timed: bool = True) -> dict:
    """What scores.json says of every setting, without what a clock or a stamp says unless `timed`."""
    record = json.loads((folder / "scores.json").read_text())
    settings = {name: setting["groups"] for name, setting in record["settings"].items()}
    if not timed:
        for groups in settings.values():
            for metrics in groups.values():
                del metrics["seconds"]
    return {"settings": settings, "first_minus": record["first_minus"]}


def test_every_combination_in_order():
    swept = parse_sweep(["decode.commit_threshold=0.9,0.7", "retrieval.method=bm25, dense,none"])
    found = expand_sweep({"": []}, swept)
    assert len(found) == 6 and list(found)[:2] == [
        "decode.commit_threshold=0.9+retrieval.method=bm25",
        "decode.commit_threshold=0.9+retrieval.method=dense",
    ]
    assert all("+".join(words) == name for name, words in found.items())
    compared = parse_compared_settings("static,interleaved")
    under = expand_sweep(compared, parse_sweep(["retrieval.top_k=7,3"]))
    assert under["static+retrieval.top_k=3"] == ["decode.query_policy=question", "retrieval.top_k=3"]
    assert len(under) == 4 and expand_sweep({"static": ["a"]}, {}) == {"static": ["a"]}


def metrics(match: float, seconds: float, forwards: float) -> dict:
    found = dict.fromkeys(SCORE_METRICS, Estimate(0.5, 0.4, 0.6)) | {"tokens_per_forward": None}
    for name, mean in {"exact_match": match, "seconds": seconds, "forwards": forwards}.items():
        found[name] = Estimate(mean, 0.9 * mean, 1.1 * mean)
    return found


def test_the_front_by_hand(tmp_path):
    """`slow` is as exact as `good` and slower; `quick` is worse and fastest; `bad` is beaten by both."""
    found = {
        "good": metrics(0.8, 0.2, 5), "slow": metrics(0.8, 0.4, 4), "quick": metrics(0.5, 0.1, 5),
        "bad": metrics(0.4, 0.3, 6), "twin": metrics(0.8, 0.2, 5),
    }  # fmt: skip
    assert compute_pareto_front(found, "answers/s") == ["quick", "good", "twin"]
    assert compute_pareto_front(found, "forwards") == ["slow"]
    less = {"slow": {"exact_match": Estimate(0.1, -0.05, 0.3)}}
    grid = build_overview_table(9, found, less)
    assert [row[-1] for row in grid.rows] == ["answers/s", "forwards", "answers/s", "-", "answers/s"]
    assert grid.rows[0][2] == "-" and grid.rows[1][2] == "-10.0 [-30, +5]", (
        "above the first: its sign turns"
    )
    assert grid.title == "All settings: 9 questions"
    named = build_overview_table(9, {"static+a.b=1": found["good"]}, {}, ["a.b"])
    assert named.rows[0][0] == "static, 1" and "a.b" in named.title
    plot_pareto(tmp_path / "pareto.png", found | {"none": found["good"] | {"exact_match": None}}, [])
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_is_each_setting_run_alone_with_weights_and_index_read_once(
    made, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(made)
    reads = {"weights": 0, "corpora": 0}

    def counted(name, function):
        def call(*words, **more):
            reads[name] += 1
            return function(*words, **more)

        return call

    monkeypatch.setattr(Denoiser, "from_pretrained", counted("weights", Denoiser.from_pretrained))
    monkeypatch.setattr(prepare_decoder, "open_corpus", counted("corpora", prepare_decoder.open_corpus))
    evaluate.main([*WORDS, "--out", str(tmp_path / "swept"), *GRID])
    assert reads == {"weights": 1, "corpora": 1}
    screen = capsys.readouterr().out
    assert "0.1, 1" in screen and "pareto.png" in screen and (tmp_path / "swept" / "pareto.png").is_file()
    swept = scores_of(tmp_path / "swept")
    assert list(swept["settings"]) == NAMES and list(swept["first_minus"]) == NAMES[1:]
    for name in NAMES[1:3]:
        alone = tmp_path / "alone" / name
        alone.mkdir(parents=True)
        evaluate.main([*WORDS, "--out", str(alone), *name.split("+")])
        (setting,) = scores_of(alone, timed=False)["settings"].values()
        assert setting == scores_of(tmp_path / "swept", timed=False)["settings"][name]
    tables = (tmp_path / "swept" / "scores.md").read_text()
    assert tables.startswith("**All settings, decode.commit_threshold, retrieval.top_k: 4 questions**")
    recall = [swept["settings"][name]["all"]["recall_last"]["mean"] for name in NAMES]
    assert recall[0] > recall[1], "two passages hold more than one"


def test_settings_of_other_weights_take_turns_only_once(made, tmp_path, monkeypatch):
    """The model changes fastest in the order of the table, and slowest in that of the work."""
    monkeypatch.chdir(made)
    read, load = [], PreparedDecoder.load

    def noted(self, denoiser=None):
        read.append(denoiser is None)
        return load(self, denoiser)

    monkeypatch.setattr(PreparedDecoder, "load", noted)
    words = ("--sweep", "retrieval.top_k=2,1", "model.evidence_layout=joint,prefix", "--limit", "1")
    evaluate.main([*WORDS, "--out", str(tmp_path / "out"), *words])
    assert read == [True, False, True, False]
    assert len(scores_of(tmp_path / "out")["settings"]) == 4


@pytest.mark.slow
def test_a_sweep_that_was_killed_gives_the_table_of_one_that_was_not(tmp_path):
    """2 settings, 8 questions; the kill comes in the second setting, without a warning."""
    make_evaluation_folder(tmp_path, 8)
    grid = ("--sweep", "retrieval.top_k=2,1")
    start = [sys.executable, str(ROOT / "evaluate.py"), *WORDS, *grid, "decode.batch_size=2", "--out"]
    given = {**os.environ, "PYTHONPATH": str(ROOT)}

    def answered() -> int:
        files = (tmp_path / "killed").glob("*/answers.jsonl")
        return sum(file.read_bytes().count(b"\n") for file in files)

    whole = subprocess.run([*start, "whole"], cwd=tmp_path, env=given, capture_output=True)
    assert whole.returncode == 0, whole.stderr.decode()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*start, "killed"], cwd=tmp_path, env=given, **quiet)
    wait_until(lambda: answered() >= 9, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and 9 <= answered() < 16
    last = subprocess.run([*start, "killed"], cwd=tmp_path, env=given, capture_output=True)
    assert last.returncode == 0 and b"questions are answered already" in last.stderr
    assert scores_of(tmp_path / "killed", timed=False) == scores_of(tmp_path / "whole", timed=False)
