"""Style, types and imports are tests like any other, so one command says whether all is well."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import dlm_rag
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    "command", ["ruff check .", "ruff format --check .", "mypy --no-error-summary"], ids=str.split
)
def test_tool_finds_nothing(command):
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", sorted(m.name for m in pkgutil.walk_packages(dlm_rag.__path__, prefix="dlm_rag."))
)
def test_every_module_imports_without_gpu_or_network(name):
    importlib.import_module(name)


@pytest.mark.parametrize(
    ("start", "name"),
    [("runpy.run_path('sample.py', run_name='__main__')", "sample.py"),
     ("sys.argv.insert(1, 'sample'); runpy.run_module('dlm_rag', run_name='__main__')", "dlm-rag sample")],
)  # fmt: skip
def test_help_does_not_wait_for_heavy_packages(start, name):
    """`sample.py --help` answers in a second because none of these is imported for it."""
    code = (
        "import sys, runpy\n"
        "sys.argv = ['sample.py', '--help']\n"
        f"try: {start}\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'torch', 'transformers', 'sentence_transformers', 'bm25s', 'numba'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {name} [-h]") and "--corpus" in done.stdout


def test_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Denoisr"):
        _ = dlm_rag.Denoisr
