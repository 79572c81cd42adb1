"""Waiting for processes, and how they are started."""

import sys
import time
from pathlib import Path

RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-all-tests-in-this-process"}


def count_lines(path: Path) -> int:
    """How many there are so far. A program may make a file and take it away to see whether it can."""
    try:
        return path.read_text(encoding="utf-8").count("\n")
    except FileNotFoundError:
        return 0


def wait_until(holds, process=None, seconds=300):
    """Waits for what a thread or `process` does; fails once that has ended, or after ample time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"it did not come to hold within {seconds} s"
        time.sleep(0.005)


TORCHRUN_COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
