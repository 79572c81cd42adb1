"""CUDA without a card: each file of fake_cuda/ in a process of its own, with a guard before torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.paths import ROOT

HERE = ROOT / "tests" / "fake_cuda"
HOOKS = "ATen/detail/CUDAHooksInterface.h"


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    """What torch takes for a device, compiled for the torch that is installed."""
    headers = Path(torch.__file__).parent / "include"
    compiler = shutil.which("g++") or shutil.which("clang++")
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA of its own: fake tensors live there as they are")
    if compiler is None or not (headers / HOOKS).is_file():
        pytest.skip("the guard needs a C++ compiler (g++ or clang++) and torch's headers")
    made = tmp_path_factory.mktemp("guard") / "guard.so"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-I", headers, HERE / "guard.cpp", "-o", made]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.slow
@pytest.mark.parametrize("group", ["decode", "training", "processes"])
def test_on_a_device_that_is_not_there(guard, group):
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "FAKE_CUDA_GUARD": str(guard), "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    words = "-p tests.fake_cuda.load -p no:cacheprovider -q --tb=short -m".split()
    command = [sys.executable, "-m", "pytest", *words, "slow or not slow", str(HERE / f"{group}.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
