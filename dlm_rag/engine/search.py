"""Searches: when a row asks, what for, and how what was found becomes its evidence."""

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property, partial

from dlm_rag.engine.row import Row, SearchResult
from dlm_rag.engine.runner import ModelRunner
from dlm_rag.errors import QuestionError, UserError
from dlm_rag.evidence.prompt_segments import LaidOutPrompt, lay_out_prompt
from dlm_rag.evidence.truncation import ContextBudget, FittedPrompt, fit_passages, keep_shorter_texts
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.retrieval.base import (
    PartialSearchError,
    Retriever,
    SearchUnavailableError,
    interleave_rankings,
)
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import (
    Query,
    build_query,
    find_query_policy,
    is_retrieval_due,
    resolve_query_threshold,
)
from dlm_rag.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Searches:
    """Searches for rows and lays out their prompts with what was found."""

    def __init__(
        self, model_runner: ModelRunner, retriever: Retriever, tokenizer: Tokenizer, layout: str
    ) -> None:
        self.model_runner, self.retriever, self.tokenizer = model_runner, retriever, tokenizer
        self.layout = layout

    @cached_property
    def _worker(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "search")

    def close(self) -> None:
        if "_worker" in vars(self):
            self._worker.shutdown()
            del self._worker

    def start(self, rows: list[Row], in_background: bool = False) -> None:
        """Searches for the rows that are due and whose query has changed."""
        asking: list[Row] = []
        queries: list[Query] = []
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
        search = self._worker.submit(self._search, queries) if in_background else Future()
        if not in_background:
            search.set_result(self._search(queries))
        for number, row in enumerate(asking):
            row.search = partial(_take_result, search, number)

    def _build_row_query(self, row: Row) -> Query | None:
        """What a row asks now; None where no refresh is due."""
        settings, lowest, response = row.settings, row.lowest_confidence, ""
        if row.step and not is_retrieval_due(
            row.step, settings.retrieval_interval, settings.retrieval_threshold, lowest
        ):
            return None
        if row.provisional is not None:
            least = resolve_query_threshold(settings.query_policy, settings.query_threshold)
            response = self.tokenizer.query_text(row.canvas.fill_provisional(row.provisional, least))
        best = row.first_passages[0].text if row.first_passages else ""
        return build_query(settings.query_policy, row.question.question, response, best)

    def _search(self, queries: list[Query]) -> list[SearchResult]:
        """What each query finds, or the error that it met; a search that fails is not repeated."""
        with profile_stage("retrieve"):
            try:
                found: list[SearchResult] = list(self.retriever.search(queries))
            except PartialSearchError as error:
                found = error.results
            except UserError:  # no answer of this run can be right any more
                raise
            except Exception as error:
                if not isinstance(error, SearchUnavailableError):  # whose sentence says it all
                    log.warning("a search failed", exc_info=error)
                return [error] * len(queries)
        if len(found) != len(queries):
            return [RuntimeError(f"{len(found)} results for {len(queries)} queries")] * len(queries)
        return [_check_passages(passages) for passages in found]

    def apply(self, rows: list[Row]) -> list[Row]:
        """Takes what was found as the evidence of the rows that asked, which are returned.

        Only the wait for it counts as time.
        """
        found = list[tuple[Row, SearchResult]]()
        with profile_stage("retrieve"):
            for row in rows:
                if row.search is not None:
                    found.append((row, row.search()))
                    row.search = None
        with profile_stage("tokenize"):
            for row, passages in found:
                if isinstance(passages, Exception):  # even of the last: evidence is part of the answer
                    row.fail(f"the search failed: {type(passages).__name__}: {passages}")
                else:
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
        first = row.fitted_prompt is None
        if first and (length := laid.round_up_canvas(row.canvas.length)) > row.canvas.length:
            row.canvas, rollout.canvas_length = replace(row.canvas, length=length), length
            fitted, laid = self._lay_out(row, texts)
        if fitted.truncation.tokens > rollout.cut.get("tokens", 0):
            rollout.cut = asdict(fitted.truncation)
        keep_shorter_texts(rollout.evidence_texts, fitted.texts)
        row.retrieved_passages, row.fitted_prompt, row.laid_out_prompt = passages, fitted, laid

    def _merge_passages(self, row: Row, found: list[Passage]) -> list[Passage]:
        """What was found, with what stays of earlier searches, in the order of the prompt."""
        if not row.step:
            row.first_passages = found
        elif find_query_policy(row.settings.query_policy).merges_rounds:
            most = max(len(row.first_passages), len(found))
            found = interleave_rankings((row.first_passages, found), most)
        return self.model_runner.order_passages(row.retrieved_passages or [], found)

    def _lay_out(self, row: Row, texts: Mapping[str, str]) -> tuple[FittedPrompt, LaidOutPrompt]:
        """The prompt with what fits of the evidence next to the canvas; raises `QuestionError`."""
        shape, settings = self.model_runner.shape, row.settings
        room = ContextBudget.from_config(shape, self.layout, row.canvas.length)
        asked = row.question
        fitted = fit_passages(self.tokenizer, asked.question, texts, room, asked.system)
        laid = lay_out_prompt(
            fitted.prompt, shape, self.layout, settings.finished_block_context, settings.mode or "diffusion"
        )
        return fitted, laid


def _take_result(search: Future[list[SearchResult]], number: int) -> SearchResult:
    return search.result()[number]


def _check_passages(found: SearchResult) -> SearchResult:
    """What a retriever, maybe the user's own, has found, or the error that it is not a list of passages."""
    if isinstance(found, Exception):
        return found
    passages = list(found) if isinstance(found, Iterable) else [found]
    for passage in passages:
        fields = (passage.id, passage.title, passage.contents) if isinstance(passage, Passage) else (None,)
        if not all(isinstance(field, str) for field in fields):
            return TypeError(f"a search found {passage!r:.60}, which is not a Passage of three texts")
    return passages
