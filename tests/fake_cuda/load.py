"""Loads the guard (guard.cpp) before torch: a pytest plugin, given with `-p tests.fake_cuda.load`."""

import ctypes
import os
import sys
from importlib.util import find_spec
from pathlib import Path

assert "torch" not in sys.modules, "torch looks for CUDA once, when it is imported"
(_torch,) = find_spec("torch").submodule_search_locations
for _path in (Path(_torch, "lib", "libtorch_cpu.so"), os.environ["FAKE_CUDA_GUARD"]):
    ctypes.CDLL(str(_path), ctypes.RTLD_GLOBAL)
