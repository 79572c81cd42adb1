"""Validation by the real decoder: questions about a world whose words training never sees."""

from pathlib import Path

import torch

from dlm_rag.config import Config
from dlm_rag.data.questions import read_questions
from dlm_rag.data.world import write_world
from dlm_rag.decode.decoder import Decoder
from dlm_rag.evaluation.metrics import mean_score, score
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.retrieval import load_retriever
from dlm_rag.stages import stage
from dlm_rag.tokenizer import Tokenizer

VALIDATION_SEED = 1_000_000  # test worlds of reports have small seeds


class Validation:
    """A test-split world in `folder`, written once, and its questions."""

    def __init__(self, config: Config, folder: Path) -> None:
        train = config.train
        write_world(
            folder, VALIDATION_SEED + train.seed, "test", train.world_passages, train.validation_questions
        )
        self._questions = read_questions(folder / "questions.jsonl")
        self._retriever = load_retriever(
            folder / "corpus.jsonl", top_k=config.retrieval.top_k, index_folder=str(folder / "index")
        )
        self._config = config.decode

    def scores(self, denoiser: Denoiser, tokenizer: Tokenizer) -> dict[str, float]:
        """Exact match and forwards for all questions, and exact match by hops."""
        decoder = Decoder(denoiser.eval(), self._retriever, tokenizer, self._config)
        with stage("evaluate"), torch.inference_mode():
            rollouts = decoder.decode(self._questions)
        scored = [score(r, q) for r, q in zip(rollouts, self._questions, strict=True)]
        denoiser.train()
        found = {
            "exact_match": mean_score(scored).exact_match,
            "forwards_per_answer": mean_score(scored).forwards,
        }
        for hops in sorted({q.hops for q in self._questions if q.hops}):
            part = [s for s, q in zip(scored, self._questions, strict=True) if q.hops == hops]
            found[f"exact_match_{hops}_hops"] = mean_score(part).exact_match
        return found
