"""Validation: the real decoder, and the NELBO, on a world whose words training never sees."""

from pathlib import Path

import torch

from dlm_rag.config import Config
from dlm_rag.data.examples import Example
from dlm_rag.data.questions import read_questions
from dlm_rag.data.world import write_world
from dlm_rag.decode.decoder import Decoder
from dlm_rag.diffusion.nelbo import nelbo, token_losses
from dlm_rag.diffusion.noise import SCHEDULES, antithetic_times, mask_tokens
from dlm_rag.evaluation.metrics import mean_score, score
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.randomness import keyed_generator
from dlm_rag.retrieval import load_retriever
from dlm_rag.stages import stage
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.training.objective import run_masked

NELBO_TIMES = 4  # for each question
VALIDATION_SEED = 1_000_000  # test worlds of reports have small seeds


class Validation:
    """A test-split world in `folder`, written once, and its questions."""

    def __init__(self, config: Config, folder: Path) -> None:
        train = config.train
        written = write_world(
            folder,
            VALIDATION_SEED + train.seed,
            "test",
            train.world_passages,
            train.validation_questions,
            hops=train.hops,
        )
        self._truths, self._seed = [question.reasoning for question in written], train.seed
        self._questions = read_questions(folder / "questions.jsonl")
        self._retriever = load_retriever(
            folder / "corpus.jsonl", top_k=config.retrieval.top_k, index_folder=str(folder / "index")
        )
        self._config = config.decode

    def scores(self, denoiser: Denoiser, tokenizer: Tokenizer) -> dict[str, float]:
        """Exact match and forwards for all questions, and exact match by hops."""
        with stage("evaluate"):
            return self._scores(denoiser, tokenizer)

    def _scores(self, denoiser: Denoiser, tokenizer: Tokenizer) -> dict[str, float]:
        decoder = Decoder(denoiser.eval(), self._retriever, tokenizer, self._config)
        with torch.inference_mode():
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
        return found | {"nelbo_per_token": self.nelbo_per_token(denoiser, tokenizer)}

    @torch.inference_mode()
    def nelbo_per_token(self, denoiser: Denoiser, tokenizer: Tokenizer) -> float:
        """The NELBO in nats of the true responses and one end token, for each of these tokens.

        Given the passages that hold the answer; linear schedule, antithetic times, one sample of
        masks for every question and time.
        """
        schedule = SCHEDULES["linear"]
        (end,) = tokenizer.end_ids
        passages = {passage.id: passage.text for passage in self._retriever.corpus}
        total = tokens = 0.0
        for number, (question, truth) in enumerate(zip(self._questions, self._truths, strict=True)):
            generator = keyed_generator("nelbo", self._seed, number)
            times = antithetic_times(NELBO_TIMES, generator)
            target = (*tokenizer.encode(truth), end)
            ids = torch.tensor(target).expand(len(times), -1)
            hidden = mask_tokens(ids, schedule.alpha(times), -1, generator) < 0
            some = hidden.any(dim=1)  # a row without masks adds nothing
            prompt = tokenizer.prompt(question.question, [passages[i] for i in question.supporting_ids])
            tokens += len(target)
            examples = [Example(prompt, target, tuple(row), ()) for row in hidden[some].tolist()]
            if examples:
                masked = run_masked(denoiser, examples, denoiser.config.evidence_layout)
                losses = token_losses(masked.logits, masked.targets).double().cpu()
                sums = losses.new_zeros(len(examples)).index_add(0, masked.rows.cpu(), losses)
                total += float(nelbo(sums[:, None], times[some], schedule).sum()) / len(times)
        return total / tokens
