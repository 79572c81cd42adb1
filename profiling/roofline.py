"""What the device could do at best, measured, and how long counted work would take it."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from dlm_rag.model.flops import FlopCount


@dataclass(frozen=True)
class Roofline:
    """FLOP/s of a large matrix product and bytes/s of a large copy, both ways counted."""

    flops: float
    bytes: float

    def least_seconds(self, work: FlopCount) -> float:
        """The least time for the work, if nothing were lost."""
        return max(work.flops / self.flops, work.bytes_moved / self.bytes)

    def limiting_resource(self, work: FlopCount) -> str:
        """Which of the two it is."""
        return "compute" if work.flops / self.flops > work.bytes_moved / self.bytes else "memory"


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """The best of ten matrix products and ten copies on this device."""
    side, length = (8192, 2**30) if device.type == "cuda" else (2048, 2**27)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.ones(length // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)

    def best(run: Any) -> float:
        times = []
        for _ in range(10):
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    return Roofline(2 * side**3 / best(lambda: a @ b), 2 * length / best(lambda: target.copy_(source)))
