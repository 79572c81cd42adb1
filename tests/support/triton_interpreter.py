"""Our kernel in Triton's interpreter, which runs it on a CPU; on a GPU it is compiled."""

import os

import pytest
import torch


def interpret_kernel() -> None:
    """Imports the kernel; skips the module where Triton is missing.

    Triton looks at the variable when it is imported. It must not stay: child processes would see it.
    """
    interprets = not torch.cuda.is_available()
    if interprets:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        pytest.importorskip(
            "triton", reason="it comes with torch's CUDA builds; on a CPU: pip install triton"
        )
        import dlm_rag.model.indexed_attention  # noqa: F401
    finally:
        if interprets:
            del os.environ["TRITON_INTERPRET"]
