"""The report: what it cites is found, tests that it names exist, it is made again alike."""

import os
import re
import subprocess
import sys

import pytest

from report.store import find_cell, find_entry, find_estimate
from tests.support.paths import ROOT

TEXT = (ROOT / "report/report.typ").read_text()


def test_tests_that_are_named_exist():
    for path, name in set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", TEXT)):
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


READER = """
import os, sys
words = sys.argv[1:]
if words[1] == "torch.distributed.run":
    words = words[4:]
if words[0] in ("evaluate.py", "train.py"):
    words.append("--print-config")
elif words[0].startswith("profiling/"):
    words[1:] = ["--help"]
os.execv(sys.executable, [sys.executable, *words])
"""


@pytest.mark.slow
def test_every_command_of_reproduce_is_understood(tmp_path):
    """In place of Python a program that reads the settings of each and does no more; worlds are written."""
    reader = tmp_path / "reader.py"
    reader.write_text(READER)
    env = os.environ | {"OUT": str(tmp_path / "runs"), "PYTHON": f"{sys.executable} {reader}"}
    done = subprocess.run(
        ["bash", "report/reproduce.sh", "--quick"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
