"""A benchmark: every cell once, whatever fails or is stopped in between, and one table of all."""

import json
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlm_rag.commands import benchmark
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.evaluation.metrics import SCORE_METRICS

POLICIES = ["interleaved", "static"]


def write_benchmark(folder, **keys):
    path = folder / "b.yaml"
    path.write_text(json.dumps({"policies": POLICIES} | keys))
    return str(path)


class FakeEvaluate:
    """Stands for the processes: writes scores, fails where it is told to, and stops after `most` cells."""

    def __init__(self, fails=lambda words: False, most=10**9, lost=0.0):
        self.ran, self._fails, self._most, self._lost = Counter(), fails, most, lost

    def __call__(self, command, **_):
        if sum(self.ran.values()) == self._most:
            raise KeyboardInterrupt
        words = command[4:]
        self.ran[tuple(words)] += 1
        if self._fails(words):
            return SimpleNamespace(returncode=2, stderr="reading\nerror: no such model\n")
        out, settings = Path(words[words.index("--out") + 1]), {}
        for n, policy in enumerate(words[words.index("--compare") + 1].split(",")):
            share = {"mean": 0.5 + n / 4, "low": 0.4, "high": 0.9}
            shares = dict.fromkeys((*SCORE_METRICS, "tokens_per_forward"), share)
            shares |= {"failed": share | {"mean": self._lost}}
            energy = {"joules_per_answer": 2.0 - n} if "folder6" in words else None
            settings[policy] = {"groups": {"all": shares}, "stamp": {}, "energy": energy}
        less = {"static": {"all": {"exact_match": {"mean": -0.25, "low": -0.5, "high": 0.0}}}}
        record = {"questions": {"all": 10}, "settings": settings, "first_minus": less}
        (out / "scores.json").write_text(json.dumps(record))
        return SimpleNamespace(returncode=0, stderr="")


def run(monkeypatch, file, out, fake):
    monkeypatch.setattr(benchmark.subprocess, "run", fake)
    benchmark.main([file, "--out", str(out)])


def test_168_cells_are_run_once_each_whatever_fails_or_stops(tmp_path, monkeypatch, capsys):
    file = write_benchmark(
        tmp_path,
        models={f"m{n}": f"--model folder{n}" for n in range(7)},
        datasets={f"d{n}": f"questions={n}.jsonl" for n in range(6)},
        seeds=[0, 1, 2, 3], settings="limit=5",
    )  # fmt: skip
    first, second = (FakeEvaluate(lambda words: "folder3" in words, most) for most in (50, 10**9))
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, file, tmp_path / "out", first)
    with pytest.raises(RunError, match="24 of 168 cells failed"):
        run(monkeypatch, file, tmp_path / "out", second)
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.count("no such model") == 24 and table.count("| static |") == 144
    third = FakeEvaluate()
    run(monkeypatch, file, tmp_path / "out", third)
    assert len(third.ran) == 24 and all("folder3" in words for words in third.ran)
    done = Counter({w: n for w, n in (first.ran + second.ran).items() if "folder3" not in w}) + third.ran
    assert len(done) == 168 and {*done.values()} == {1}
    rows = [
        line.split(" | ")
        for line in (tmp_path / "out" / "table.md").read_text().splitlines()
        if line.startswith("| d")
    ][1:]
    assert len(rows) == 336 and rows[1][3] == "static" and rows[1][6] == "+25.0 [+0, +50]"
    fourth = FakeEvaluate()
    run(monkeypatch, file, tmp_path / "out", fourth)
    assert not fourth.ran
    joules = {(row[1], row[3]): row[-1] for row in rows}
    assert joules["m6", "static"] == "1 |" and joules["m6", "interleaved"] == "2 |"
    assert joules["m0", "static"] == "- |"


def test_other_words_run_a_cell_again_and_old_scores_are_not_theirs(tmp_path, monkeypatch):
    for settings, fails in (("limit=5", False), ("limit=6", True), ("limit=6", True), ("limit=6", False)):
        file = write_benchmark(tmp_path, models={"m": ""}, datasets={"d": ""}, settings=settings)
        fake = FakeEvaluate(lambda words, fails=fails: fails)
        with pytest.raises(RunError) if fails else nullcontext():
            run(monkeypatch, file, tmp_path / "out", fake)
        assert len(fake.ran) == 1
        assert ("| static |" in (tmp_path / "out" / "table.md").read_text()) != fails


@pytest.mark.parametrize(
    "data",
    [
        "--dataset=bamboogle",
        "questions=data/bamboogle/test.jsonl",
        "--config mine.yaml",
        "--config=mine.yaml",
    ],
)
def test_a_cell_whose_files_have_changed_runs_again(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    model, base = tmp_path / "model", tmp_path / "base"
    questions = tmp_path / "data" / "bamboogle" / "test.jsonl"
    for folder in (model, base, questions.parent):
        folder.mkdir(parents=True)
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    Path("mine.yaml").write_text(f"questions: {questions}\nengine: {{store: out}}\n")  # which cells write
    words = {"models": {"m": f"--model {model}"}, "datasets": {"d": data}}
    file = write_benchmark(tmp_path, settings=f"limit=5 ~nobody/x {'long' * 99}", **words)
    weights = base / "model.safetensors", model / "config.json"
    for changed, ran in (
        (questions, 1),
        (None, 0),
        *((each, 1) for each in (questions, *weights)),
        (None, 0),
    ):
        if changed is not None:
            changed.write_text("{}\n" * (changed.exists() + 1))
        fake = FakeEvaluate()
        run(monkeypatch, file, tmp_path / "out", fake)
        assert len(fake.ran) == ran


def test_questions_that_ended_in_an_error_are_named_and_asked_again(tmp_path, monkeypatch):
    file = write_benchmark(tmp_path, models={"m": ""}, datasets={"d": ""})
    for lost, ran in ((0.25, 1), (0.0, 1), (0.0, 0)):
        fake = FakeEvaluate(lost=lost)
        with pytest.raises(RunError) if lost else nullcontext():
            run(monkeypatch, file, tmp_path / "out", fake)
        table = (tmp_path / "out" / "table.md").read_text()
        assert len(fake.ran) == ran and "| static |" in table and ("25 % of the" in table) == bool(lost)


@pytest.mark.parametrize(
    "keys",
    [
        {"models": {"m": ""}},
        {"models": {}, "datasets": {"d": ""}},
        {"models": {"m": 3}, "datasets": {"d": ""}},
        {"models": {"../m": ""}, "datasets": {"d": ""}},
        {"models": {"m": ""}, "datasets": {"d": ""}, "modles": 1},
    ],
)  # fmt: skip
def test_what_is_no_benchmark_is_refused(tmp_path, keys):
    with pytest.raises(ConfigError):
        benchmark.main([write_benchmark(tmp_path, **keys), "--out", str(tmp_path / "out")])
    with pytest.raises(ConfigError, match="nearest: 'laptop.yaml'"):
        benchmark.main(["labtop", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"settings": "limit='5"}, "settings of the benchmark cannot be read: no closing quotation"),
        ({"settings": "limit=5\\"}, "settings of the benchmark cannot be read: no escaped character"),
        ({"models": {"ours": "--model \x1b[2Kfolder"}}, "models.ours of the benchmark has a line end or"),
        ({"datasets": {"d": 'questions="x'}}, "datasets.d of the benchmark cannot be read"),
        ({"seeds": list(range(20_000))}, "b.yaml has 20,000 cells, more than 10,000"),
    ],
    ids=["quote", "escape", "control character", "quote of a data set", "cells"],
)
def test_words_that_no_shell_would_take_are_refused(tmp_path, more, says):
    made = {"models": {"ours": "--model folder"}, "datasets": {"d": "--dataset hotpotqa"}}
    made |= {"policies": ["static"]}
    file = write_benchmark(tmp_path, **made | more)
    with pytest.raises(ConfigError, match=re.escape(says)):
        [*benchmark.list_cells(benchmark.read_benchmark(file), tmp_path / "out")]


def test_models_behind_a_server_get_their_policies(tmp_path, monkeypatch):
    url = "openai://127.0.0.1:8000/v1/Qwen/Qwen2.5-7B"
    monkeypatch.setenv("SET", "hotpotqa")
    file = write_benchmark(
        tmp_path,
        models={"ours": "--model folder", "theirs": url, "own": f"--model {url} remote.concurrency=4"},
        datasets={"d": "--dataset $SET --split search_r1"},
        policies=["interleaved", "static", "ircot+retrieval.top_k=3", "commit_threshold=0.8"],
        settings="limit=5 workers=auto decode.batch_size=16 remote.concurrency=9 --split search_r1 "
        "prompt=sardi",
    )
    cells = [*benchmark.list_cells(benchmark.read_benchmark(file), tmp_path / "out")]
    assert [cell.model for cell in cells] == ["ours", "theirs", "own"]
    ours, theirs, own = ([*cell.words[:-2], cell.words[-3]] for cell in cells)
    assert ours[-1] == "interleaved,static,commit_threshold=0.8"
    assert "decode.batch_size=16" in ours and "remote.concurrency=9" not in ours
    assert theirs[2:4] == ["--dataset", "hotpotqa"], "a variable of the environment"
    assert theirs[:2] == ["--model", url] and theirs[-1] == "static,ircot+retrieval.top_k=3"
    assert "decode.batch_size=16" not in theirs and "remote.concurrency=9" in theirs
    assert "workers=auto" in ours and "workers=auto" not in theirs and "prompt=sardi" in theirs
    assert not benchmark.is_for_kind("prompt=sardi", True, ["ircot+retrieval.top_k=3", "search_r1"])
    assert all(words.count("search_r1") == 2 for words in (ours, theirs, own)), "a word that is no policy"
    assert "remote.concurrency=4" in own
    only_ours = write_benchmark(tmp_path, models={"m": url}, datasets={"d": ""}, policies=["interleaved"])
    with pytest.raises(ConfigError, match="no policy of the benchmark is for the model 'm'"):
        benchmark.main([only_ours, "--out", str(tmp_path / "out")])


def test_those_that_ship_name_settings_that_exist():
    for path in benchmark.BENCHMARK_FOLDER.glob("*.yaml"):
        assert [*benchmark.list_cells(benchmark.read_benchmark(path.stem), Path("out"))]


@pytest.mark.slow
def test_laptop_runs_at_a_small_size(tmp_path):
    text = (benchmark.BENCHMARK_FOLDER / "laptop.yaml").read_text()
    file = tmp_path / "laptop.yaml"
    file.write_text(re.sub(r"limit=\d+", "limit=2", text))
    benchmark.main([str(file), "--out", str(tmp_path / "out")])
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| world")]
    assert len(rows) == 5 and all(row[4] == "2" and row[8] != "-" for row in rows)
