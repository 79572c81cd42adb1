"""Validation: the real decoder and the NELBO on questions, the NELBO on documents, all held out."""

from typing import Protocol

import torch

from dlm_rag.config import DecodeConfig
from dlm_rag.decode.decoder import Decoder
from dlm_rag.diffusion.nelbo import nelbo, token_losses
from dlm_rag.diffusion.noise import SCHEDULES, antithetic_times, mask_tokens
from dlm_rag.evaluation.metrics import mean_score, score
from dlm_rag.evidence.fitting import Room, fit
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.questions import Question
from dlm_rag.randomness import keyed_generator
from dlm_rag.retrieval.base import CorpusRetriever
from dlm_rag.retrieval.query import build_query
from dlm_rag.stages import stage
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.training.loss import Counts, Sums, Weights, run_masked
from dlm_rag.training.rows.documents import Documents
from dlm_rag.training.rows.example import Example
from dlm_rag.training.trainer import Trainer

NELBO_TIMES = 4  # for each question


class Validation(Protocol):
    """Says how good a denoiser is."""

    def scores(self, trainer: Trainer) -> dict[str, float]:
        """Figures by name; every process takes part, and the first one's are right."""
        ...


class QuestionValidation:
    """Held-out questions with their true responses."""

    def __init__(
        self, questions: list[Question], truths: list[str], retriever: CorpusRetriever,
        decode: DecodeConfig, seed: int,
    ) -> None:  # fmt: skip
        self._questions, self._truths, self._seed = questions, truths, seed
        self._retriever, self._config = retriever, decode

    def scores(self, trainer: Trainer) -> dict[str, float]:
        """Exact match and forwards for all questions, exact match by hops, and the NELBO."""
        if not self._questions:
            return {}
        with stage("evaluate"), trainer.evaluating() as here:
            return self.scores_of(trainer.denoiser, trainer.start.tokenizer) if here else {}

    def scores_of(self, denoiser: Denoiser, tokenizer: Tokenizer) -> dict[str, float]:
        """As `scores`, for a denoiser by itself."""
        decoder = Decoder(denoiser, self._retriever, tokenizer, self._config)
        rollouts = decoder.decode(self._questions)
        scored = [score(r, q) for r, q in zip(rollouts, self._questions, strict=True)]
        found = {
            "exact_match": mean_score(scored).exact_match,
            "forwards_per_answer": mean_score(scored).forwards,
        }
        for hops in sorted({q.hops for q in self._questions if q.hops}):
            part = [s for s, q in zip(scored, self._questions, strict=True) if q.hops == hops]
            found[f"exact_match_{hops}_hops"] = mean_score(part).exact_match
        return found | {"nelbo_per_token": self.nelbo_per_token(denoiser, tokenizer)}

    @torch.no_grad()
    def nelbo_per_token(self, denoiser: Denoiser, tokenizer: Tokenizer) -> float:
        """The NELBO in nats of the true responses and one end token, for each of these tokens.

        Given the passages that hold the answer (where they are not named: those found for question and
        response); linear schedule, antithetic times, one sample of masks for every question and time.
        """
        schedule = SCHEDULES["linear"]
        total = tokens = 0.0
        for number, (question, truth) in enumerate(zip(self._questions, self._truths, strict=True)):
            generator = keyed_generator("nelbo", self._seed, number)
            times = antithetic_times(NELBO_TIMES, generator)
            assert tokenizer.end_id is not None
            target = (*tokenizer.encode(truth), tokenizer.end_id)
            ids = torch.tensor(target).expand(len(times), -1)
            hidden = mask_tokens(ids, schedule.alpha(times), -1, generator) < 0
            some = hidden.any(dim=1)  # a row without masks adds nothing
            found = tokenizer.prompt(question.question, self._evidence(question, truth))
            prompt = fit(found, Room.of(denoiser.config))[0]
            tokens += len(target)
            examples = [Example(prompt, target, tuple(row)) for row in hidden[some].tolist()]
            if examples:
                masked = run_masked(denoiser, examples, denoiser.config.evidence_layout)
                losses = token_losses(denoiser.read_out(masked.hidden), masked.targets).double().cpu()
                sums = losses.new_zeros(len(examples)).index_add(0, masked.rows.cpu(), losses)
                total += float(nelbo(sums[:, None], times[some], schedule).sum()) / len(times)
        return total / tokens

    def _evidence(self, question: Question, truth: str) -> list[str]:
        if not question.supporting_ids:
            (found,) = self._retriever.search([build_query("proxy", question.question, truth)])
            return [passage.text for passage in found]
        wanted = set(question.supporting_ids)
        texts = {passage.id: passage.text for passage in self._retriever.corpus if passage.id in wanted}
        return [texts[name] for name in question.supporting_ids if name in texts]


class DocumentValidation:
    """The last sequences of every source, which no step trains on."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    def scores(self, trainer: Trainer) -> dict[str, float]:
        """The NELBO per token in nats, of all sources together."""
        held, processes = self._documents.held_out(), trainer.processes
        if not held:
            return {}
        # One sequence at a time, as a step needs at least; shards are gathered by all as often.
        mine = [held[n] for n in processes.share(len(held))]
        calls = -(-len(held) * processes.sharing // processes.count)
        ends = trainer.start.tokenizer.end_ids
        with stage("evaluate"), torch.no_grad(), trainer.arithmetic():
            over = Counts.total([Counts(), *(Counts.of(rows, ends, 1.0) for rows in mine)]).over(processes)
            found = [trainer.root(rows, over, Weights())[1] for rows in mine]
            for _ in range(calls - len(mine)):
                found.append(0 * trainer.root(held[-1], over, Weights())[1])
            return {"nelbo_per_token": Sums.of(found, processes).tokens / over.divisor}
