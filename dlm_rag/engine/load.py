"""A decoder in one call: a model by its name, and a corpus in whatever form it is at hand."""

import dataclasses
from pathlib import Path
from typing import Any

from dlm_rag.cli import print_note
from dlm_rag.config import Config
from dlm_rag.config.fields import replace_settings
from dlm_rag.engine.engine import Decoder
from dlm_rag.errors import ConfigError, suggest_nearest
from dlm_rag.files.hub import MODEL_NAME, READER, SHIPPED_FOLDER, SHIPPED_PREFIX
from dlm_rag.machine import choose_device, choose_dtype
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.model.denoiser import load_denoiser
from dlm_rag.retrieval import load_retriever
from dlm_rag.tokenizer import Tokenizer

SECTIONS = ("model", "retrieval", "decode", "engine")  # whose settings `load` takes, by their bare names
WORLD_MODELS = [f"{SHIPPED_PREFIX}{name}" for name in ("model", "whole")]  # trained on the world that ships
WORLD_CORPUS = SHIPPED_FOLDER / "world" / "corpus.jsonl"
INSTEAD = {"torch_dtype": "dtype", "k": "top_k", "n_docs": "top_k", "max_length": "max_new_tokens",
           "max_tokens": "max_new_tokens", "documents": "corpus", "texts": "corpus", "retriever": "corpus",
           "threshold": "commit_threshold", "do_sample": "temperature", "steps": "steps_per_block",
           "num_steps": "steps_per_block", "load_in_8bit": "quantize", "load_in_4bit": "quantize",
           "tokenizer": "model"}  # fmt: skip


def load(model: str | Path | None = None, corpus: Any = None, **settings: Any) -> Decoder:
    """The decoder of a model and a corpus, ready for `ask`, `decode` and `stream`.

    model: a folder, a hub id, `smollm2`, or what ships (`dlm_rag/shipped/model`); unset: SmolLM2 with the
    adapter that ships (93 MB are fetched at the first use), without a corpus the model of the invented
    world. corpus: a file or folder, passages as texts or dicts, or a retriever. settings: any of `model`,
    `retrieval`, `decode` and `engine` by its bare name, as `top_k=3, commit_threshold=0.8, device="cuda",
    dtype="bfloat16"`. Raises `UserError`.
    """
    default = WORLD_MODELS[0] if corpus is None and "url" not in settings else READER
    name, sections = str(model or default), {section: getattr(Config(), section) for section in SECTIONS}
    for key, value in settings.items():
        section = _find_section(key, sections)
        if key in ("device", "dtype"):  # also as objects of torch
            value = str(value).removeprefix("torch.")
        sections[section] = replace_settings(sections[section], **{key: value})
    if name == MODEL_NAME:
        print_note(f"{name} is the model as published; what is trained to answer from passages is {READER}")
    wanted, retrieval = sections["model"], sections["retrieval"]
    checkpoint = open_checkpoint(name, wanted.block_size)
    device = choose_device(wanted.device)
    layout = wanted.evidence_layout or checkpoint.config.evidence_layout
    if hasattr(corpus, "search") and hasattr(corpus, "key"):
        retriever = corpus
    elif corpus is None and retrieval.url is None:
        if name not in WORLD_MODELS:
            raise ConfigError("load: give corpus= a file, a folder, a list of texts, or a retriever")
        retriever = load_retriever(replace_settings(retrieval, corpus=str(WORLD_CORPUS)), model=name)
    else:
        retriever = load_retriever(retrieval, corpus, model=name)
    denoiser = load_denoiser(
        checkpoint, device, choose_dtype(wanted.dtype, device), wanted.attn_implementation, wanted.quantize,
        wanted.device_map,
    )  # fmt: skip
    tokenizer = Tokenizer.from_pretrained(checkpoint, layout)
    return Decoder(denoiser, retriever, tokenizer, sections["decode"], layout, sections["engine"])


def _find_section(key: str, sections: dict[str, Any]) -> str:
    """The section that has a setting; raises `ConfigError` with the nearest name."""
    names = {item.name: name for name in SECTIONS for item in dataclasses.fields(sections[name])}
    if key not in names:
        right = f" (nearest: '{INSTEAD[key]}')" if key in INSTEAD else suggest_nearest(key, names)
        raise ConfigError(f"load has no setting '{key}'{right}")
    return names[key]
