"""Small tokenizers, denoisers and checkpoints."""

import json
from pathlib import Path

import torch

from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.tokenizer.prompts import PromptTemplate


def tiny_tokenizer(template: PromptTemplate | None = None) -> Tokenizer:
    """Bytes as tokens: id = byte value; 256 is the mask, 257 ends the text."""
    return Tokenizer(byte_tokenizer(), mask_id=256, template=template, end_ids=(257,))


def byte_tokenizer(more=()):
    """more: tokens that come after the bytes; a mask and an end that are not among them come last."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = byte_alphabet()
    vocabulary = {token: n for n, token in enumerate((*(alphabet[b] for b in range(256)), *more))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<mask>", "<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="<mask>", eos_token="<end>")


def byte_alphabet() -> dict[int, str]:
    """The printable stand-ins of byte-level BPE: printable bytes as they are, others from U+0100."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + n) for n, b in enumerate(others)}


def tiny_denoiser(seed: int = 0, **changes) -> Denoiser:
    """A random denoiser over the byte vocabulary, sharp enough to have clear preferences."""
    settings = {
        "vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "mask_token_id": 256,
        "passage_length": 96,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        denoiser = Denoiser(DenoiserConfig(**(settings | changes)))
        for name, value in denoiser.named_parameters():
            if value.dim() == 2:
                std = {"lm_head.weight": 0.5, "embed_tokens.weight": 1.0}.get(name, 0.2)
                torch.nn.init.normal_(value, std=std)
    return denoiser.eval()


def write_autoregressive_checkpoint(folder: Path, config, kind):
    """A tiny Qwen2 or Llama with its tokenizer, as its own class writes it; returns folder and model."""
    torch.manual_seed(0)
    model = kind(
        config(
            vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=64, max_position_embeddings=256, eos_token_id=256,
            tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    model.save_pretrained(folder)
    backend = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    backend["added_tokens"] = [t | {"id": 256} for t in backend["added_tokens"] if t["content"] == "<end>"]
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder, model
