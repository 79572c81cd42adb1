"""The second half of a step: what a row asks, what is found, and the prompt with it as the evidence."""

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property

from dlm_rag.decode.copy_sources import CopySources, SeparatorTokens
from dlm_rag.decode.model_runner import ModelRunner
from dlm_rag.decode.policy_sampling import decide_search
from dlm_rag.decode.rollout import Action
from dlm_rag.decode.row import PendingSearch, Row, SearchResult
from dlm_rag.errors import QuestionError, UserError
from dlm_rag.evidence.prompt_segments import (
    LaidOutPrompt,
    lay_out_prompt,
    order_by_arrival,
)
from dlm_rag.evidence.truncation import ContextBudget, FittedPrompt, fit_passages, keep_shorter_texts
from dlm_rag.model.policy_heads import PolicyHeads
from dlm_rag.nvtx_ranges import profile_stage
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


class RetrievalStep:
    """Searches for rows and lays out their prompts; heads: of `retrieval_gate=policy_head`."""

    def __init__(
        self,
        model_runner: ModelRunner,
        retriever: Retriever,
        tokenizer: Tokenizer,
        layout: str,
        heads: PolicyHeads | None,
    ) -> None:
        self.model_runner, self.retriever, self.tokenizer = model_runner, retriever, tokenizer
        self.layout, self.heads = layout, heads
        self._worker: ThreadPoolExecutor | None = None

    @cached_property
    def _separators(self) -> SeparatorTokens:
        return SeparatorTokens(self.tokenizer)

    def close(self) -> None:
        """Ends the search thread."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def start_search(self, rows: list[Row], aside: bool = False) -> PendingSearch:
        """Searches for the rows that are due and whose query has changed; `aside`: on another thread."""
        asking, queries = [], []
        with profile_stage("detokenize"):
            for row in rows:
                if (query := self._build_row_query(row)) is None:
                    continue
                row.record.query, key = query.text, self.retriever.key(query)
                if not row.step or (key != row.query_key and self._should_search(row, query)):
                    row.query_key, row.record.retrieved = key, True
                    if row.settings.retrieval_gate == "policy_head":
                        row.searched_words = frozenset(split_words(query.text))
                    asking.append(row)
                    queries.append(query)
        if not asking:
            return PendingSearch()
        if aside:
            self._worker = self._worker or ThreadPoolExecutor(1, "search")
            return PendingSearch(asking, self._worker.submit(self._search, queries).result)
        found = self._search(queries)
        return PendingSearch(asking, lambda: found)

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
        return build_query(settings.query_policy, row.question.question, response, best, str(row.ticket))

    def _should_search(self, row: Row, query: Query) -> bool:
        """Whether to refresh the evidence with a query that has changed."""
        if row.settings.retrieval_gate != "policy_head":
            return True
        assert self.heads is not None
        yes, features, log_prob = decide_search(row, query.text, self.heads)
        row.record.action = replace(
            row.record.action or Action(),
            search_features=tuple(features.tolist()),
            search_log_prob=log_prob,
        )
        return yes

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
        """Takes what was found as the evidence of its rows; only the wait for it counts as time."""
        with profile_stage("retrieve"):
            found = search.results()
        with profile_stage("tokenize"):
            for row, passages in zip(search.rows, found, strict=True):
                if row.rollout.error:  # it has left while the search was under way
                    self.retriever.forget(str(row.ticket))
                elif isinstance(passages, Exception):  # even of the last: evidence is part of the answer
                    row.fail(f"the search failed: {type(passages).__name__}: {passages}")
                else:
                    try:
                        self._update_evidence(row, passages)
                    except QuestionError as error:
                        row.fail(str(error))

    def _update_evidence(self, row: Row, passages: list[Passage]) -> None:
        """Makes what fits of the passages the evidence of the row, and lays out its prompt."""
        rollout, before = row.rollout, row.laid_out_prompt
        passages = self._merge_passages(row, passages)
        if passages == row.retrieved_passages:
            return
        row.retrieved_passages = passages
        # An id stands for one text throughout a question, whatever a search engine says later.
        texts = {p.id: rollout.passages.setdefault(p.id, p.text) for p in passages}
        fitted, laid = self._lay_out(row, texts)
        if before is None and (length := laid.round_up_canvas(row.canvas.length)) > row.canvas.length:
            row.canvas, rollout.canvas_length = replace(row.canvas, length=length), length
            fitted, laid = self._lay_out(row, texts)
        if fitted.truncation.tokens > rollout.cut.get("tokens", 0):
            rollout.cut = asdict(fitted.truncation)
        row.fitted_prompt, row.known_words = fitted, None
        if row.settings.copy_penalty is not None:
            row.copy_sources = CopySources.from_prompt(fitted.prompt, self._separators)
        keep_shorter_texts(rollout.evidence_texts, fitted.texts)
        row.laid_out_prompt = laid
        self.model_runner.prefetch(laid)

    def _merge_passages(self, row: Row, found: list[Passage]) -> list[Passage]:
        """What was found, with what stays of earlier searches, in the order of the prompt."""
        if not row.step:
            row.first_passages = found
        elif find_query_policy(row.settings.query_policy).merges_rounds:
            found = interleave_rankings(
                (row.first_passages, found), max(len(row.first_passages), len(found))
            )
        of_noise = self.model_runner.shape.noise is not None
        return order_by_arrival(row.retrieved_passages or [], found) if of_noise else found

    def _lay_out(self, row: Row, texts: Mapping[str, str]) -> tuple[FittedPrompt, LaidOutPrompt]:
        """The prompt with what fits of the evidence next to the canvas; raises `QuestionError`."""
        shape, order = self.model_runner.shape, row.settings.passage_order
        room = ContextBudget.from_config(shape, self.layout, row.canvas.length, order)
        fitted = fit_passages(self.tokenizer, row.question.question, texts, room)
        context = row.settings.finished_block_context
        return fitted, lay_out_prompt(fitted.prompt, shape, self.layout, context)


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
