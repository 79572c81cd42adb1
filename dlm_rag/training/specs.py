"""Known machines and checkpoints: what the former could do at best, for plans and for MFU; the shapes of
the latter, so that a plan needs neither network nor weights.

Peaks are dense (no structured sparsity), of one device, from public figures; plans multiply them by `MFU`.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.families import find_family

RESERVED_MEMORY_FRACTION = 0.08  # of a device's memory, for its context, workspaces and fragments


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


_QWEN_7B = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18_944, "vocab_size": 152_064, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
_DREAM = _QWEN_7B | {"model_type": "Dream", "max_position_embeddings": 131_072, "mask_token_id": 151_666}
_QWEN_2 = {"model_type": "qwen2", "max_position_embeddings": 32_768, "mask_token_id": 151_665}
_LLADA2_FLASH = {
    "model_type": "llada2_moe", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 9216, "first_k_dense_replace": 1,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1024,
    "num_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "vocab_size": 157_184, "rms_norm_eps": 1e-6, "rope_theta": 6e5, "partial_rotary_factor": 0.5,
    "max_position_embeddings": 16_384, "mask_token_id": 156_895,
}  # fmt: skip
KNOWN_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "GSAI-ML/LLaDA-8B-Instruct": {
        "model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32,
        "mlp_hidden_size": 12_288, "vocab_size": 126_464, "embedding_size": 126_464, "rms_norm_eps": 1e-5,
        "max_sequence_length": 4096, "rope_theta": 500_000.0, "mask_token_id": 126_336,
    },
    "nvidia/Nemotron-Labs-Diffusion-8B": {
        "model_type": "nemotron_labs_diffusion", "vocab_size": 131_072, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 34, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16_384, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "block_size": 32, "mask_token_id": 100,
    },
    "Dream-org/Dream-v0-Instruct-7B": _DREAM,
    "pauljngr/sardi-dream-7b": _DREAM,
    "Efficient-Large-Model/Fast_dLLM_v2_7B": _QWEN_7B | _QWEN_2 | {
        "model_type": "Fast_dLLM_Qwen", "bd_size": 32,
    },
    "JetLM/SDAR-8B-Chat": {
        "model_type": "sdar", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12_288, "vocab_size": 151_936,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32_768, "block_size": 4,
        "mask_token_id": 151_669,
    },
    "Qwen/Qwen2.5-7B-Instruct": _QWEN_7B | _QWEN_2,
    "inclusionAI/LLaDA2.1-mini": _LLADA2_FLASH | {
        "hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16, "intermediate_size": 5120,
        "moe_intermediate_size": 512, "max_position_embeddings": 32_768,
    },
    "inclusionAI/LLaDA2.0-flash": _LLADA2_FLASH,
    "inclusionAI/LLaDA2.2-flash": _LLADA2_FLASH | {
        "rope_theta": 3e6, "max_position_embeddings": 131_072, "block_size": 32, "expert_capacity": 48,
        "delete_token_id": 156_930, "split_token_id": 156_931,
    },
}  # fmt: skip


def read_known_config(path: str | None) -> DenoiserConfig | None:
    """The architecture of a well-known checkpoint, unless a folder has its name; None of others."""
    if path is None or path not in KNOWN_CHECKPOINTS or Path(path).exists():
        return None
    raw = KNOWN_CHECKPOINTS[path]
    family = find_family(raw)
    return family.read_config(raw).add_settings(family.settings)
