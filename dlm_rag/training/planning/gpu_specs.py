"""Known machines: what they could do at best, from public figures, for plans and for MFU.

Peaks are dense (no structured sparsity), of one device. A peak is never reached; plans multiply it by
a stated or measured MFU.
"""

from typing import NamedTuple

import torch

from dlm_rag.training.planning.memory_tracker import RESERVED_MEMORY_FRACTION


class GpuSpec(NamedTuple):
    """One device. Its name is part of the one that CUDA gives."""

    name: str
    flops: dict[torch.dtype, float]  # dense FLOP/s
    memory: float  # bytes
    bandwidth: float  # bytes/s of that memory
    watts: float  # of one device at full load
    rent: float | None  # dollars an hour of one device, where a public list has it
    source: str

    @property
    def usable_memory(self) -> float:
        """Bytes that torch's allocator can have."""
        return (1 - RESERVED_MEMORY_FRACTION) * self.memory


MFU = 0.4  # share of a device's peak that a step is assumed to reach
DTYPES = torch.bfloat16, torch.float16, torch.float32
RENT_SOURCE = "on demand by hyperstack.cloud/gpu-pricing of 2026-08-26 (gb300: a B300)"
# Name; TFLOP/s by `DTYPES`; GB; GB/s of memory; W; dollars an hour by `RENT_SOURCE`; source.
_SPECS: list[tuple[str, tuple[float, float, float], float, float, float, float | None, str]] = [
    ("gb300", (2250, 2250, 75), 252, 7100, 1400, 7.40,
     "DGX Station: 252 GB, 7.1 TB/s (crowdbyte.ai, Computex 2026); BF16 2,250 TFLOP/s "
     "and 1,400 W of a B300 (glennklockwood.com/garden/processors/B300)"),
    ("gb10", (125, 125, 31), 128, 273, 140, None,
     "DGX Spark: 128 GB, 273 GB/s, 140 W (ai-infrastructure.net/dgx-spark); BF16 is an eighth of the "
     "quoted 1 PFLOP/s of sparse FP4 and was seen at half of that (J. Carmack, 2025)"),
    ("h100", (989, 989, 67), 80, 3350, 700, 3.20,
     "H100 SXM: NVIDIA's data sheet, half of its figures with sparsity"),
    ("h200", (989, 989, 67), 141, 4800, 700, 3.99,
     "H200 SXM: NVIDIA's data sheet, half of its figures with sparsity"),
    ("b200", (2250, 2250, 75), 180, 7700, 1000, 6.00,
     "B200 SXM: hmc-tech.com/gpus/nvidia-b200-vs-nvidia-b100; 180 GB usable in a DGX"),
    ("v100", (0, 125, 15.7), 32, 900, 300, None,
     "V100 SXM2 32 GB: NVIDIA's data sheet; it has no BF16"),
]  # fmt: skip
GPU_SPECS = {
    name: GpuSpec(
        name, {dtype: 1e12 * peak for dtype, peak in zip(DTYPES, peaks, strict=True) if peak},
        1e9 * memory, 1e9 * bandwidth, watts, rent, source,
    )
    for name, peaks, memory, bandwidth, watts, rent, source in _SPECS
}  # fmt: skip


def choose_planned_dtype(name: str, machine: GpuSpec | None) -> torch.dtype:
    """The dtype of the arithmetic; "auto" is the first of `DTYPES` that the machine computes in."""
    named = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    return named.get(name) or next(d for d in DTYPES if machine is None or d in machine.flops)


def find_gpu_spec(device: torch.device) -> GpuSpec | None:
    """The entry of a CUDA device, or None where it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((machine for machine in GPU_SPECS.values() if machine.name.upper() in name), None)
