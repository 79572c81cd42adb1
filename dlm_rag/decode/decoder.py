"""THE loop: denoise, commit, ask, retrieve, and again, for many questions at once.

    step 0     retrieve with the question alone
    step s     encode the evidence and denoise the canvas       (model)
               commit what the commit rule chooses              (diffusion/commit.py)
               build the query from what the canvas says now    (retrieval/query.py)
               retrieve; what was found is the evidence of step s + 1

Questions join as others finish, up to `batch_size` at a time. Rows are packed without padding and
share nothing but the call, so a question gets the same tokens alone and in a batch; what goes wrong
in one row ends that row alone.

With `overlap` the search runs on a thread of its own while the denoiser works: `pipeline`, on the
other half of the rows, which changes no token; `stale`, on the same rows, whose evidence then is one
step late.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.decode.canvas import Canvas
from dlm_rag.decode.citations import cite, held_positions
from dlm_rag.decode.prompts import Room, fit_passages, keep_shorter
from dlm_rag.decode.proposals import read_proposals
from dlm_rag.decode.rollout import Committed, Rollout, Step
from dlm_rag.decode.rows import Found, Group, OnStep, Row, Search
from dlm_rag.diffusion.commit import Proposals, Values, grams, select, settled
from dlm_rag.errors import QuestionError
from dlm_rag.evidence.layout import arrange, encode_canvases, encode_everywhere
from dlm_rag.evidence.pool import Contexts, EvidencePool
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.questions import Question, typed_questions
from dlm_rag.randomness import keyed_generator
from dlm_rag.retrieval.base import Retriever
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import Query, build_query, may_enter, retrieval_due
from dlm_rag.stages import StageClock, mark, stage, step_range
from dlm_rag.text import words
from dlm_rag.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ROWS_READ = 1024  # logits that exist at a time: the vocabulary is the memory


def with_checkpoints_own(config: DecodeConfig, own: DenoiserConfig) -> DecodeConfig:
    """`config` with the lengths of canvas and blocks that it leaves to the checkpoint."""
    canvas, block = config.canvas_length or own.canvas_length, config.block_length
    if block is None:
        block = min(own.block_length or 0, canvas)
    return replace(config, canvas_length=canvas, block_length=block)


class Decoder:
    """Answers questions with a denoiser, a retriever and a `DecodeConfig`.

    `evidence_layout` and the lengths of canvas and blocks default to the checkpoint's own. `engine` says
    how the work is done; it changes no token.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        retriever: Retriever,
        tokenizer: Tokenizer,
        config: DecodeConfig | None = None,
        evidence_layout: str | None = None,
        engine: EngineConfig | None = None,
    ) -> None:
        self.denoiser, self.retriever, self.tokenizer = denoiser, retriever, tokenizer
        self.config = with_checkpoints_own(config or DecodeConfig(), denoiser.config)
        self.engine = engine or EngineConfig()
        self.evidence_layout = evidence_layout or denoiser.config.evidence_layout
        # Revision may still change the text before an end token.
        certain = self.config.stop_early and self.config.revision_threshold is None
        self._stop_at = tokenizer.end_ids if certain else frozenset[int]()
        if self.engine.compile:
            denoiser.compile_layers()
        retriever.remember(int(self.engine.search_memory_gib * 2**30))
        self.forget()

    @property
    def canvas_length(self) -> int:
        """Response positions."""
        assert self.config.canvas_length is not None, "see with_checkpoints_own"
        return self.config.canvas_length

    def forget(self) -> None:
        """Drops all keys and values; to be called when the denoiser's weights have changed."""
        engine, pool = self.engine, None
        if engine.pool_gib:
            pool = EvidencePool(int(engine.pool_gib * 2**30), int(engine.host_pool_gib * 2**30))
        self.contexts = Contexts(
            self.denoiser, pool, masked_only=engine.masked_only, prompt_reuse=self.config.prompt_reuse
        )

    def describe(self) -> str:
        """Device, dtype, kernel and layout, in words for a person, and what was reused."""
        denoiser, reuse = self.denoiser, self.contexts.reuse
        dtype = str(denoiser.dtype).removeprefix("torch.")
        used = f"{denoiser.device.type} {dtype} {denoiser.backend}, {self.evidence_layout} evidence"
        if reuse.wanted:
            used += f", {reuse.share:.1%} of it reused"
        graphs = denoiser.compilations
        return used if graphs is None else f"{used}, {graphs} graphs compiled"

    def decode(self, questions: Sequence[str | Question]) -> list[Rollout]:
        """One finished rollout per question, in order.

        Raises `QuestionError` for a blank question. What fails for one question alone (it does not
        fit the context; its search or its logits fail) is the `error` of its rollout, and logged.
        """
        asked = as_questions(questions)
        by_id = {rollout.id: rollout for rollout in self.stream(asked)}
        return [by_id[question.id] for question in asked]

    def stream(self, questions: Iterable[Question], on_step: OnStep | None = None) -> Iterator[Rollout]:
        """Finished rollouts, each as soon as it is complete; ids must differ.

        `on_step` is called with the growing rollout of every row after each of its steps.
        """
        waiting, turn = deque(questions), 0
        count = min(2, self.config.batch_size) if self.config.overlap == "pipeline" else 1
        groups = [Group(list(range(n, self.config.batch_size, count)), on_step) for n in range(count)]
        take_turn = self._stale_turn if self.config.overlap == "stale" else self._turn
        try:
            with ThreadPoolExecutor(1, "search") as worker:
                while waiting or any(group.rows for group in groups):
                    # As many for each group, where there are fewer questions than places.
                    share = -(-(len(waiting) + sum(len(group.rows) for group in groups)) // count)
                    for group in groups:
                        group.most = share
                        with StageClock() as clock, step_range(turn, len(group.rows)):
                            done = take_turn(group, waiting, worker, clock)
                            _charge(clock.take(), [row.seconds for row in group.rows])
                        yield from (row.rollout for row in done)
                        turn += 1
        finally:  # the caller may not want the rest
            for group in groups:
                for row in group.rows:
                    self._leave(row)

    def _turn(
        self, group: Group, waiting: deque[Question], worker: ThreadPoolExecutor, clock: StageClock
    ) -> list[Row]:
        """Takes what was found, which ends a step of the group's rows, and begins the next."""
        self._receive(group.search)
        done = self._end_step(group, group.rows, clock)
        self._denoise(group.live)
        self._commit(group.live)
        _charge(clock.take(), [row.seconds for row in group.rows])
        self._join(group, waiting)
        group.search = self._ask(group.live, worker if self.config.overlap == "pipeline" else None)
        return done

    def _stale_turn(
        self, group: Group, waiting: deque[Question], worker: ThreadPoolExecutor, clock: StageClock
    ) -> list[Row]:
        """As `_turn`, but what is asked after a step is found while the next step denoises."""
        self._denoise(group.ready)
        self._commit(group.ready)
        denoised = group.ready
        self._receive(group.search)
        ending, joined = group.rows, self._join(group, waiting)
        asking = [
            row for row in denoised if not row.rollout.error and not row.canvas.finished(self._stop_at)
        ]
        group.search = self._ask(asking + joined, worker)
        return self._end_step(group, ending, clock)

    def _join(self, group: Group, waiting: deque[Question]) -> list[Row]:
        """Lets waiting questions in where slots are free; returns their rows."""
        joined: list[Row] = []
        while waiting and group.free and len(group.rows) + len(joined) < group.most:
            question, slot = waiting.popleft(), group.free.pop(0)
            joined.append(
                Row(
                    question=question,
                    slot=slot,
                    canvas=Canvas(self.canvas_length, self.tokenizer.mask_id),
                    shown=min(self.config.canvas_growth or self.canvas_length, self.canvas_length),
                    generator=keyed_generator(self.config.seed, question.id),
                    rollout=Rollout(
                        id=question.id,
                        question=question.question,
                        prompt_layout=self.evidence_layout,
                        canvas_length=self.canvas_length,
                        settings=asdict(self.config),
                    ),
                )
            )
        group.rows = group.rows + joined
        return joined

    def _take(self, row: Row, passages: list[Passage]) -> None:
        """Makes what fits of the passages the evidence of the row, and lays out its prompt."""
        if passages == row.found:
            return
        row.found = passages
        model = self.denoiser.config
        if not self.engine.keep_tokens:
            self.tokenizer.encode.cache_clear()
        # An id stands for one text throughout a question, whatever a search engine says later.
        known = row.rollout.passages
        texts = {passage.id: known.setdefault(passage.id, passage.text) for passage in passages}
        room = Room(
            self.evidence_layout, model.max_position_embeddings, self.canvas_length, model.passage_length
        )
        fitted = fit_passages(self.tokenizer, row.question.question, texts, room)
        if fitted.cut.tokens > row.rollout.cut.get("tokens", 0):
            row.rollout.cut = asdict(fitted.cut)
        row.evidence, row.dropped = fitted.texts, fitted.dropped
        keep_shorter(row.rollout.evidence_texts, row.evidence)
        row.arrangement = arrange(fitted.prompt, self.evidence_layout, model.shifted, model.passage_length)
        self.contexts.prefetch(row.arrangement)
        if self.config.copied_threshold is not None:
            row.grams = grams(fitted.prompt.facts)

    @torch.inference_mode()
    def _denoise(self, rows: list[Row]) -> None:
        """One pass of the denoiser over all rows; leaves the proposals of each row in `guesses`."""
        if not rows:
            return
        revising = self.config.revision_threshold is not None
        laid = [row.arrangement for row in rows if row.arrangement is not None]
        if self.config.trim_canvas:
            for row in rows:
                ends = np.flatnonzero(np.isin(row.canvas.ids[: row.shown], list(self._stop_at)))
                row.shown = int(ends[0]) + 1 if len(ends) else row.shown
        shown = [row.shown for row in rows]
        canvases = [row.canvas.ids[:end].tolist() for row, end in zip(rows, shown, strict=True)]
        where = [
            np.arange(end) if revising else np.flatnonzero(row.canvas.masked[:end])
            for row, end in zip(rows, shown, strict=True)
        ]
        with stage("encode_evidence"):
            contexts, leads = self.contexts.load([row.slot for row in rows], laid, max(shown))
        with stage("denoise"):
            if self.engine.masked_only:
                hidden = encode_canvases(
                    self.denoiser, leads, canvases, contexts, [w.tolist() for w in where]
                )
                logits = map(self.denoiser.read_out, hidden.split(ROWS_READ))
            else:
                hidden, starts = encode_everywhere(self.denoiser, leads, canvases, contexts)
                index = np.concatenate([start + w for start, w in zip(starts, where, strict=True)])
                everywhere = self.denoiser.read_out(hidden)
                logits = iter(everywhere[torch.from_numpy(index).to(hidden.device)].split(ROWS_READ))
            values = self._read(rows, where, logits)
        at = 0
        for row, places in zip(rows, where, strict=True):
            part = values[:, at : at + len(places)]
            at += len(places)
            if not np.isfinite(part).all():
                row.fail("the denoiser's output is not a number")
                continue
            proposals = Proposals(places, part[0].astype(np.int64), part[1], part[2], part[3], part[5])
            if self.config.revision_threshold is not None:
                row.remasked = tuple(row.canvas.remask(part[4], self.config.revision_threshold).tolist())
            row.guesses = proposals.at(row.canvas.masked[places])
            self._grow(row)

    def _grow(self, row: Row) -> None:
        """Shows the next positions of the canvas, unless the text seems to end in those shown now."""
        if self.config.canvas_growth is None or row.guesses is None:
            return
        last = row.canvas.with_guesses(row.guesses, 0.0)[row.shown - 1]
        if last not in self.tokenizer.end_ids:
            row.shown = min(row.canvas.length, row.shown + self.config.canvas_growth)

    def _read(
        self, rows: list[Row], where: list[NDArray[np.int64]], logits: Iterator[Tensor]
    ) -> NDArray[np.float64]:
        """(6, n) of `read_proposals` on the host: the one wait for the device in a step."""
        config = self.config
        written = torch.from_numpy(
            np.concatenate([row.canvas.ids[places] for row, places in zip(rows, where, strict=True)])
        )
        sampled = self._uniform(rows, where)
        spread = config.commit_rule in ("entropy", "margin", "entropy_bound")
        found, at = [], 0
        for part in logits:
            these = slice(at, at + len(part))
            at += len(part)
            uniform = None if sampled is None else sampled[these]
            found.append(
                read_proposals(
                    part.float(),
                    uniform,
                    config.temperature,
                    written[these],
                    self.tokenizer.mask_id,
                    spread,
                )
            )
        return torch.cat(found, dim=1).cpu().numpy().astype(np.float64)

    def _leave(self, row: Row) -> None:
        """Drops what is kept for a row that takes no more steps."""
        self.contexts.release(row.slot)
        self.retriever.forget(row.question.id)

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
                        commit_threshold=self._threshold(row, candidates),
                        tokens_per_step=config.tokens_per_step,
                        bound=config.entropy_bound,
                        held=self._held(row, candidates) if config.commit_rule == "grounded" else (),
                    )
                )
                row.canvas.commit(chosen)
                sure = zip(chosen.confidence.tolist(), chosen.log_prob.tolist(), strict=True)
                row.committed = tuple(
                    Committed(int(p), int(t), self.tokenizer.token_text(int(t)), *how_sure)
                    for p, t, how_sure in zip(chosen.positions, chosen.token_ids, sure, strict=True)
                )
                still = row.canvas.masked[row.guesses.positions]
                confidences = row.guesses.confidence[still]
                row.lowest_confidence = float(confidences.min()) if len(confidences) else None

    def _threshold(self, row: Row, candidates: Proposals) -> float | Values:
        """The commit threshold: one for all, or one for each candidate with `copied_threshold`."""
        config = self.config
        if config.copied_threshold is None:
            return config.commit_threshold
        assert row.guesses is not None
        sure = ~row.canvas.masked
        sure[candidates.positions] = candidates.confidence >= config.commit_threshold
        copied = settled(row.canvas.with_guesses(row.guesses, 0.0), sure.tolist(), row.grams)
        return np.where(
            np.array(copied)[candidates.positions], config.copied_threshold, config.commit_threshold
        )

    def _held(self, row: Row, candidates: Proposals) -> list[bool]:
        """Whether question or evidence hold the words that each candidate would write."""
        assert row.guesses is not None
        known = set(words(row.question.question))
        for passage in row.evidence.values():
            known.update(words(passage))
        text, spans = self.tokenizer.spans(row.canvas.with_guesses(row.guesses, 0.0))
        held = held_positions(text, spans, known)
        return [held[position] for position in candidates.positions]

    def _ask(self, rows: list[Row], worker: ThreadPoolExecutor | None) -> Search:
        """Asks for the rows that are due, on a thread of its own where there is a `worker`.

        Rows whose query has not changed are not searched for.
        """
        config = self.config
        entry = may_enter(config.query, config.query_threshold)
        asking, queries = [], []
        with stage("detokenize"):
            for row in rows:
                if row.step and not retrieval_due(
                    row.step, config.retrieve_every, config.retrieve_below, row.lowest_confidence
                ):
                    continue
                response = ""
                if row.guesses is not None:
                    response = self.tokenizer.query_text(row.canvas.with_guesses(row.guesses, entry))
                query = build_query(
                    config.query, row.question.question, response, row.first_passage, row.question.id
                )
                row.asked, key = query.text, self.retriever.key(query)
                if key != row.query_key:
                    row.query_key, row.searched = key, True
                    asking.append(row)
                    queries.append(query)
        if not asking:
            return Search()
        if worker is not None:
            return Search(asking, worker.submit(self._search, queries).result)
        found = self._search(queries)
        return Search(asking, lambda: found)

    def _search(self, queries: list[Query]) -> list[Found]:
        with stage("retrieve"):
            return self._find(queries)

    def _find(self, queries: list[Query]) -> list[Found]:
        """What each query finds; where a batch fails, each by itself, the error standing for one."""
        try:
            found = self.retriever.search(queries)
            if len(found) != len(queries):
                raise RuntimeError(f"{len(found)} results for {len(queries)} queries")
            return list(found)
        except Exception as error:
            if len(queries) == 1:
                log.warning("a search failed", exc_info=error)
                return [error]
            return [found for query in queries for found in self._find([query])]

    def _receive(self, search: Search) -> None:
        """Takes what was found as the evidence of its rows.

        Of a search on another thread only the wait counts as time.
        """
        with stage("retrieve"):
            found = search.results()
        with stage("tokenize"):
            for row, passages in zip(search.rows, found, strict=True):
                if row.rollout.error:
                    continue
                if isinstance(passages, Exception):
                    if not row.canvas.finished(self._stop_at):  # then it changes no token
                        row.fail(f"the search failed: {type(passages).__name__}: {passages}")
                    continue
                try:
                    self._take(row, passages)
                except QuestionError as error:
                    row.fail(str(error))
                if not row.step:
                    row.first_passage = passages[0].text if passages else ""

    def _end_step(self, group: Group, rows: list[Row], clock: StageClock) -> list[Row]:
        """Writes the step of each row into its rollout; takes finished rows out and returns them."""
        _charge(clock.take(), [row.seconds for row in rows])
        for row in rows:
            if row.rollout.error:
                continue
            row.rollout.steps.append(
                Step(
                    step=row.step,
                    query=row.asked,
                    passage_ids=tuple(row.evidence),
                    retrieved=row.searched,
                    committed=row.committed,
                    remasked=row.remasked,
                    seconds=row.seconds,
                    dropped=row.dropped,
                )
            )
            row.asked, row.searched, row.committed, row.remasked, row.seconds = None, False, (), (), {}
        answered = [row for row in rows if not row.rollout.error and row.canvas.finished(self._stop_at)]
        self._finish(answered)
        _charge(clock.take(), [row.rollout.steps[-1].seconds for row in answered])
        done = [row for row in rows if row.rollout.error or row in answered]
        for row in done:
            row.rollout.finished = True
            mark(f"question {row.question.id}")
            self._leave(row)
        if group.on_step is not None:
            for row in rows:
                if not row.rollout.error:
                    group.on_step(row.rollout)
        group.rows = [row for row in group.rows if not row.rollout.finished]
        group.free += [row.slot for row in done]
        return done

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


def _charge(seconds: dict[str, float], shares: list[dict[str, float]]) -> None:
    """Splits seconds among the rows that took part."""
    for name, value in seconds.items():
        for share in shares:
            share[name] = share.get(name, 0.0) + value / len(shares)
