"""The report: what it cites is in the result store, tests that it names exist, its prose has no figure."""

import os
import re
import subprocess
import sys

import pytest

from report.store import find_cell, find_entry, find_estimate
from tests.support.paths import ROOT

TEXT = (ROOT / "report/report.typ").read_text()
ENTRIES = dict(re.findall(r'^#let ([\w-]+) = entry\(("[^"]+", "[^"]+")\)$', TEXT, re.MULTILINE))
KEYS = r'"[^"]*"|\((?:"[^"]*",? ?)+\)'
CELLS = sorted(set(re.findall(rf'(?:cell|mean|second)\(([\w-]+), ({KEYS}), "([^"]+)"\)', TEXT)))
SIZES_AND_SETTINGS = {
    "0.9",
    "0.1",
    "0.01",
    "1.7",
    "2.3",
    "8.8",
}  # of models in millions, thresholds and prices


def entry_called(name):
    page, title = re.findall(r'"([^"]+)"', ENTRIES[name])
    return find_entry(page, title)


def test_every_entry_is_read_shown_and_in_the_list_of_sources():
    assert len(ENTRIES) > 30
    shown = TEXT[TEXT.index("#sources(") :]
    for name in ENTRIES:
        assert entry_called(name)["rows"]
        assert len(re.findall(rf"(?<![\w-]){name}(?![\w-])", TEXT)) >= 3, f"{name} is read and not shown"
        assert re.search(rf"(?<![\w-]){name},", shown), f"{name} is not among the sources"


@pytest.mark.parametrize(("name", "keys", "column"), CELLS, ids=lambda value: value)
def test_every_cell_that_is_cited_is_in_the_store(name, keys, column):
    assert find_cell(entry_called(name), tuple(re.findall(r'"([^"]*)"', keys)), column)


def test_words_that_are_quoted_stand_in_the_store():
    quoted = re.findall(r'#q\(([\w-]+), "([^"]+)"\)', TEXT)
    assert quoted
    for name, words in quoted:
        entry = entry_called(name)
        assert words in entry["what"] + entry.get("notes", ""), (name, words)


def test_the_prose_has_no_measured_number_of_its_own():
    prose = re.sub(r"`[^`]*`|\$[^$]*\$|\"[^\"]*\"|//.*", "", TEXT[TEXT.index("*Abstract.*") :])
    prose = re.sub(r"\b\d+(\.\d+)?(?:em|pt|cm|%\))", "", prose)
    assert set(re.findall(r"(?<![\w.])\d+\.\d+", prose)) <= SIZES_AND_SETTINGS


def test_tests_that_are_named_exist():
    named = set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", TEXT))
    assert len(named) >= 12
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_a_cell_is_found_by_its_beginning_and_a_wrong_one_is_an_error():
    entry = {
        "title": "T",
        "columns": ["a", "b", "c"],
        "rows": [["0.1", "3", "-1.5 [-2, 3]"], ["0", "3", "4"], ["0", "3, too", "5"]],
    }
    assert find_cell(entry, ("0", "3"), "c") == "4"
    assert find_estimate(entry, "0.1", "c") == (-1.5, -2, 3)
    for keys, column in ((("0",), "c"), ("1", "c"), ("0.1", "d")):
        with pytest.raises(KeyError):
            find_cell(entry, keys, column)
    with pytest.raises(KeyError):
        find_entry("world", "No such title")


@pytest.mark.slow
def test_figures_are_the_same_bytes_again(tmp_path):
    from report.figures import FIGURES, draw_all

    for folder in ("one", "two"):
        draw_all(tmp_path / folder)
    for name in FIGURES:
        first, second = ((tmp_path / folder / f"{name}.svg").read_bytes() for folder in ("one", "two"))
        assert first == second and b"<path" in first
    assert set(re.findall(r"build/(\w+)\.svg", TEXT)) == set(FIGURES)


@pytest.mark.slow
def test_the_report_is_built_from_the_store():
    pytest.importorskip("typst")
    from report.build import build

    pages = build(None, format="png", ppi=20.0)
    assert 8 <= len(pages) <= 13
    assert build(None)[:5] == b"%PDF-"


@pytest.mark.slow
def test_every_command_of_reproduce_runs_at_a_tiny_size(tmp_path):
    env = os.environ | {"OUT": str(tmp_path / "runs"), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "report/reproduce.sh", "--quick"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_reproduce_takes_less_than_six_hours_by_its_recorded_times():
    minutes, repeats = 0, [1]
    for line in (ROOT / "report/reproduce.sh").read_text().splitlines():
        if loop := re.match(r"for \w+ in (.+); do", line):
            repeats.append(repeats[-1] * len(loop[1].split()))
        elif line == "done":
            repeats.pop()
        elif command := re.match(r"\s*(?:\$quick \|\| )?run (\d+) ", line):
            minutes += int(command[1]) * repeats[-1]
    assert 60 < minutes < 360
    assert f"they add up to {minutes}." in (ROOT / "report/reproduce.sh").read_text()
