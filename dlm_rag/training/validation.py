"""Validation: the real decoder and the NELBO on questions, the NELBO on documents, all held out."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from dlm_rag.config import Config, DecodeConfig
from dlm_rag.config.fields import replace_settings
from dlm_rag.engine.engine import Decoder
from dlm_rag.evaluation.metrics import score_rollout
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.packed_batch import to_host
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.questions import Question
from dlm_rag.retrieval.base import CorpusRetriever, build_query
from dlm_rag.retrieval.corpus import get_row_id
from dlm_rag.text import FUNCTION_WORDS, split_words
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.training.batches import Example, ExampleBuilder, make_masked_batch, mask_at_time
from dlm_rag.training.documents import DOCUMENT_LAYOUT, PackedDocuments
from dlm_rag.training.losses import MaskedObjective
from dlm_rag.training.trainer import Trainer

NELBO_TIMES = 4  # of each question, in equal parts of the interval


class QuestionValidation:
    """Held-out questions with their true responses."""

    def __init__(
        self, questions: list[Question], truths: list[str], retriever: CorpusRetriever, config: Config
    ) -> None:
        self.questions, self._truths, self._seed = questions, truths, config.train.seed
        self._retriever, self._config = retriever, config.decode
        if config.decode.commit_rule != "sampled":  # rollouts alone read it
            soft = DecodeConfig().gate_temperature
            self._config = replace_settings(config.decode, gate_temperature=soft)
        self._engine = config.engine.for_training_rollouts

    def compute_scores(self, trainer: Trainer) -> dict[str, float]:
        """Exact match and forwards for all questions, exact match by hops, and the NELBO.

        Each process answers its share of the questions.
        """
        if not self.questions:
            return {}
        denoiser, tokenizer, processes = trainer.denoiser, trainer.origin.tokenizer, trainer.processes
        mine = processes.local_items(len(self.questions))
        asked = [self.questions[number] for number in mine]
        by_hops = Counter(question.hops for question in self.questions if question.hops)
        counts = {"exact_match": len(self.questions)}
        counts |= {f"exact_match_{hops}_hops": by_hops[hops] for hops in sorted(by_hops)}
        counts["forwards_per_answer"] = len(self.questions)
        sums = dict.fromkeys(counts, 0.0)
        with profile_stage("evaluate"), trainer.evaluation_mode():
            decoder = Decoder(denoiser, self._retriever, tokenizer, self._config, engine=self._engine)
            for rollout, question in zip(decoder.decode(asked), asked, strict=True):
                scored = score_rollout(rollout, question)
                sums["exact_match"] += scored.exact_match
                sums["forwards_per_answer"] += scored.forwards
                if question.hops:
                    sums[f"exact_match_{question.hops}_hops"] += scored.exact_match
            own = [*sums.values(), *self.nelbo(denoiser, tokenizer, mine)]
        *found, nats, tokens = processes.all_reduce_sum(own)
        means = {name: value / counts[name] for name, value in zip(sums, found, strict=True)}
        return means | {"nelbo_per_token": nats / tokens}

    def nelbo(self, denoiser: Denoiser, tokenizer: Tokenizer, which: Sequence[int]) -> tuple[float, float]:
        """The NELBO in nats of the true responses to some questions, each with one end token; and the
        number of these tokens.

        Given the passages that hold the answer (of a row that was cut, the one with most of the words;
        where none are named, those found for question and response); one sample of masks at each of
        `NELBO_TIMES`, which one random offset shifts (VDM, arXiv 2107.00630, appendix I.1).
        """
        total = tokens = 0.0
        builder = ExampleBuilder(tokenizer, denoiser.config)
        for number in which:
            question, truth = self.questions[number], self._truths[number]
            rng = np.random.default_rng([*map(ord, f"nelbo/{self._seed}"), number])
            times = (rng.random() + np.arange(NELBO_TIMES) / NELBO_TIMES) % 1
            assert tokenizer.end_id is not None
            target = (*tokenizer.encode(truth), tokenizer.end_id)
            prompt = builder.build_prompt(question.question, self._evidence(question, truth))
            rows = [mask_at_time(prompt, target, time, rng) for time in times.tolist()]
            tokens += len(target)
            total += sum_losses(denoiser, rows, denoiser.config.evidence_layout) / NELBO_TIMES
        return total, tokens

    def _evidence(self, question: Question, truth: str) -> list[str]:
        if not question.supporting_ids:
            (found,) = self._retriever.search([build_query("proxy", question.question, truth)])
            return [passage.text for passage in found]
        wanted = {*split_words(f"{question.question} {truth}")} - FUNCTION_WORDS

        def count_shared(text: str) -> int:
            return len(wanted.intersection(split_words(text)))

        parts = (self._support.get(name) for name in question.supporting_ids)
        return [max(texts, key=count_shared) for texts in parts if texts]

    @cached_property
    def _support(self) -> dict[str, list[str]]:
        """The texts that support the questions, by the ids of passages and of rows that were cut."""
        wanted = {name for question in self.questions for name in question.supporting_ids}
        found: dict[str, list[str]] = {}
        for passage in self._retriever.corpus:
            for name in wanted.intersection((passage.id, get_row_id(passage.id))):
                found.setdefault(name, []).append(passage.text)
        return found


class DocumentValidation:
    """The last sequences of every file, which no step trains on."""

    def __init__(self, documents: PackedDocuments) -> None:
        self._documents = documents

    def compute_scores(self, trainer: Trainer) -> dict[str, float]:
        """The NELBO per token in nats, of all files together."""
        held, processes = self._documents.held_out_examples(), trainer.processes
        if not held:
            return {}
        with profile_stage("evaluate"), trainer.evaluation_mode():
            mine = processes.local_items(len(held))
            own = sum(sum_losses(trainer.denoiser, held[n], DOCUMENT_LAYOUT) for n in mine)
        tokens = sum(len(row.target) for rows in held for row in rows)
        return {"nelbo_per_token": processes.all_reduce_sum([own])[0] / tokens}


def sum_losses(denoiser: Denoiser, rows: Sequence[Example], layout: str) -> float:
    """The losses of the masked tokens of some rows in nats, by the weights of the rows."""
    batch = make_masked_batch(rows, denoiser.config, layout)
    return float(to_host(MaskedObjective(denoiser)(batch, batch.counts)[1]["tokens"]))
