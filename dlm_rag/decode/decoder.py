"""THE loop: denoise, commit, ask, retrieve, and again, for many questions at once.

    step 0     retrieve with the question alone
    step s     encode the evidence and denoise the canvas       (model)
               commit what the commit rule chooses              (diffusion/commit.py)
               build the query from what the canvas says now    (retrieval/query.py)
               retrieve; what was found is the evidence of step s + 1

Questions join as others finish, up to `batch_size` at a time. Rows are packed without padding and
share nothing but the call, so a question gets the same tokens alone and in a batch.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.config import DecodeConfig
from dlm_rag.data.questions import Question, typed_questions
from dlm_rag.decode.canvas import Canvas
from dlm_rag.decode.citations import cite, held_positions
from dlm_rag.decode.evidence import Arrangement, arrange, encode_canvases, encode_contexts, fit
from dlm_rag.decode.rollout import Committed, Rollout, Step
from dlm_rag.diffusion.commit import Proposals, select
from dlm_rag.errors import QuestionError
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.randomness import keyed_generator
from dlm_rag.retrieval.base import Retriever
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import build_query, may_enter, retrieval_due
from dlm_rag.stages import StageClock, stage, step_range
from dlm_rag.text import words
from dlm_rag.tokenizer import Tokenizer

OnStep = Callable[[Rollout], None]


@dataclass
class Row:
    """A question in the batch and its state between two steps."""

    question: Question
    canvas: Canvas
    generator: torch.Generator
    rollout: Rollout
    evidence: dict[str, str] = field(default_factory=dict)  # id -> the text of it that is in the prompt
    found: list[Passage] | None = None  # by the last search; what fits of it is the evidence
    arrangement: Arrangement | None = None  # the prompt of the evidence, laid out
    query_key: Hashable = None
    first_passage: str = ""  # the best passage of step 0, for query=feedback
    guesses: Proposals | None = None
    lowest_confidence: float | None = None
    committed: tuple[Committed, ...] = ()
    remasked: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return len(self.rollout.steps)


class Decoder:
    """Answers questions with a denoiser, a retriever and a `DecodeConfig`.

    `evidence_layout` defaults to the checkpoint's own.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        retriever: Retriever,
        tokenizer: Tokenizer,
        config: DecodeConfig | None = None,
        evidence_layout: str | None = None,
    ) -> None:
        self.denoiser, self.retriever, self.tokenizer = denoiser, retriever, tokenizer
        self.config = config or DecodeConfig()
        self.evidence_layout = evidence_layout or denoiser.config.evidence_layout
        # Revision may still change the text before an end token.
        certain = self.config.stop_early and self.config.revision_threshold is None
        self._stop_at = tokenizer.end_ids if certain else frozenset[int]()

    @property
    def canvas_length(self) -> int:
        """Response positions: the config's, or the checkpoint's own."""
        return self.config.canvas_length or self.denoiser.config.canvas_length

    def describe(self) -> str:
        """Device, dtype, kernel and layout, in words for a person."""
        denoiser = self.denoiser
        dtype = str(denoiser.dtype).removeprefix("torch.")
        return f"{denoiser.device.type} {dtype} {denoiser.backend}, {self.evidence_layout} evidence"

    def decode(self, questions: Sequence[str | Question]) -> list[Rollout]:
        """One finished rollout per question, in order.

        Raises `QuestionError` for a blank question or one that does not fit the context.
        """
        asked = as_questions(questions)
        by_id = {rollout.id: rollout for rollout in self.stream(asked)}
        return [by_id[question.id] for question in asked]

    def stream(self, questions: Iterable[Question], on_step: OnStep | None = None) -> Iterator[Rollout]:
        """Finished rollouts, each as soon as it is complete; ids must differ.

        `on_step` is called with the growing rollout of every row after each of its steps.
        """
        waiting, rows = deque(questions), list[Row]()
        turn = 0
        while waiting or rows:
            joining = min(len(waiting), self.config.batch_size - len(rows))
            with StageClock() as clock, step_range(turn, len(rows) + joining):
                joined = [self._start(waiting.popleft()) for _ in range(joining)]
                if joined:
                    self._refresh(joined, clock)
                    _record(joined, on_step)
                rows += joined
                self._denoise(rows)
                self._commit(rows)
                self._refresh(rows, clock)
                done = [row for row in rows if row.canvas.finished(self._stop_at)]
                self._finish(done)
                _charge(clock, [row.rollout.steps[-1].seconds for row in done])
                _record(rows, on_step)
            rows = [row for row in rows if not row.rollout.finished]
            yield from (row.rollout for row in done)
            turn += 1

    def _start(self, question: Question) -> Row:
        return Row(
            question=question,
            canvas=Canvas(self.canvas_length, self.tokenizer.mask_id),
            generator=keyed_generator(self.config.seed, question.id),
            rollout=Rollout(question.id, question.question, self.evidence_layout, self.canvas_length),
        )

    def _take(self, row: Row, passages: list[Passage]) -> None:
        """Makes what fits of the passages the evidence of the row, and lays out its prompt."""
        if passages == row.found:
            return
        row.found = passages
        model = self.denoiser.config
        prompt = self.tokenizer.prompt(row.question.question, [passage.text for passage in passages])
        fitted, cut = fit(
            prompt, self.evidence_layout, model.max_position_embeddings, self.canvas_length,
            model.passage_length,
        )  # fmt: skip
        if cut.tokens > row.rollout.cut.get("tokens", 0):
            row.rollout.cut = asdict(cut)
        row.evidence = {
            passage.id: passage.text if kept == whole else self.tokenizer.spans(list(kept))[0]
            for passage, whole, kept in zip(passages, prompt.facts, fitted.facts, strict=True)
            if kept
        }
        seen = row.rollout.evidence_texts
        for name, text in row.evidence.items():  # of a passage cut twice, the shorter: a safe citation
            seen[name] = min(seen.get(name, text), text, key=len)
        row.arrangement = arrange(fitted, self.evidence_layout, model.shifted, model.passage_length)

    @torch.inference_mode()
    def _denoise(self, rows: list[Row]) -> None:
        """One pass of the denoiser over all rows; leaves the proposals of each row in `guesses`."""
        laid = [row.arrangement for row in rows if row.arrangement is not None]  # set by the first search
        with stage("encode_evidence"):
            contexts = encode_contexts(self.denoiser, laid)
        with stage("denoise"):
            canvases = [row.canvas.ids.tolist() for row in rows]
            hidden, starts = encode_canvases(self.denoiser, laid, canvases, contexts)
            self._propose(rows, hidden, starts)

    def _propose(self, rows: list[Row], hidden: Tensor, starts: list[int]) -> None:
        """Reads the proposals of the masked positions; the one wait for the device in a step."""
        revising = self.config.revision_threshold is not None
        positions, source = [], []
        for row, start in zip(rows, starts, strict=True):
            where = np.arange(row.canvas.length) if revising else np.flatnonzero(row.canvas.masked)
            positions.append(where)
            source.append(start + where)
        index = torch.from_numpy(np.concatenate(source)).to(hidden.device)
        logits = self.denoiser.read_out(hidden, index).float()
        sampled = self._uniform(rows, positions)
        written = np.concatenate([row.canvas.ids[at] for row, at in zip(rows, positions, strict=True)])
        values = read_proposals(
            logits, sampled, self.config.temperature, torch.from_numpy(written), self.tokenizer.mask_id
        )
        if not np.isfinite(values).all():
            raise FloatingPointError("the denoiser's output is not a number")
        at = 0
        for row, where in zip(rows, positions, strict=True):
            part = values[:, at : at + len(where)]
            at += len(where)
            everywhere = Proposals(where, part[0].astype(np.int64), part[1], part[2], part[3])
            if revising:
                assert self.config.revision_threshold is not None
                fallen = row.canvas.remask(part[4], self.config.revision_threshold)
                row.remasked = tuple(fallen.tolist())
            row.guesses = everywhere.at(row.canvas.masked[where])

    def _uniform(self, rows: list[Row], positions: list[NDArray[np.int64]]) -> Tensor | None:
        """Uniform numbers (n,) for sampling: one per canvas position and step, question by question."""
        if not self.config.temperature:
            return None
        draws = [
            torch.rand(row.canvas.length, generator=row.generator, dtype=torch.float64) for row in rows
        ]
        return torch.cat([d[torch.from_numpy(at)] for d, at in zip(draws, positions, strict=True)])

    def _commit(self, rows: list[Row]) -> None:
        config = self.config
        with stage("commit"):
            for row in rows:
                assert row.guesses is not None
                may = row.canvas.candidates(config.block_length)
                candidates = row.guesses.at(may[row.guesses.positions])
                chosen = candidates.at(
                    select(
                        config.commit_rule,
                        candidates,
                        commit_threshold=config.commit_threshold,
                        tokens_per_step=config.tokens_per_step,
                        bound=config.entropy_bound,
                        held=self._held(row, candidates) if config.commit_rule == "grounded" else (),
                    )
                )
                row.canvas.commit(chosen)
                row.committed = tuple(
                    Committed(int(p), int(t), self.tokenizer.token_text(int(t)), round(float(c), 6))
                    for p, t, c in zip(chosen.positions, chosen.token_ids, chosen.confidence, strict=True)
                )
                still = row.canvas.masked[row.guesses.positions]
                confidences = row.guesses.confidence[still]
                row.lowest_confidence = float(confidences.min()) if len(confidences) else None

    def _held(self, row: Row, candidates: Proposals) -> list[bool]:
        """Whether question or evidence hold the words that each candidate would write."""
        assert row.guesses is not None
        known = set(words(row.question.question))
        for passage in row.evidence.values():
            known.update(words(passage))
        text, spans = self.tokenizer.spans(row.canvas.with_guesses(row.guesses, 0.0))
        held = held_positions(text, spans, known)
        return [held[position] for position in candidates.positions]

    def _refresh(self, rows: list[Row], clock: StageClock) -> None:
        """Asks for the rows that are due and takes what is found as their evidence.

        Writes the step into each rollout. Rows whose query has not changed are not searched for.
        """
        config = self.config
        entry = may_enter(config.query, config.query_threshold)
        asked: dict[int, str] = {}
        searched = []
        with stage("detokenize"):
            for number, row in enumerate(rows):
                if row.step and not retrieval_due(
                    row.step, config.retrieve_every, config.retrieve_below, row.lowest_confidence
                ):
                    continue
                response = ""
                if row.guesses is not None:
                    response = self.tokenizer.query_text(row.canvas.with_guesses(row.guesses, entry))
                query = build_query(config.query, row.question.question, response, row.first_passage)
                asked[number] = query.text
                key = self.retriever.key(query)
                if key != row.query_key:
                    row.query_key = key
                    searched.append((number, query))
        with stage("retrieve"):
            found = self.retriever.search([query for _, query in searched]) if searched else []
        with stage("tokenize"):
            for (number, _), passages in zip(searched, found, strict=True):
                row = rows[number]
                self._take(row, passages)
                if not row.step:
                    row.first_passage = passages[0].text if passages else ""
        _charge(clock, [row.seconds for row in rows])
        fresh = {number for number, _ in searched}
        for number, row in enumerate(rows):
            row.rollout.steps.append(
                Step(
                    step=row.step,
                    query=asked.get(number),
                    passage_ids=tuple(row.evidence),
                    retrieved=number in fresh,
                    committed=row.committed,
                    remasked=row.remasked,
                    seconds=row.seconds,
                )
            )
            row.committed, row.remasked, row.seconds = (), (), {}

    def _finish(self, rows: list[Row]) -> None:
        """Reads the response of finished rows and cites its evidence."""
        with stage("detokenize"):
            for row in rows:
                rollout, ids = row.rollout, row.canvas.ids.tolist()
                end = next((n for n, t in enumerate(ids) if t in self.tokenizer.end_ids), len(ids))
                text, spans = self.tokenizer.spans(ids[:end])
                blanks = len(text) - len(text.lstrip())
                rollout.response = text.strip()
                steps = rollout.commit_steps()
                rollout.citations = cite(
                    rollout.response,
                    [(start - blanks, stop - blanks) for start, stop in spans],
                    [steps[position] for position in range(end)],
                    rollout.evidence_at,
                    rollout.evidence_texts,
                    rollout.question,
                )
                rollout.finished = True


def as_questions(questions: Sequence[str | Question]) -> list[Question]:
    """Questions as records; texts get the ids q1, q2, ... by their place."""
    numbered = typed_questions([q if isinstance(q, str) else q.question for q in questions])
    asked = [
        given if isinstance(given, Question) else record
        for given, record in zip(questions, numbered, strict=True)
    ]
    if len({question.id for question in asked}) < len(asked):
        raise QuestionError("two questions have the same id")
    return asked


def read_proposals(
    logits: Tensor, uniform: Tensor | None, temperature: float, written: Tensor, mask_id: int
) -> NDArray[np.float64]:
    """(5, n) on the host: token, confidence, entropy, margin, and the probability of `written`.

    logits: (n, V) float32. The token is the most probable one, or with `temperature` the one at the
    quantile `uniform` (n,) of softmax(logits / temperature); the mask itself is never proposed. Its
    confidence is its probability at temperature 1.
    """
    probability = logits.softmax(-1)
    entropy = torch.special.entr(probability).sum(-1)
    best = probability.topk(2, dim=-1)
    allowed = logits.index_fill(1, torch.tensor([mask_id], device=logits.device), -math.inf)
    token = allowed.argmax(-1)
    if uniform is not None:
        above = allowed.double() - allowed.amax(-1, keepdim=True)
        cumulative = (above / temperature).softmax(-1).cumsum(-1)
        quantile = uniform.to(logits.device)[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, quantile).squeeze(1).clamp(max=logits.shape[1] - 1)
    confidence, old = (
        probability.gather(1, ids[:, None]).squeeze(1) for ids in (token, written.to(logits.device))
    )
    margin = best.values[:, 0] - best.values[:, 1]
    # Token ids are exact in float32 below 2 ** 24; not every device has float64.
    found = torch.stack([x.float() for x in (token, confidence, entropy, margin, old)])
    return found.cpu().numpy().astype(np.float64)


def _charge(clock: StageClock, shares: list[dict[str, float]]) -> None:
    """Splits the seconds since the last call among the rows that took part in the call."""
    for name, seconds in clock.take().items():
        for share in shares:
            share[name] = share.get(name, 0.0) + seconds / len(shares)


def _record(rows: list[Row], on_step: OnStep | None) -> None:
    if on_step is not None:
        for row in rows:
            on_step(row.rollout)
