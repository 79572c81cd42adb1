"""The shapes of checkpoints that people begin with, so that a plan needs neither network nor weights."""

from pathlib import Path
from typing import Any

from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.families import find_family

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
    "Qwen/Qwen2.5-72B-Instruct": _QWEN_7B | _QWEN_2 | {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 29_568,
    },
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
    family = find_family(raw["model_type"])
    return family.read_config(raw).add_settings(family.settings)
