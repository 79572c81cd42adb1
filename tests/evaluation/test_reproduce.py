"""Stored results: run again, held against what they were, shown on a page."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from dlm_rag.commands import evaluate
from dlm_rag.errors import ConfigError
from dlm_rag.evaluation.metrics import Score
from dlm_rag.evaluation.stored_results import (
    build_rerun_table,
    list_stamp_changes,
    read_result,
    render_results_page,
)
from tests.support.evaluations import EVALUATED, make_evaluation_folder
from tests.support.passages import write_jsonl_file

COMPARED = ("--compare", "static,none")


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """A folder with a model, a corpus, three questions, and `old`, where two settings were compared."""
    folder = make_evaluation_folder(tmp_path_factory.mktemp("results"), 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        evaluate.main([*EVALUATED, "decode.max_new_tokens=8", "--out", "old", *COMPARED])
    return folder


@pytest.fixture
def here(stored, tmp_path, monkeypatch) -> Path:
    """A copy of it to work in; the screen is wide."""
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_another_place_of_the_corpus_leaves_the_model_to_the_result(here, capsys):
    Path("corpus.jsonl").rename("moved.jsonl")
    evaluate.main(["--reproduce", "old", "--out", "new", "--corpus", "moved.jsonl"])
    told = capsys.readouterr()
    assert "reader" not in told.err and "the same" in told.out
    assert "| none | 0.0 | 0.0 | +0.0 [-55, +55]" in Path("new/reproduced.md").read_text()


def test_the_same_run_gives_the_same_responses(here, capsys):
    evaluate.main(["--reproduce", "old", "--out", "new"])
    screen = capsys.readouterr().out
    assert screen.rstrip().endswith("code, versions, machine, files and settings are the same")
    table = Path("new/reproduced.md").read_text()
    for name in ("static", "none"):
        differences = "+0.0 [-55, +55] | +0.0 [-55, +55] | +0.00 [+0.00, +0.00]"
        assert f"| {name} | 0.0 | 0.0 | {differences} | 3 of 3 |" in table
    for name in ("answers.jsonl", "trace.jsonl"):
        old, new = (
            [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "steps")} for line in text]
            for text in ((Path(run) / "static" / name).read_text().splitlines() for run in ("old", "new"))
        )
        assert old == new
    assert [*json.loads(Path("new/scores.json").read_text())["settings"]] == ["static", "none"]
    evaluate.main(["--reproduce", "new/scores.json", "--out", "third"])  # a reproduction is a result too


def test_what_differs_is_said(here, capsys):
    """Other settings on top, another machine, another version, another commit."""
    stamp = Path("old/static/answers.jsonl.run.json")
    record = json.loads(Path("old/scores.json").read_text())
    then = record["settings"]["static"]["stamp"]
    then |= {"commit": "c0ffee", "device": "cuda: a GPU", "versions": then["versions"] | {"torch": "1.0"}}
    Path("old/scores.json").write_text(json.dumps(record))
    assert stamp.is_file()
    evaluate.main(["--reproduce", "old", "--out", "new", "decode.commit_threshold=0.01"])
    lines = [*capsys.readouterr().out.splitlines(), *Path("new/reproduced.md").read_text().splitlines()]
    now = json.loads(Path("new/scores.json").read_text())["settings"]["static"]["stamp"]
    for line in (
        f"commit: c0ffee then, {now['commit']} now",
        f"device: cuda: a GPU then, {now['device']} now",
        f"torch: 1.0 then, {now['versions']['torch']} now",
        "decode.commit_threshold: 0.9 then, 0.01 now",
    ):
        assert line in lines and f"- {line}" in lines
    assert "0.0 |" in next(line for line in lines if line.startswith("| none"))
    row = next(line for line in lines if line.startswith("| static"))
    assert row.split("|")[6].startswith(" -"), "fewer forwards at a threshold that all clear"


def test_a_word_that_allows_the_code_of_one_setting_changes_no_other(here, capsys, monkeypatch):
    Path("ruled_once.py").write_text(
        "def one(candidates, context):\n    return candidates.confidence.argmax(keepdims=True)\n"
    )
    monkeypatch.syspath_prepend(here)
    code = "decode.commit_rule=ruled_once:one"
    evaluate.main(
        [*EVALUATED, "decode.max_new_tokens=8", "--out", "ruled", "--compare", f"none,none+{code}"]
    )
    with pytest.raises(ConfigError, match=code):
        evaluate.main(["--reproduce", "ruled", "--out", "new"])
    evaluate.main(["--reproduce", "ruled", "--out", "new", code])
    assert capsys.readouterr().out.rstrip().endswith("files and settings are the same")
    stored = (
        yaml.safe_load(Path("new", name, "config.yaml").read_text()) for name in ("none", f"none+{code}")
    )
    assert [config["decode"]["commit_rule"] for config in stored] == [None, "ruled_once:one"]


def test_other_questions_are_not_compared(here):
    rows = [json.loads(line) for line in Path("q.jsonl").read_text().splitlines()]
    for changed in (rows[:2], [rows[0], rows[1], rows[2] | {"question": "Why?"}]):
        write_jsonl_file(Path("q.jsonl"), changed)
        with pytest.raises(ConfigError, match="static has not answered the . questions of the same run"):
            evaluate.main(["--reproduce", "old", "--out", "new"])
        assert not Path("new").exists()


def a_score(match: float, forwards: float) -> Score:
    return Score(match, match, None, None, forwards, 1.0, 8.0, 0.1, match)


def test_the_paired_difference_by_hand():
    """Right in 1 of 4 and then in 3 of 4: 50 points more; 2 forwards fewer in each question."""
    then, now = [a_score(m, 5) for m in (1, 0, 0, 0)], [a_score(m, 3) for m in (1, 1, 1, 0)]
    grid = build_rerun_table({"a": then}, {"a": now}, {"all": [0, 1, 2, 3]}, {"a": 1})
    assert grid.rows[0][:3] == ["a", "25.0", "75.0"]
    assert grid.rows[0][3].startswith("+50.0 [") and grid.rows[0][5:] == ["-2.00 [-2.00, -2.00]", "1 of 4"]


def test_stamps_that_are_the_same_differ_in_nothing():
    stamp = {"commit": "a", "versions": {"torch": "2"}, "answers_depend_on": {"model": "m"}, "date": "d"}
    assert list(list_stamp_changes(stamp, stamp | {"date": "later"})) == []
    other = {"commit": "a", "versions": {}, "answers_depend_on": {"model": "n", "new": 1}}
    assert list(list_stamp_changes(stamp, other)) == [
        "torch: 2 then, None now", "model: m then, n now", "new: None then, 1 now",
    ]  # fmt: skip


def test_a_page_has_the_day_the_command_and_every_setting(here, capsys, monkeypatch):
    record = json.loads(Path("old/scores.json").read_text())
    for n, setting in enumerate(record["settings"].values()):
        setting["stamp"]["date"] = f"2026-11-2{n}T00:00:00+00:00"
    Path("old/scores.json").write_text(json.dumps(record))
    from dlm_rag.evaluation import stored_results

    stored_results.main(["old", "old/scores.json"])
    text = capsys.readouterr().out
    assert text.startswith("# Results, 2026-11-21\n") and text.count("## old") == 2
    assert "    dlm-rag evaluate --model model" in text and "--compare static,none" in text
    assert text.count("| none | 0.0 [0, 62] | +0.0 [-55, +55] |") == 2 and "2026-11-20" in text
    assert render_results_page([read_result(Path("old"))]).rstrip() in text


def test_settings_are_kept_as_they_were_told(here):
    """What ships or is the checkpoint's own is not written out: another machine has it elsewhere."""
    from dlm_rag.config import load_config

    static = load_config("old/static/config.yaml")
    assert (static.decode.query_policy, static.model.path) == ("question", "model")
    assert static.compare is static.decode.block_length is static.out is None
    assert load_config("old/config.yaml").decode.query_policy == "proxy"


def test_no_name_in_a_result_leads_out_of_its_folder(here):
    """Nor into a folder beside that of --out, when it is run again."""
    record = json.loads(Path("old/scores.json").read_text())
    record["settings"][".."] = record["settings"].pop("static")
    Path("old/scores.json").write_text(json.dumps(record))
    shutil.copy("old/static/config.yaml", "config.yaml")
    with pytest.raises(ConfigError, match=r"scores\.json names '\.\.'"):
        evaluate.main(["--reproduce", "old", "--out", "new/run"])
    assert not Path("new").exists()
