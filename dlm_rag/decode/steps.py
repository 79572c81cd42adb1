"""What a step does to rows: denoise and commit, ask, receive evidence, close.

Each part takes the rows that it is for and leaves its results in them; `overlap.py` puts them in order.
"""

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property, partial

import numpy as np

from dlm_rag.decode.canvas import Canvas, UniformNoiseCanvas
from dlm_rag.decode.citations import cite_passages, find_grounded_tokens
from dlm_rag.decode.copy_sources import CopySources, SeparatorTokens
from dlm_rag.decode.model_runner import ModelRunner
from dlm_rag.decode.policy_sampling import ask_commit_head, decide_search
from dlm_rag.decode.rollout import Action, CommittedToken, Rollout, RolloutStep
from dlm_rag.decode.row import PendingSearch, Row, SearchResult
from dlm_rag.decode.step_input import build_model_input
from dlm_rag.diffusion.commit_rules import Proposals, RuleContext, choose_commits, compute_step_sizes
from dlm_rag.diffusion.uniform_decoding import has_converged, uniform_tokens
from dlm_rag.errors import QuestionError, UserError
from dlm_rag.evidence.prompt_segments import (
    LaidOutPrompt,
    append_passages,
    lay_out_prompt,
    order_by_arrival,
)
from dlm_rag.evidence.truncation import ContextBudget, FittedPrompt, fit_passages, keep_shorter_texts
from dlm_rag.model.policy_heads import PolicyHeads
from dlm_rag.nvtx_ranges import StageClock, profile_stage
from dlm_rag.retrieval.base import PartialSearchError, Retriever, interleave_rankings
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import (
    Query,
    build_query,
    find_query_policy,
    is_retrieval_due,
    resolve_query_threshold,
)
from dlm_rag.retrieval.retry import SearchUnavailableError
from dlm_rag.text import split_words
from dlm_rag.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class StepExecutor:
    """The parts of a step, with all that they need beside the rows."""

    def __init__(
        self,
        proposer: ModelRunner,
        retriever: Retriever,
        tokenizer: Tokenizer,
        layout: str,
        heads: PolicyHeads | None = None,
    ) -> None:
        self.model_runner, self.retriever, self.tokenizer = proposer, retriever, tokenizer
        self.layout, self.heads = layout, heads
        self.clock = StageClock()  # open while a step is taken
        self._worker: ThreadPoolExecutor | None = None

    @cached_property
    def _joints(self) -> SeparatorTokens:
        return SeparatorTokens(self.tokenizer)

    def close(self) -> None:
        """Ends the search thread."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def denoise(self, rows: list[Row]) -> None:
        """One pass of the model over all rows, and what each of them commits."""
        if not rows:
            return
        views, proposed = [build_model_input(row) for row in rows], []
        for row, view, proposals in zip(rows, views, self.model_runner.propose(views), strict=True):
            asked = view.positions
            if proposals.positions is not asked and not np.array_equal(proposals.positions, asked):
                row.fail("the model proposed for other positions than it was asked for")
                continue
            if not np.isfinite(proposals.confidence).all():
                row.fail("the denoiser's output is not a number")
                continue
            bound, given = row.settings.remask_threshold, row.follows_last_block
            if bound is not None:
                row.remasked = tuple(row.canvas.remask(proposals, bound).tolist())
            guesses = proposals.most_probable or proposals.subset(row.canvas.masked[proposals.positions])
            if row.provisional is None or not given:  # else the older ones say more: of what is behind it
                row.provisional = guesses
            proposed.append((row, proposals, guesses))
        with profile_stage("commit"):
            for row, proposals, guesses in proposed:
                if isinstance(row.canvas, UniformNoiseCanvas):
                    self._accept(row, row.canvas, proposals)
                else:
                    self._commit(row, proposals, guesses)
                row.lowest_confidence = _lowest_confidence(row)
                if row.provisional_recorder is not None:
                    assert row.provisional is not None
                    masked = row.provisional.subset(row.canvas.masked[row.provisional.positions])
                    row.provisional_delta = row.provisional_recorder.record_step(masked)
        self._split_seconds(rows)

    def _commit(self, row: Row, proposals: Proposals, guesses: Proposals) -> None:
        """Writes down what the rules choose of the proposals; guesses: those for masked positions."""
        settings, canvas, (begin, end) = row.settings, row.canvas, row.current_block
        candidates = guesses.subset(canvas.candidates(settings.block_length, begin, end)[guesses.positions])
        if settings.edit_threshold is not None:
            row.edited = self._records(canvas.edit(proposals, settings.edit_threshold))
            row.edit_rounds_taken = 0 if len(candidates.positions) else row.edit_rounds_taken + 1
        if len(candidates.positions):
            chosen = self._choose(row, candidates)
            canvas.commit(chosen)
            row.committed = self._records(chosen)
        rounds = row.edit_rounds_taken
        over = rounds >= settings.max_edit_steps or (rounds and not row.edited)
        if canvas.frozen_length is not None and over and not canvas.masked[max(0, begin) : end].any():
            canvas.frozen_length, row.edit_rounds_taken = end, 0

    def _accept(self, row: Row, canvas: UniformNoiseCanvas, proposals: Proposals) -> None:
        """Makes what the rule chooses all that is accepted of the block; the most probable tokens, once the
        block has settled or its steps are taken."""
        settings, (_, end), best = row.settings, row.current_block, proposals.most_probable
        assert best is not None and row.uniform_draws is not None
        assert settings.convergence_steps is not None and settings.stop_entropy is not None
        sure = float(proposals.entropy.mean()) < settings.stop_entropy
        over = sure and has_converged(canvas.argmax_history, best.token_ids, settings.convergence_steps)
        over = over or canvas.block_steps + 1 == settings.steps_per_block
        chosen = best if over else self._choose(row, proposals)
        new, other, taken_back = canvas.accept(chosen)
        row.committed, row.edited = self._records(new), self._records(other)
        row.remasked = tuple(taken_back.tolist())
        vocabulary = self.model_runner.shape.vocab_size
        canvas.renoise(best.token_ids, uniform_tokens(row.uniform_draws[1], vocabulary))
        if over:
            canvas.finish_block(end)

    def _choose(self, row: Row, candidates: Proposals) -> Proposals:
        """What the commit rule of the row commits of at least one candidate."""
        settings, least = row.settings, 1
        if settings.steps_per_block is not None and not isinstance(row.canvas, UniformNoiseCanvas):
            begin, end = row.canvas.commit_range(settings.block_length, *row.current_block)
            sizes = compute_step_sizes(end - begin, settings.steps_per_block, settings.schedule)
            least = sizes[min(row.rollout.count_steps_within(begin, end), len(sizes) - 1)]
        context = RuleContext(
            settings,
            least,
            row.uniform_draws,
            partial(self._grounded_mask, row),
            None if self.heads is None else partial(ask_commit_head, row=row, heads=self.heads),
        )
        chosen, sampled = choose_commits(candidates, context)
        if sampled is not None:
            features = () if sampled.features is None else tuple(map(tuple, sampled.features.tolist()))
            positions = tuple(candidates.positions.tolist())
            row.action = Action(positions, sampled.forced, sampled.log_prob, features)
        return chosen

    def _records(self, written: Proposals) -> tuple[CommittedToken, ...]:
        return tuple(
            CommittedToken(position, token, self.tokenizer.token_text(token), confidence, log_prob)
            for position, token, confidence, log_prob in zip(
                written.positions.tolist(), written.token_ids.tolist(), written.confidence.tolist(),
                written.log_prob.tolist(), strict=True,
            )
        )  # fmt: skip

    def _grounded_mask(self, row: Row, candidates: Proposals) -> list[bool]:
        """Whether question or evidence hold the words that each candidate would write."""
        assert row.provisional is not None
        if row.known_words is None:
            texts = (row.question.question, *row.evidence.values())
            row.known_words = frozenset(split_words("\n".join(texts)))
        text, spans = self.tokenizer.decode_with_offsets(row.canvas.fill_provisional(row.provisional, 0.0))
        held = find_grounded_tokens(text, spans, row.known_words)
        return [held[position] for position in candidates.positions]

    def start_search(self, rows: list[Row], aside: bool = False) -> PendingSearch:
        """Asks for the rows that are due, `aside` on a thread of its own.

        Rows whose query has not changed are not searched for.
        """
        asking, queries = [], []
        with profile_stage("detokenize"):
            for row in rows:
                first, row.has_started = not row.has_started, True
                query = self._build_row_query(row)
                if query is None:
                    continue
                row.step_query, key = query.text, self.retriever.key(query)
                if first or (key != row.query_key and self._should_search(row, query)):
                    row.query_key, row.step_searched = key, True
                    if row.settings.retrieval_gate == "policy_head":
                        row.searched_words = frozenset(split_words(query.text))
                    asking.append(row)
                    queries.append(query)
        if not asking:
            found: list[SearchResult] = []
            search = PendingSearch()
        elif aside:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "search")
            search = PendingSearch(asking, self._worker.submit(self._search, queries).result)
        else:
            found = self._search(queries)
            search = PendingSearch(asking, lambda: found)
        self._split_seconds(rows)
        return search

    def _should_search(self, row: Row, query: Query) -> bool:
        """Whether the evidence is to be refreshed with a query that has changed."""
        if row.settings.retrieval_gate != "policy_head":
            return True
        assert self.heads is not None
        yes, features, log_prob = decide_search(row, query.text, self.heads)
        known = row.action or Action()
        row.action = replace(known, search_features=tuple(features.tolist()), search_log_prob=log_prob)
        return yes

    def _build_row_query(self, row: Row) -> Query | None:
        """What a row asks now; None where no refresh is due."""
        settings = row.settings
        if row.step and not is_retrieval_due(
            row.step, settings.retrieval_interval, settings.retrieval_threshold, row.lowest_confidence
        ):
            return None
        response = ""
        if row.provisional is not None:
            entry = resolve_query_threshold(settings.query_policy, settings.query_threshold)
            response = self.tokenizer.query_text(row.canvas.fill_provisional(row.provisional, entry))
        best = row.first_passages[0].text if row.first_passages else ""
        return build_query(settings.query_policy, row.question.question, response, best, str(row.ticket))

    def _search(self, queries: list[Query]) -> list[SearchResult]:
        """What each query finds, or the error that it met; a search that fails is not repeated."""
        with profile_stage("retrieve"):
            try:
                found: list[SearchResult] = list(self.retriever.search(queries))
            except PartialSearchError as error:
                found = error.results
            except UserError:  # no answer of this run can be right any more
                raise
            except SearchUnavailableError as error:  # its sentence says it all
                return [error] * len(queries)
            except Exception as error:
                log.warning("a search failed", exc_info=error)
                return [error] * len(queries)
        if len(found) != len(queries):
            return [RuntimeError(f"{len(found)} results for {len(queries)} queries")] * len(queries)
        return [_check_passages(passages) for passages in found]

    def apply_search(self, search: PendingSearch) -> None:
        """Takes what was found as the evidence of its rows.

        Of a search on another thread only the wait counts as time.
        """
        with profile_stage("retrieve"):
            found = search.results()
        with profile_stage("tokenize"):
            for row, passages in zip(search.rows, found, strict=True):
                if row.rollout.error:  # it has left while the search was under way
                    self.retriever.forget(str(row.ticket))
                elif isinstance(passages, Exception):  # be it the last: the evidence is part of the answer
                    row.fail(f"the search failed: {type(passages).__name__}: {passages}")
                else:
                    self._update_evidence(row, passages)
        self._split_seconds(search.rows)

    def _update_evidence(self, row: Row, passages: list[Passage]) -> None:
        """Makes what fits of the passages the evidence of the row, and lays out its prompt."""
        if not row.step:
            row.first_passages = passages
        elif find_query_policy(row.settings.query_policy).merges_rounds:
            most = max(len(row.first_passages), len(passages))
            passages = interleave_rankings((row.first_passages, passages), most)
        appends = row.settings.finished_block_context == "append" and self.model_runner.shape.block_size
        if appends and row.retrieved_passages:  # what was found stays
            held = {passage.id for passage in row.retrieved_passages}
            passages = [*row.retrieved_passages, *(p for p in passages if p.id not in held)]
        elif self.model_runner.shape.noise is not None and row.retrieved_passages:
            passages = order_by_arrival(row.retrieved_passages, passages)
        if passages == row.retrieved_passages:
            return
        row.retrieved_passages, rollout = passages, row.rollout
        # An id stands for one text throughout a question, whatever a search engine says later.
        texts = {p.id: rollout.passages.setdefault(p.id, p.text) for p in passages}
        try:
            fitted, laid = self._lay_out(row, texts)
            if row.laid_out_prompt is None and laid.round_up_canvas(row.canvas.length) > row.canvas.length:
                row.canvas = replace(row.canvas, length=laid.round_up_canvas(row.canvas.length))
                rollout.canvas_length = row.canvas.length
                fitted, laid = self._lay_out(row, texts)
        except QuestionError as error:
            row.fail(str(error))
            return
        if fitted.truncation.tokens > rollout.cut.get("tokens", 0):
            rollout.cut = asdict(fitted.truncation)
        row.evidence, row.dropped_ids, row.known_words = fitted.texts, fitted.dropped, None
        if row.settings.copy_penalty is not None:
            row.copy_sources = CopySources.from_prompt(fitted.prompt, self._joints)
        keep_shorter_texts(rollout.evidence_texts, row.evidence)
        if appends and row.laid_out_prompt is not None:
            finished = len(laid.canvas_prefix.ids) + row.current_block[0]
            laid = append_passages(row.laid_out_prompt, laid, finished)
        row.laid_out_prompt = laid
        self.model_runner.prefetch(row.laid_out_prompt)

    def _lay_out(self, row: Row, texts: Mapping[str, str]) -> tuple[FittedPrompt, LaidOutPrompt]:
        """The prompt with what fits of the evidence beside the canvas; raises `QuestionError`."""
        shape = self.model_runner.shape
        room = ContextBudget.from_config(shape, self.layout, row.canvas.length)
        fitted = fit_passages(self.tokenizer, row.question.question, texts, room)
        context = row.settings.finished_block_context
        return fitted, lay_out_prompt(fitted.prompt, shape, self.layout, context)

    def end_step(self, rows: list[Row]) -> list[Row]:
        """Writes the step of each row into its rollout, and the text that is certain; returns the rows."""
        for row in rows:
            if row.rollout.error:
                row.rollout.finished = True
                continue
            row.rollout.steps.append(
                RolloutStep(
                    step=row.step,
                    query=row.step_query,
                    passage_ids=tuple(row.evidence),
                    retrieved=row.step_searched,
                    committed=row.committed,
                    remasked=row.remasked,
                    seconds=row.seconds,
                    dropped=row.dropped_ids,
                    edited=row.edited,
                    action=row.action,
                    guesses=row.provisional_delta,
                )
            )
            row.step_query, row.step_searched, row.seconds = None, False, {}
            row.committed, row.remasked, row.edited = (), (), ()
            row.action, row.provisional_delta = None, None
        answered = [row for row in rows if not row.rollout.error and row.is_done]
        with profile_stage("detokenize"):
            for row in answered:
                finish_rollout(row.rollout, row.canvas, self.tokenizer)
                row.seconds = row.rollout.steps[-1].seconds
        self._split_seconds(answered)
        return list(rows)

    def _split_seconds(self, rows: list[Row]) -> None:
        """Splits the seconds since the last call among the rows that took part."""
        for name, value in self.clock.pop_seconds().items():
            for row in rows:
                row.seconds[name] = row.seconds.get(name, 0.0) + value / len(rows)


def _check_passages(found: SearchResult) -> SearchResult:
    """What a retriever, maybe somebody's own, has found, or the error that it is no list of passages."""
    if isinstance(found, Exception):
        return found
    passages = list(found) if isinstance(found, Iterable) else [found]
    for passage in passages:
        fields = (passage.id, passage.title, passage.contents) if isinstance(passage, Passage) else (None,)
        if not all(isinstance(field, str) for field in fields):
            return TypeError(f"a search found {passage!r:.60}, which is no Passage of three texts")
    return passages


def _lowest_confidence(row: Row) -> float | None:
    """Of the guesses where nothing is committed; None where something is everywhere."""
    assert row.provisional is not None
    masked = row.canvas.masked
    still = row.provisional.confidence[masked[row.provisional.positions]]
    unseen = 0.0 if masked.any() else None  # what lies behind the window is not known at all
    return float(still.min()) if len(still) else unseen


def finish_rollout(rollout: Rollout, canvas: Canvas, tokenizer: Tokenizer) -> None:
    """Finishes a rollout: the text up to the first end token, and the evidence behind it."""
    ids = canvas.ids.tolist()
    end = next((n for n, t in enumerate(ids) if t in tokenizer.end_ids), len(ids))
    text, spans = tokenizer.decode_with_offsets(ids[:end])
    blanks = len(text) - len(text.lstrip())
    rollout.response = text.strip()
    steps = rollout.commit_steps()
    rollout.citations = cite_passages(
        rollout.response,
        [(start - blanks, stop - blanks) for start, stop in spans],
        [steps[position] for position in range(end)],
        rollout.evidence_at,
        rollout.evidence_texts,
        rollout.question,
    )
    rollout.finished = True
