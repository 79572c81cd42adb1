"""Known machines: what they could do at best, from public figures, for plans and for MFU.

Peaks are dense (no structured sparsity), of one device. A peak is never reached; plans multiply it by
a stated or measured MFU.
"""

from dataclasses import dataclass

import torch

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class GpuSpec:
    """One device and how several of them are joined."""

    name: str
    device_name_part: str  # part of the name that CUDA gives the device
    flops: dict[torch.dtype, float]  # dense FLOP/s
    memory: float  # bytes
    bandwidth: float  # bytes/s of that memory
    link: float  # bytes/s to other devices, one way
    watts: float  # of one device at full load
    source: str


def _peak_flops(bfloat16: float | None, float16: float, float32: float) -> dict[torch.dtype, float]:
    low = {} if bfloat16 is None else {torch.bfloat16: bfloat16 * TERA}
    return low | {torch.float16: float16 * TERA, torch.float32: float32 * TERA}


GPU_SPECS = {
    machine.name: machine
    for machine in (
        GpuSpec(
            "gb300", "GB300", _peak_flops(2250, 2250, 75), 252 * GIGA, 7.1e12, 100e9, 1400,
            "DGX Station: 252 GB, 7.1 TB/s, 800 Gb/s network (crowdbyte.ai, Computex 2026); BF16 2,250 "
            "TFLOP/s and 1,400 W of a B300 (glennklockwood.com/garden/processors/B300)",
        ),
        GpuSpec(
            "gb10", "GB10", _peak_flops(125, 125, 31), 128 * GIGA, 273e9, 12e9, 140,
            "DGX Spark: 128 GB, 273 GB/s, 140 W (ai-infrastructure.net/dgx-spark); BF16 is an eighth of "
            "the quoted 1 PFLOP/s of sparse FP4 and was seen at half of that (J. Carmack, 2025); 96 Gb/s "
            "as users measured between two",
        ),
        GpuSpec(
            "h100", "H100", _peak_flops(989, 989, 67), 80 * GIGA, 3.35e12, 450e9, 700,
            "H100 SXM: NVIDIA's data sheet, half of its figures with sparsity",
        ),
        GpuSpec(
            "h200", "H200", _peak_flops(989, 989, 67), 141 * GIGA, 4.8e12, 450e9, 700,
            "H200 SXM: NVIDIA's data sheet, half of its figures with sparsity",
        ),
        GpuSpec(
            "b200", "B200", _peak_flops(2250, 2250, 75), 180 * GIGA, 7.7e12, 900e9, 1000,
            "B200 SXM: hmc-tech.com/gpus/nvidia-b200-vs-nvidia-b100; 180 GB usable in a DGX",
        ),
        GpuSpec(
            "v100", "V100", _peak_flops(None, 125, 15.7), 32 * GIGA, 900e9, 150e9, 300,
            "V100 SXM2 32 GB: NVIDIA's data sheet; it has no BF16",
        ),
    )
}  # fmt: skip


def find_gpu_spec(device: torch.device) -> GpuSpec | None:
    """The entry of a CUDA device, or None where it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((machine for machine in GPU_SPECS.values() if machine.device_name_part in name), None)
