"""A tiny DiffusionGemma with random weights, as the class of transformers saves it; bytes are its tokens.

    python -m tests.support.tiny_diffusion_gemma FOLDER

256 pads, 257 ends a text, 258 begins one, 259 and 260 stand around a turn.
"""

import json
import sys
from pathlib import Path

import torch

PAD, END, BOS, TURN, TURN_END = 256, 257, 258, 259, 260
SPECIAL = ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn>{{ message['role'] }}\n{{ message['content'] }}"
    "<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
TEXT = {
    "vocab_size": 261, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "num_global_key_value_heads": 1, "sliding_window": 16, "num_experts": 4, "top_k_experts": 2,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"], "moe_intermediate_size": 16,
    "max_position_embeddings": 4096, "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": BOS,
}  # fmt: skip
VISION = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 8, "patch_size": 2, "position_embedding_size": 4,
}  # fmt: skip
GENERATION = {
    "max_new_tokens": 24, "max_denoising_steps": 6, "t_min": 0.4, "t_max": 0.8, "stability_threshold": 1,
    "confidence_threshold": 0.005, "eos_token_id": [END, TURN_END], "pad_token_id": PAD,
    "sampler_config": {"entropy_bound": 0.1, "_cls_name": "EntropyBoundSamplerConfig"},
}  # fmt: skip


def write_tiny_gemma(
    folder: Path, seed: int = 0, canvas: int = 12, sharp: float = 1.0, **generation
) -> Path:
    """Model, tokenizer, chat template and generation config; generation: what is otherwise in the last.

    sharp: how sure of its tokens the model is.
    """
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, Gemma4VisionConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = DiffusionGemmaConfig(
        text_config=TEXT, vision_config=Gemma4VisionConfig(**VISION), canvas_length=canvas
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DiffusionGemmaForBlockDiffusion(config).eval()
        for name, value in model.named_parameters():
            if value.dim() > 1:
                torch.nn.init.normal_(value, std=sharp if name.endswith("embed_tokens.weight") else 0.2)
    model.save_pretrained(folder)
    make_gemma_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION | generation))
    return folder


def make_gemma_tokenizer():
    """Bytes as tokens, then `SPECIAL`, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.support.tiny_models import byte_alphabet

    backend = Tokenizer(models.BPE(vocab={text: byte for byte, text in byte_alphabet().items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>",
        chat_template=TEMPLATE,
    )  # fmt: skip


if __name__ == "__main__":
    print(write_tiny_gemma(Path(sys.argv[1])))
