"""A step of rows: the model proposes, rules commit, and what the rows read is searched for anew.

Searches are made for many rows at once, in the background where a half of them denoises meanwhile.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dlm_rag.decode.rollout import Action, CommittedToken
from dlm_rag.engine.copying import ANSWER_MARK, NO_CHARACTER, WordTable
from dlm_rag.engine.row import Canvas, OpenSpan, Row, SearchResult
from dlm_rag.engine.rules import Proposals, RuleContext, choose_commits, compute_step_sizes, find_rule
from dlm_rag.engine.runner import ModelRunner
from dlm_rag.errors import QuestionError, UserError
from dlm_rag.evidence.prompt_segments import ContextBudget, Evidence, fit_passages, lay_out_prompt
from dlm_rag.model.packed_batch import LaidOutPrompt, RowInput
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.retrieval import base
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class LaunchedStep(NamedTuple):
    """A step that the device is busy with: its rows, what they were shown, and the wait for proposals."""

    rows: list[Row]
    inputs: list[RowInput]
    wait: Callable[[], Sequence[Proposals | None]]


def launch_step(model_runner: ModelRunner, rows: list[Row]) -> LaunchedStep:
    """Starts to denoise rows, each with evidence; at least one."""
    inputs = [build_row_input(row) for row in rows]
    return LaunchedStep(rows, inputs, _propose(model_runner, inputs))


def finish_step(launched: LaunchedStep, tokenizer: Tokenizer) -> None:
    """Commits what the rules of the rows choose of the proposals; a row whose proposals are wrong, or that
    the memory does not hold even alone, fails alone.
    """
    found = launched.wait()
    with profile_stage("commit"):
        for row, shown, proposals in zip(launched.rows, launched.inputs, found, strict=True):
            if not row.is_active:  # cancelled since
                continue
            if proposals is None:
                row.fail("out of memory, also alone: set a smaller retrieval.top_k, or free memory")
            elif np.count_nonzero(np.isfinite(proposals.confidence)) < len(shown.positions):
                row.fail("the denoiser's output is not a number")
            else:
                commit(row, shown, proposals, tokenizer)


def _propose(model_runner: ModelRunner, inputs: list[RowInput]) -> Callable[[], Sequence[Proposals | None]]:
    """Starts a step; its wait returns None for a row that the memory does not hold even alone."""
    with suppress(torch.OutOfMemoryError):
        return model_runner.propose(inputs)
    log.warning("no memory for %d rows at once: each runs alone; set a smaller batch size", len(inputs))
    found = list[Proposals | None]()  # tensors of the failed call are freed by now
    for shown in inputs:
        with suppress(torch.OutOfMemoryError):
            found += model_runner.propose([shown])()
            continue
        found.append(None)
    return lambda: found


def build_row_input(row: Row) -> RowInput:
    """Returns what the model is shown of a row and asked about; draws the numbers that sampling takes.

    Asked about are masked positions that are shown, with edits committed ones of the block; else the next.
    """
    row.view = row.find_view()
    settings, canvas, (begin, end) = row.settings, row.canvas, row.view.shown
    asked = canvas.masked[begin : max(end, begin + 1)].copy()
    if canvas.frozen_length is not None and begin < end:
        asked[: row.view.block[1] - begin] = True
    positions = begin + asked.nonzero()[0]
    if settings.mode == "autoregressive" and row.laid_out_prompt.unseen_segments:
        begin -= 1  # the last token alone sees the evidence
    rule = find_rule(settings.commit_rule)
    draws, temperature = canvas.draw_numbers(settings, row.generator)
    row.draws = draws if rule.samples else None
    quantiles, soft = None, None
    if draws is not None and "actions" in rule.statistics:
        soft = (settings.temperature or 1.0, settings.commit_threshold, settings.gate_temperature)
        quantiles, temperature = draws[:2, positions], 0.0
    elif draws is not None and temperature:
        quantiles = draws[0, positions]
    barred = None if row.words is None else row.words.find_barred(row.written, row.read_texts)
    return RowInput(
        row.ticket, row.laid_out_prompt, canvas.model_ids[:end].copy(), positions, temperature=temperature,
        quantiles=quantiles, soft_threshold=soft, needs_entropy="spread" in rule.statistics,
        finished_length=begin, barred=barred,
    )  # fmt: skip


def commit(row: Row, shown: RowInput, proposals: Proposals, tokenizer: Tokenizer) -> None:
    """Writes on the canvas what the row's rule takes of the proposals, and what they edit; notes this in
    the record of the step, with what is guessed of the rest.
    """
    canvas, ((begin, end), _, (first, last)), step = row.canvas, row.view, row.record
    chosen = None if canvas.chooses_itself else _choose(row, proposals)
    if chosen is not None and row.words is not None:
        chosen = _copy_words(row, row.words, proposals, chosen)
    change = canvas.write(proposals, chosen, row.settings, (begin, end))
    # Where only what is next was asked for, the older guesses say more: of what comes after it.
    if row.provisional is None or first < last:
        row.provisional = canvas.select_provisional(proposals)
    else:
        row.provisional = row.provisional.subset(canvas.masked[row.provisional.positions])
    row.blocks_just_finished = (row.current_block[0] - begin) // (end - begin)
    step.committed = name_tokens(change.committed, canvas, tokenizer)
    step.edited = name_tokens(change.edited, canvas, tokenizer)
    step.remasked = change.remasked
    if step.action is not None:
        row.rollout.states[row.step] = shown
    if row.recorder is not None:
        still = row.provisional.subset(canvas.masked[row.provisional.positions])
        guesses = (still.positions, still.token_ids, still.confidence)
        step.guesses = row.recorder.record_step(*(array.tolist() for array in guesses))


def _choose(row: Row, proposals: Proposals) -> Proposals | None:
    """The proposals to commit in the open spans; None where these have no mask."""
    at, chosen = proposals.positions, list[Proposals]()
    for span in row.view.spans:
        part = slice(*at.searchsorted((span.begin, span.end)))
        candidates = Proposals(proposals.records[part].copy())  # a rule of one's own may write into it
        if row.canvas.frozen_length is not None:  # committed ones are asked for, too
            candidates = candidates.subset(row.canvas.masked[candidates.positions])
        if len(candidates.positions):
            chosen.append(_choose_in_span(row, candidates, span))
    if len(chosen) < 2:
        return chosen[0] if chosen else None
    written = np.concatenate([each.positions for each in chosen])
    return proposals.subset(np.isin(at, written))


def _copy_words(row: Row, words: WordTable, proposals: Proposals, chosen: Proposals) -> Proposals:
    """The chosen proposals up to one that breaks a word of the texts. What can go on in one way alone goes
    on so at once, and so do tokens that a text has there, from a probability of one half on.
    """
    first, ids, texts, settings = row.canvas.first_masked, row.written, row.read_texts, row.settings
    if (chosen.positions != first + np.arange(len(chosen.positions))).any():
        return chosen  # a rule of one's own may leave gaps
    goes_on = find_rule(settings.commit_rule).in_order
    goes_on = goes_on and not (settings.tokens_per_step or settings.steps_per_block)
    left = proposals.subset(proposals.positions < row.view.spans[0].end) if goes_on else chosen
    shown = len(left.positions)
    tokens, confidence, log_prob = (  # of those chosen as drawn
        np.concatenate((getattr(chosen, name), getattr(left, name)[len(chosen.positions) :]))[:shown]
        for name in ("token_ids", "confidence", "log_prob")
    )
    for n in range(shown):
        token = int(tokens[n])
        certain = words.find_certain(ids, texts) if goes_on else None
        if certain is not None:
            token, tokens[n], confidence[n], log_prob[n] = certain, certain, 1.0, 0.0
        elif n and words.find_barred(ids, texts)[token]:
            break
        elif not ids:
            token = tokens[0] = words.begin_title(token, texts)
        elif n >= len(chosen.positions) and (
            token == ids[-1] or confidence[n] < words.find_least_confidence(ids, token, texts)
        ):
            break
        ids.append(token)
    n = len(ids) - len(row.written)
    left = left.subset(np.arange(n))
    return left.replace(token_ids=tokens[:n], confidence=confidence[:n], log_prob=log_prob[:n])


def _choose_in_span(row: Row, candidates: Proposals, span: OpenSpan) -> Proposals:
    """The candidates, of at least one, that the rule commits."""
    settings, least = row.settings, int(span.must_commit)
    if settings.mode == "autoregressive":  # the one token that was asked for
        return candidates
    if span.must_commit and settings.steps_per_block is not None:
        sizes = compute_step_sizes(span.end - span.begin, settings.steps_per_block, settings.schedule)
        least = sizes[min(row.rollout.count_steps_within(span.begin, span.end), len(sizes) - 1)]
    chosen, sampled = choose_commits(candidates, RuleContext(settings, least, row.draws))
    if sampled is not None:
        tokens = np.full(len(sampled.opened), -1)
        tokens[sampled.opened] = chosen.token_ids
        at, how = candidates.positions[: len(tokens)].tolist(), (sampled.forced, sampled.log_prob)
        row.record.action = Action(tuple(at), tuple(tokens.tolist()), *how)
    return chosen


def name_tokens(
    written: Proposals | None, canvas: Canvas, tokenizer: Tokenizer
) -> tuple[CommittedToken, ...]:
    """The written tokens as a step records them; the canvas holds them already."""
    if written is None:
        return ()
    rows = written.records[["positions", "token_ids", "confidence", "log_prob"]].tolist()
    texts = {position: tokenizer.token_text(token) for position, token, _, _ in rows}
    for position in [p for p, text in texts.items() if NO_CHARACTER in text]:
        texts[position] = _spell_part(canvas, position, texts.keys(), tokenizer)
    return tuple([CommittedToken(n, token, texts[n], sure, log_prob) for n, token, sure, log_prob in rows])


def _spell_part(canvas: Canvas, position: int, new: Collection[int], tokenizer: Tokenizer) -> str:
    """Text of a token with a part of a character, which belongs to the part that is written last; new: the
    positions that the step wrote, from left to right."""

    def is_part(n: int) -> bool:
        held = 0 <= n < canvas.length and not canvas.masked[n]
        return held and NO_CHARACTER in tokenizer.token_text(int(canvas.ids[n]))

    begin = next(n for n in range(position, -1, -1) if not is_part(n - 1))
    end = next(n for n in range(position + 1, canvas.length + 1) if not is_part(n) or n in new)
    parts = canvas.ids[begin:position], canvas.ids[begin:end], canvas.ids[position + 1 : end]
    texts = (tokenizer.decode_with_offsets(part.tolist())[0] for part in parts)
    before, whole, after = (text.strip(NO_CHARACTER) for text in texts)
    return whole[len(before) : len(whole) - len(after)]


class Searches:
    """Refreshes what rows read: searches for them, and lays out their prompts with what was found."""

    def __init__(
        self, model_runner: ModelRunner, retriever: base.Retriever, tokenizer: Tokenizer, layout: str
    ) -> None:
        self.model_runner, self.retriever, self.tokenizer = model_runner, retriever, tokenizer
        self.layout, self._worker = layout, ThreadPoolExecutor(1, "search")

    def close(self) -> None:
        self._worker.shutdown()

    def start(self, rows: list[Row], in_background: bool) -> None:
        """Searches for the rows that are due and whose query has changed."""
        asking, queries = list[Row](), list[base.Query]()
        with profile_stage("detokenize"):
            for row in rows:
                if (query := self._build_row_query(row)) is None:
                    continue
                row.record.query, key = query.text, self.retriever.key(query)
                if not row.step or key != row.query_key:
                    row.query_key, row.record.retrieved = key, True
                    asking.append(row)
                    queries.append(query)
        if not asking:
            return
        search = Future[list[SearchResult]]()
        if in_background:
            search = self._worker.submit(self._search, queries)
        else:
            search.set_result(self._search(queries))
        for number, row in enumerate(asking):
            row.search = search, number

    def _build_row_query(self, row: Row) -> base.Query | None:
        """What a row asks now; None where no refresh is due."""
        settings, response = row.settings, ""
        if row.step % settings.retrieval_interval:
            return None
        if row.provisional is not None:
            least = base.resolve_query_threshold(settings.query_policy, settings.query_threshold)
            response = self.tokenizer.query_text(row.canvas.fill_provisional(row.provisional, least))
            if self.tokenizer.template.answer == "titled":  # words of an answer find pages that change it
                titles, mark, _ = response.partition(ANSWER_MARK)
                response = titles + mark
        best = row.first_passages[0].text if row.first_passages else ""
        return base.build_query(settings.query_policy, row.question.question, response, best)

    def _search(self, queries: list[base.Query]) -> list[SearchResult]:
        """What each query finds, or the error that it met."""
        with profile_stage("retrieve"):
            try:
                found: list[SearchResult] = list(self.retriever.search(queries))
            except UserError:  # no answer of this run can be right any more
                raise
            except base.SearchUnavailableError as error:
                return [error] * len(queries)
            except Exception as error:
                if len(queries) > 1:  # one costs no other its own
                    return [result for query in queries for result in self._search([query])]
                log.warning("a search failed", exc_info=error)
                return [error]
        if len(found) != len(queries):
            return [RuntimeError(f"{len(found)} results for {len(queries)} queries")] * len(queries)
        return [_check_passages(passages) for passages in found]

    def apply(self, rows: list[Row]) -> list[Row]:
        """Takes what was found as the evidence of the rows that asked, which are returned."""
        found = list[tuple[Row, SearchResult]]()
        with profile_stage("retrieve"):  # only the wait counts as time
            for row in rows:
                if row.search is not None:
                    search, number = row.search
                    found.append((row, search.result()[number]))
                    row.search = None
        with profile_stage("tokenize"):
            for row, passages in found:
                if isinstance(passages, Exception):  # even of the last: evidence is part of the answer
                    row.fail(f"the search failed: {type(passages).__name__}: {passages}")
                    continue
                try:
                    self._update_evidence(row, passages)
                except QuestionError as error:
                    row.fail(str(error))
        return [row for row, _ in found]

    def _update_evidence(self, row: Row, found: list[Passage]) -> None:
        """Makes what fits of the passages the evidence of the row, and lays out its prompt."""
        rollout, passages = row.rollout, self._merge_passages(row, found)
        if passages == row.retrieved_passages:
            return
        # An id stands for one text throughout a question, whatever a search engine says later.
        texts = {p.id: rollout.passages.setdefault(p.id, p.text) for p in passages}
        fitted, laid = self._lay_out(row, texts)
        first = row.evidence is None
        if first and (length := laid.round_up_canvas(row.canvas.length)) > row.canvas.length:
            row.canvas, rollout.canvas_length = replace(row.canvas, length=length), length
            fitted, laid = self._lay_out(row, texts)
        if fitted.cut["tokens"] > rollout.cut.get("tokens", 0):
            rollout.cut = fitted.cut
        kept = rollout.evidence_texts  # of a passage cut twice the shorter text makes for a safe citation
        for name, text in fitted.texts.items():
            if len(text) < len(kept.setdefault(name, text)):
                kept[name] = text
        row.retrieved_passages, row.evidence, row.laid_out_prompt = passages, fitted, laid

    def _merge_passages(self, row: Row, found: list[Passage]) -> list[Passage]:
        """What was found, with what stays of earlier searches, in the order of the prompt."""
        if not row.step:
            row.first_passages = found
        elif base.find_query_policy(row.settings.query_policy).merges_rounds:
            most = max(len(row.first_passages), len(found), getattr(self.retriever, "top_k", 0))
            found = base.interleave_rankings((row.first_passages, found), most)
        return self.model_runner.order_passages(row.retrieved_passages or [], found)

    def _lay_out(self, row: Row, texts: Mapping[str, str]) -> tuple[Evidence, LaidOutPrompt]:
        """The prompt with what fits of the evidence next to the canvas; raises `QuestionError`."""
        shape, asked = self.model_runner.shape, row.question
        order, mode = row.settings.finished_block_context, row.settings.mode or "diffusion"
        room = ContextBudget.from_config(shape, self.layout, row.canvas.length)
        fitted = fit_passages(self.tokenizer, asked.question, texts, room, asked.system)
        return fitted, lay_out_prompt(fitted.prompt, shape, self.layout, order, mode)

    def note_relevance(self, rows: list[Row]) -> None:
        """Notes how much likelier the passages make the question, for rows whose answer may be withheld."""
        shape, asked, inputs = self.model_runner.shape, list[Row](), list[RowInput]()
        if not (shape.shifted and shape.causal_context and self.tokenizer.template.answer == "titled"):
            return
        for row in (r for r in rows if r.settings.abstain != "never" and r.settings.answer_threshold):
            alone = self._lay_out(row, {})[1]
            other = self.tokenizer.build_prompt("x", [], row.question.system)
            span = find_differing(alone.canvas_prefix.ids, other.head + other.tail)
            if len(span) and row.laid_out_prompt.context_segments:
                asked.append(row)
                for number, laid in ((row.ticket, row.laid_out_prompt), (-row.ticket, alone)):
                    inputs.append(RowInput(number, laid, np.empty(0, np.int64), span))
        try:
            scores = self.model_runner.score(inputs) if inputs else []
        except torch.OutOfMemoryError:
            log.warning("no memory to measure relevance of %d answers: set a smaller batch", len(asked))
            scores = []
        for row, with_passages, without in zip(asked, scores[::2], scores[1::2], strict=False):
            if math.isfinite(found := with_passages - without):
                row.rollout.relevance = found
            else:
                row.fail("the denoiser's output is not a number")
        for row in asked:
            self.model_runner.release(-row.ticket)


def find_differing(ids: Sequence[int], other: Sequence[int]) -> NDArray[np.int64]:
    """Returns where ids differ from others that begin and end alike, counted from the end: below 0."""
    pairs = (zip(ids[1:], other[1:], strict=False), zip(ids[::-1], other[::-1], strict=False))
    front, back = (sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs)
    return np.arange(1 + front - len(ids), -back)


def _check_passages(found: SearchResult) -> SearchResult:
    """What a retriever, maybe the user's own, has found, or the error that it is not a list of passages."""
    if isinstance(found, Exception):
        return found
    passages = list(found) if isinstance(found, Iterable) else [found]
    for passage in passages:
        is_one = isinstance(passage, Passage) and isinstance(passage.id, str)
        if not (is_one and isinstance(passage.title, str) and isinstance(passage.contents, str)):
            return TypeError(f"a search found {passage!r:.60}, which is not a Passage of three texts")
    return passages
