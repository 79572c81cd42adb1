"""Importing: every module without a GPU or a network, and nothing heavy before it is needed."""

import importlib
import pkgutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

import dlm_rag
from tests.support.paths import ROOT


def test_every_module_imports_without_gpu_or_network():
    needs = {"dlm_rag.model.indexed_attention": "triton", "dlm_rag.evaluation.harness": "lm_eval"}
    for module in pkgutil.walk_packages(dlm_rag.__path__, prefix="dlm_rag."):
        if module.name not in needs or find_spec(needs[module.name]):
            importlib.import_module(module.name)


@pytest.mark.slow
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
