"""The benchmarks run, and what must be equal in them is equal. No timing is looked at."""

import importlib
import json
import subprocess
import sys

import pytest

from dlm_rag.cli import run_program
from dlm_rag.errors import ConfigError
from tests.support.passages import write_jsonl_file
from tests.support.paths import ROOT


def run_benchmark(name, *words):
    command = [sys.executable, str(ROOT / "profiling" / f"{name}.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_exact_mechanism_gives_the_tokens_of_the_reference(tmp_path):
    run_benchmark("bench_decode", "--out", tmp_path, "--limit", 3, "--rounds", 1, "decode.batch_size=2")
    found = json.loads((tmp_path / "scores.json").read_text())["settings"]
    assert [line["same tokens"] for line in found if line["exact"]] == [3] * 7
    by_name = {line["setting"]: line for line in found}
    plain, pooled = by_name["+ masked positions only"], by_name["+ evidence pool"]
    assert by_name["batch, store filled"]["reused %"] == 100
    assert pooled["reused %"] > 50 and pooled["tokens run"] < plain["tokens run"] / 2
    assert (tmp_path / "picture.png").stat().st_size > 10_000 and (tmp_path / "table.md").exists()


@pytest.mark.slow
def test_search_by_url_gives_the_answers_of_a_local_search():
    assert run_benchmark("bench_retrieval", "remote", "--limit", 6, "--rounds", 1).count("6 of 6") == 4


def test_recall_leaves_out_questions_without_an_answer(tmp_path, monkeypatch, capsys, corpus_file):
    monkeypatch.syspath_prepend(str(ROOT / "profiling"))
    chains = {"who": {"answerable": False, "chain": ["Dune."]}, "Who wrote Emma?": {"chain": ["Austen."]}}
    rows = [{"id": text, "question": text, "supporting_ids": ["emma"], **more}
            for text, more in chains.items()]  # fmt: skip
    asked = str(write_jsonl_file(tmp_path / "q.jsonl", rows))
    words = ["--questions", asked, "--corpus", str(corpus_file), "--kinds", "bm25"]
    importlib.import_module("bench_retrieval").measure_recall(words)
    shown = capsys.readouterr().out
    assert "1 questions" in shown and "with chain, one long query" in shown


def test_more_other_questions_than_a_file_has_are_refused(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "profiling"))
    words = ["--out", str(tmp_path / "out"), "--limit", "80", "--before", "100"]
    with pytest.raises(ConfigError, match="take 500 questions, and there are 400"):
        importlib.import_module("bench_decode").main(words)


def test_every_program_has_help_and_answers_bad_words_in_a_sentence(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "profiling"))
    programs = [
        path for path in (ROOT / "profiling").glob("*.py") if "run_program(main)" in path.read_text()
    ]
    assert programs
    for path in programs:
        program = importlib.import_module(path.stem)
        for words, code in ((["--help"], 0), (["--nonsense", "x"], 2)):
            monkeypatch.setattr(sys, "argv", [path.name, *words])
            with pytest.raises(SystemExit) as stop:
                run_program(program.main)
            printed = capsys.readouterr()
            assert stop.value.code == code, path
            if code:
                assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
            else:
                assert (
                    printed.out.startswith("usage: ") and program.__doc__.partition("\n")[0] in printed.out
                )
