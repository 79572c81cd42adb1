"""Where our Triton kernel runs: on a GPU, or on a CPU in Triton's interpreter.

Triton looks at the variable when it is first imported, which torch may do long before: a process of its own
has to be started with it, `TRITON_INTERPRET=1 pytest tests/model/test_indexed_attention.py`.
"""

import os

import pytest
import torch


def require_kernel() -> None:
    """Skips the module where the kernel cannot run."""
    if not torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("set TRITON_INTERPRET=1, in a process for these tests alone", allow_module_level=True)
    pytest.importorskip("triton", reason="it comes with torch's CUDA builds; on a CPU: pip install triton")
