"""Decoders of the tiny DiffusionGemma."""

from dataclasses import replace

import torch

from dlm_rag.config import DecodeConfig
from dlm_rag.diffusion_gemma.decoding import DiffusionGemma
from dlm_rag.engine.engine import Decoder
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.randomness import make_keyed_generator
from dlm_rag.retrieval.base import CorpusRetriever
from dlm_rag.tokenizer import Tokenizer


def make_gemma_decoder(folder, retriever, dtype=torch.float32, heat=None, **settings):
    """heat: the lowest and the highest temperature, where the checkpoint's are too hot or too cold."""
    checkpoint = open_checkpoint(folder)
    denoiser = DiffusionGemma(checkpoint, torch.device("cpu"), dtype)
    if heat is not None:
        low, high = heat
        denoiser.config = replace(denoiser.config, temperature_low=low, temperature_high=high)
    if dtype == torch.float64:  # which grouped products of experts do not have
        denoiser.model.set_experts_implementation("eager")
    return Decoder(denoiser, retriever, Tokenizer.from_pretrained(checkpoint), DecodeConfig(**settings))


class QueryHashRetriever(CorpusRetriever):
    """Passages that depend on every character of a query: what a random model writes holds no word."""

    def key(self, query):
        return query.text

    def rank(self, queries, depth):
        return [
            torch.randperm(len(self.corpus), generator=make_keyed_generator(query.text)).tolist()[:depth]
            for query in queries
        ]
