"""A small DiffusionGemma with fresh weights and a tokenizer learned on training worlds, for `train.py`.

    python profiling/init_diffusion_gemma.py runs/fresh_gemma
    python train.py --config tiny.yaml --model runs/fresh_gemma decode.block_length=null

Width, depth and heads are those of the fresh denoiser of `tiny.yaml`; of experts there is one.
"""

import argparse
import json
from pathlib import Path

import torch

from dlm_rag.config import TrainConfig
from dlm_rag.training.initial_model import DEFAULT_PROMPT_TEMPLATE, iterate_world_texts, train_tokenizer

PAD, END = 0, 1
# As of the public checkpoint, but for the steps: canvases here are a quarter as long.
GENERATION_SETTINGS = {
    "max_denoising_steps": 24, "t_min": 0.4, "t_max": 0.8, "stability_threshold": 1,
    "confidence_threshold": 0.005, "eos_token_id": [END], "pad_token_id": PAD,
    "sampler_config": {"entropy_bound": 0.1, "_cls_name": "EntropyBoundSamplerConfig"},
}  # fmt: skip


def write_fresh_checkpoint(folder: Path, canvas: int, seed: int) -> None:
    """Model, tokenizer and generation config."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    from dlm_rag.model.families.diffusion_gemma import DUMMY_VISION_CONFIG

    size, heads = TrainConfig(), TrainConfig().hidden_size // TrainConfig().head_dim
    text = {
        "vocab_size": size.vocab_size, "hidden_size": size.hidden_size, "head_dim": size.head_dim,
        "global_head_dim": size.head_dim, "num_attention_heads": heads, "num_key_value_heads": heads,
        "num_global_key_value_heads": heads, "num_hidden_layers": size.num_hidden_layers,
        "intermediate_size": size.intermediate_size, "num_experts": 1, "top_k_experts": 1,
        "moe_intermediate_size": 32, "layer_types": ["full_attention"] * size.num_hidden_layers,
        "max_position_embeddings": 2048, "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": None,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}},
    }  # fmt: skip
    config = DiffusionGemmaConfig(text_config=text, vision_config=DUMMY_VISION_CONFIG, canvas_length=canvas)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DiffusionGemmaForBlockDiffusion(config)
    model.save_pretrained(folder)
    train_tokenizer(iterate_world_texts(seed), size.vocab_size).save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({**GENERATION_SETTINGS, "max_new_tokens": canvas})
    )
    raw = json.loads((folder / "config.json").read_text())
    raw["prompt"] = {
        "head": DEFAULT_PROMPT_TEMPLATE.head,
        "fact": DEFAULT_PROMPT_TEMPLATE.fact,
        "tail": DEFAULT_PROMPT_TEMPLATE.tail,
    }
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--canvas", type=int, default=64, help="positions of a canvas")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_fresh_checkpoint(given.folder, given.canvas, given.seed)
    print(given.folder)
