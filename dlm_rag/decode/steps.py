"""What a step does to rows: denoise and commit, ask, receive evidence, close.

Each part takes the rows that it is for and leaves its results in them; `schedules.py` puts them in order.
"""

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property

import numpy as np

from dlm_rag.decode.actions import BY_LOT, by_head, sampled, searches
from dlm_rag.decode.canvas import Canvas, NoisyCanvas
from dlm_rag.decode.citations import cite, held_positions
from dlm_rag.decode.copying import Copying, Joints
from dlm_rag.decode.proposer import Proposer
from dlm_rag.decode.rollout import Action, Committed, Rollout, Step
from dlm_rag.decode.row import Row, Search, SearchResult
from dlm_rag.decode.views import view_of
from dlm_rag.diffusion.commit import Indices, Proposals, select, step_sizes
from dlm_rag.diffusion.renoise import settled, uniform_tokens
from dlm_rag.errors import QuestionError, UserError
from dlm_rag.evidence.fitting import FittedPrompt, Room, fit_passages, keep_shorter
from dlm_rag.evidence.layout import Arrangement, arrange, by_arrival, with_new_passages
from dlm_rag.model.heads import Heads
from dlm_rag.retrieval.base import PartialSearchError, Retriever, take_turns
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.link import SearchUnavailableError
from dlm_rag.retrieval.query import Query, build_query, may_enter, retrieval_due
from dlm_rag.stages import StageClock, stage
from dlm_rag.text import words
from dlm_rag.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Steps:
    """The parts of a step, with all that they need beside the rows."""

    def __init__(
        self,
        proposer: Proposer,
        retriever: Retriever,
        tokenizer: Tokenizer,
        layout: str,
        heads: Heads | None = None,
    ) -> None:
        self.proposer, self.retriever, self.tokenizer = proposer, retriever, tokenizer
        self.layout, self.heads = layout, heads
        self.clock = StageClock()  # open while a step is taken
        self._worker: ThreadPoolExecutor | None = None

    @cached_property
    def _joints(self) -> Joints:
        return Joints(self.tokenizer)

    def close(self) -> None:
        """Ends the search thread."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def denoise(self, rows: list[Row]) -> None:
        """One pass of the model over all rows, and what each of them commits."""
        if not rows:
            return
        views, proposed = [view_of(row) for row in rows], []
        for row, view, proposals in zip(rows, views, self.proposer.propose(views), strict=True):
            asked = view.positions
            if proposals.positions is not asked and not np.array_equal(proposals.positions, asked):
                row.fail("the model proposed for other positions than it was asked for")
                continue
            if not np.isfinite(proposals.confidence).all():
                row.fail("the denoiser's output is not a number")
                continue
            bound, given = row.settings.revision_threshold, row.given
            if bound is not None:
                row.remasked = tuple(row.canvas.remask(proposals, bound).tolist())
            guesses = proposals.best or proposals.at(row.canvas.masked[proposals.positions])
            if row.guesses is None or not given:  # else the older ones say more: of what is behind it
                row.guesses = guesses
            proposed.append((row, proposals, guesses))
        with stage("commit"):
            for row, proposals, guesses in proposed:
                if isinstance(row.canvas, NoisyCanvas):
                    self._accept(row, row.canvas, proposals)
                else:
                    self._commit(row, proposals, guesses)
                row.lowest_confidence = _lowest_confidence(row)
                if row.recorder is not None:
                    assert row.guesses is not None
                    row.guessed = row.recorder.take(
                        row.guesses.at(row.canvas.masked[row.guesses.positions])
                    )
        self._charge(rows)

    def _commit(self, row: Row, proposals: Proposals, guesses: Proposals) -> None:
        """Writes down what the rules choose of the proposals; guesses: those for masked positions."""
        settings, canvas, (begin, end) = row.settings, row.canvas, row.block
        candidates = guesses.at(canvas.candidates(settings.block_length, begin, end)[guesses.positions])
        if settings.edit_threshold is not None:
            row.edited = self._records(canvas.edit(proposals, settings.edit_threshold))
            row.rounds = 0 if len(candidates.positions) else row.rounds + 1
        if len(candidates.positions):
            chosen = self._choose(row, candidates)
            canvas.commit(chosen)
            row.committed = self._records(chosen)
        over = row.rounds >= settings.edit_rounds or (row.rounds and not row.edited)
        if canvas.closed is not None and over and not canvas.masked[max(0, begin) : end].any():
            canvas.closed, row.rounds = end, 0

    def _accept(self, row: Row, canvas: NoisyCanvas, proposals: Proposals) -> None:
        """Makes what the rule chooses all that is accepted of the block; the most probable tokens, once the
        block has settled or its steps are taken."""
        settings, (_, end), best = row.settings, row.block, proposals.best
        assert best is not None and row.lots is not None
        assert settings.stable_steps is not None and settings.confident_below is not None
        sure = float(proposals.entropy.mean()) < settings.confident_below
        over = sure and settled(canvas.seen, best.token_ids, settings.stable_steps)
        over = over or canvas.taken + 1 == settings.steps_per_block
        chosen = best if over else proposals.at(self._select(row, proposals))
        new, other, taken_back = canvas.accept(chosen)
        row.committed, row.edited = self._records(new), self._records(other)
        row.remasked = tuple(taken_back.tolist())
        canvas.next_step(best.token_ids, uniform_tokens(row.lots[1], self.proposer.shape.vocab_size))
        if over:
            canvas.close(end)

    def _choose(self, row: Row, candidates: Proposals) -> Proposals:
        """What the commit rule of the row takes of at least one candidate."""
        if row.settings.commit_rule not in BY_LOT:
            return candidates.at(self._select(row, candidates))
        if row.settings.commit_rule == "sampled":
            assert row.lots is not None
            chosen, row.action = sampled(candidates, row.lots)
        else:
            assert self.heads is not None
            chosen, row.action = by_head(candidates, row, self.heads)
        return chosen

    def _select(self, row: Row, candidates: Proposals) -> Indices:
        """Which of at least one candidate a rule without a policy takes."""
        settings, least = row.settings, 1
        if settings.steps_per_block is not None and not isinstance(row.canvas, NoisyCanvas):
            begin, end = row.canvas.commit_block(settings.block_length, *row.block)
            sizes = step_sizes(end - begin, settings.steps_per_block, settings.schedule)
            least = sizes[min(row.rollout.steps_within(begin, end), len(sizes) - 1)]
        assert settings.commit_rule is not None and settings.entropy_bound is not None
        return select(
            settings.commit_rule,
            candidates,
            commit_threshold=settings.commit_threshold,
            tokens_per_step=settings.tokens_per_step,
            bound=settings.entropy_bound,
            held=self._held(row, candidates) if settings.commit_rule == "grounded" else (),
            least=least,
        )

    def _records(self, written: Proposals) -> tuple[Committed, ...]:
        return tuple(
            Committed(position, token, self.tokenizer.token_text(token), confidence, log_prob)
            for position, token, confidence, log_prob in zip(
                written.positions.tolist(), written.token_ids.tolist(), written.confidence.tolist(),
                written.log_prob.tolist(), strict=True,
            )
        )  # fmt: skip

    def _held(self, row: Row, candidates: Proposals) -> list[bool]:
        """Whether question or evidence hold the words that each candidate would write."""
        assert row.guesses is not None
        if row.known_words is None:
            row.known_words = frozenset(words("\n".join((row.question.question, *row.evidence.values()))))
        text, spans = self.tokenizer.spans(row.canvas.with_guesses(row.guesses, 0.0))
        held = held_positions(text, spans, row.known_words)
        return [held[position] for position in candidates.positions]

    def ask(self, rows: list[Row], aside: bool = False) -> Search:
        """Asks for the rows that are due, `aside` on a thread of its own.

        Rows whose query has not changed are not searched for.
        """
        asking, queries = [], []
        with stage("detokenize"):
            for row in rows:
                first, row.begun = not row.begun, True
                query = self._query(row)
                if query is None:
                    continue
                row.asked, key = query.text, self.retriever.key(query)
                if first or (key != row.query_key and self._wants(row, query)):
                    row.query_key, row.searched = key, True
                    if row.settings.search == "head":
                        row.searched_words = frozenset(words(query.text))
                    asking.append(row)
                    queries.append(query)
        if not asking:
            found: list[SearchResult] = []
            search = Search()
        elif aside:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "search")
            search = Search(asking, self._worker.submit(self._search, queries).result)
        else:
            found = self._search(queries)
            search = Search(asking, lambda: found)
        self._charge(rows)
        return search

    def _wants(self, row: Row, query: Query) -> bool:
        """Whether the evidence is to be refreshed with a query that has changed."""
        if row.settings.search != "head":
            return True
        assert self.heads is not None
        yes, features, log_prob = searches(row, query.text, self.heads)
        known = row.action or Action()
        row.action = replace(known, search_features=tuple(features.tolist()), search_log_prob=log_prob)
        return yes

    def _query(self, row: Row) -> Query | None:
        """What a row asks now; None where no refresh is due."""
        settings = row.settings
        if row.step and not retrieval_due(
            row.step, settings.retrieve_every, settings.retrieve_below, row.lowest_confidence
        ):
            return None
        response = ""
        if row.guesses is not None:
            entry = may_enter(settings.query, settings.query_threshold)
            response = self.tokenizer.query_text(row.canvas.with_guesses(row.guesses, entry))
        best = row.first_found[0].text if row.first_found else ""
        return build_query(settings.query, row.question.question, response, best, str(row.ticket))

    def _search(self, queries: list[Query]) -> list[SearchResult]:
        """What each query finds, or the error that it met; a search that fails is not repeated."""
        with stage("retrieve"):
            try:
                found: list[SearchResult] = list(self.retriever.search(queries))
            except PartialSearchError as error:
                found = error.found
            except UserError:  # no answer of this run can be right any more
                raise
            except SearchUnavailableError as error:  # its sentence says it all
                return [error] * len(queries)
            except Exception as error:
                log.warning("a search failed", exc_info=error)
                return [error] * len(queries)
        if len(found) != len(queries):
            return [RuntimeError(f"{len(found)} results for {len(queries)} queries")] * len(queries)
        return [_checked(passages) for passages in found]

    def receive(self, search: Search) -> None:
        """Takes what was found as the evidence of its rows.

        Of a search on another thread only the wait counts as time.
        """
        with stage("retrieve"):
            found = search.results()
        with stage("tokenize"):
            for row, passages in zip(search.rows, found, strict=True):
                if row.rollout.error:  # it has left while the search was under way
                    self.retriever.forget(str(row.ticket))
                elif isinstance(passages, Exception):  # be it the last: the evidence is part of the answer
                    row.fail(f"the search failed: {type(passages).__name__}: {passages}")
                else:
                    self._take(row, passages)
        self._charge(search.rows)

    def _take(self, row: Row, passages: list[Passage]) -> None:
        """Makes what fits of the passages the evidence of the row, and lays out its prompt."""
        if not row.step:
            row.first_found = passages
        elif row.settings.query == "two_rounds":
            most = max(len(row.first_found), len(passages))
            passages = take_turns((row.first_found, passages), most)
        appends = row.settings.finished_blocks == "append" and self.proposer.shape.attention_block
        if appends and row.found:  # what was found stays
            held = {passage.id for passage in row.found}
            passages = [*row.found, *(passage for passage in passages if passage.id not in held)]
        elif self.proposer.shape.noise is not None and row.found:
            passages = by_arrival(row.found, passages)
        if passages == row.found:
            return
        row.found, rollout = passages, row.rollout
        # An id stands for one text throughout a question, whatever a search engine says later.
        texts = {p.id: rollout.passages.setdefault(p.id, p.text) for p in passages}
        try:
            fitted, laid = self._lay_out(row, texts)
            if row.arrangement is None and laid.canvas_length(row.canvas.length) > row.canvas.length:
                row.canvas = replace(row.canvas, length=laid.canvas_length(row.canvas.length))
                rollout.canvas_length = row.canvas.length
                fitted, laid = self._lay_out(row, texts)
        except QuestionError as error:
            row.fail(str(error))
            return
        if fitted.cut.tokens > rollout.cut.get("tokens", 0):
            rollout.cut = asdict(fitted.cut)
        row.evidence, row.dropped, row.known_words = fitted.texts, fitted.dropped, None
        if row.settings.copy_price is not None:
            row.copying = Copying.of(fitted.prompt, self._joints)
        keep_shorter(rollout.evidence_texts, row.evidence)
        if appends and row.arrangement is not None:
            laid = with_new_passages(row.arrangement, laid, len(laid.lead.ids) + row.block[0])
        row.arrangement = laid
        self.proposer.prefetch(row.arrangement)

    def _lay_out(self, row: Row, texts: Mapping[str, str]) -> tuple[FittedPrompt, Arrangement]:
        """The prompt with what fits of the evidence beside the canvas; raises `QuestionError`."""
        shape = self.proposer.shape
        room = Room.of(shape, self.layout, row.canvas.length)
        fitted = fit_passages(self.tokenizer, row.question.question, texts, room)
        return fitted, arrange(fitted.prompt, shape, self.layout, row.settings.finished_blocks)

    def end_step(self, rows: list[Row]) -> list[Row]:
        """Writes the step of each row into its rollout, and the text that is certain; returns the rows."""
        for row in rows:
            if row.rollout.error:
                row.rollout.finished = True
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
                    edited=row.edited,
                    action=row.action,
                    guesses=row.guessed,
                )
            )
            row.asked, row.searched, row.seconds = None, False, {}
            row.committed, row.remasked, row.edited, row.action, row.guessed = (), (), (), None, None
        answered = [row for row in rows if not row.rollout.error and row.ended]
        with stage("detokenize"):
            for row in answered:
                read_response(row.rollout, row.canvas, self.tokenizer)
                row.seconds = row.rollout.steps[-1].seconds
        self._charge(answered)
        return list(rows)

    def _charge(self, rows: list[Row]) -> None:
        """Splits the seconds since the last call among the rows that took part."""
        for name, value in self.clock.take().items():
            for row in rows:
                row.seconds[name] = row.seconds.get(name, 0.0) + value / len(rows)


def _checked(found: SearchResult) -> SearchResult:
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
    assert row.guesses is not None
    masked = row.canvas.masked
    still = row.guesses.confidence[masked[row.guesses.positions]]
    unseen = 0.0 if masked.any() else None  # what lies behind the window is not known at all
    return float(still.min()) if len(still) else unseen


def read_response(rollout: Rollout, canvas: Canvas, tokenizer: Tokenizer) -> None:
    """Finishes a rollout: the text up to the first end token, and the evidence behind it."""
    ids = canvas.ids.tolist()
    end = next((n for n, t in enumerate(ids) if t in tokenizer.end_ids), len(ids))
    text, spans = tokenizer.spans(ids[:end])
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
