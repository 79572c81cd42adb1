"""Answers of a model behind a server, some questions at once; used as a decoder is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dlm_rag.baselines import POLICIES, BaselinePolicy
from dlm_rag.baselines.chat_client import ChatError, Completion
from dlm_rag.baselines.run import BaselineContext, BaselineRun
from dlm_rag.config.fields import import_object, resolve_or_import
from dlm_rag.decode.rollout import Rollout, RolloutStep
from dlm_rag.errors import ConfigError
from dlm_rag.questions import Question
from dlm_rag.retrieval.retry import SearchUnavailableError

PROBE_TOKENS = 16  # some servers refuse less
# By `BaselinePolicy.needs`: a short request, its likeliest tokens, and what the server must have for it.
PROBES: dict[str, tuple[Callable[[BaselineRun], Completion], int, str]] = {
    "template": (lambda run: run.ask_template(PROBE_TOKENS), 0, "chat completions"),
    "text": (lambda run: run.complete("Hello", max_tokens=PROBE_TOKENS), 0, "/completions of plain text"),
    "text_log_probs": (
        lambda run: run.complete("Hello", max_tokens=PROBE_TOKENS, top=1), 1, "/completions with logprobs",
    ),
    "chat_log_probs": (
        lambda run: run.ask_template(PROBE_TOKENS, top=2), 2, "two top_logprobs of each token",
    ),
    "continued_chat": (
        lambda run: run.chat("Hello", "Hello,", max_tokens=PROBE_TOKENS), 0, "continue_final_message",
    ),
}  # fmt: skip


class BaselineEngine:
    """Answers questions under a policy."""

    denoiser = None  # there are no weights here

    def __init__(self, context: BaselineContext, settings: dict[str, Any]) -> None:
        """settings: those of every rollout. Raises `ConfigError` for a policy that cannot be imported."""
        name = context.config.remote.policy
        found = resolve_or_import(POLICIES, name, "remote.policy")
        self._policy = found if isinstance(found, BaselinePolicy) else BaselinePolicy(found)
        answer = self._policy.answer
        self._answer = import_object(answer, "remote.policy") if isinstance(answer, str) else answer
        self._context, self._settings = context, settings

    def check(self) -> None:
        """Raises `ConfigError` for a server that does not answer, or not what the policy needs."""
        client, name = self._context.client, self._context.config.remote.policy
        client.check_model()
        ask, top, what = PROBES[self._policy.needs]
        try:
            tokens = ask(BaselineRun(self._context, Question("probe", "Who?"))).tokens
            least = min((len(token.top) for token in tokens), default=0)
            reason = "its reply has none" if least < top else ""
        except ChatError as error:
            reason = str(error)
        if reason:
            raise ConfigError(f"remote.policy={name} needs {what} of {client.server.url}: {reason}")

    def stream(
        self, questions: Sequence[Question], step: Callable[[Rollout], None] | None = None
    ) -> Iterator[Rollout]:
        """The rollouts as they finish; what a question comes to nothing by is its `error`.

        A rollout's seconds are those since the last: together they are the run's. Raises `RunError` and
        `UserError` for what no question can be answered with.
        """
        concurrency, last = self._context.config.remote.concurrency, time.perf_counter()
        for question, found in self._context.client.ask_all(self.answer, questions, concurrency):
            if isinstance(found, ChatError):
                rollout = Rollout(question.id, question.question, "joint", 0, error=str(found))
            else:
                rollout = found
            rollout.steps = rollout.steps or [RolloutStep(0, None, (), retrieved=False)]
            rollout.settings, rollout.finished, now = self._settings, True, time.perf_counter()
            rollout.steps[-1].seconds["server"], last = now - last, now
            yield rollout

    def answer(self, question: Question) -> Rollout:
        """Raises `ChatError`; a search that fails is the rollout's `error`."""
        run = BaselineRun(self._context, question)
        try:
            self._answer(run)
        except SearchUnavailableError as error:
            run.rollout.error = str(error)
        return run.rollout

    def describe(self) -> str:
        """The model, and where it is."""
        server = self._context.client.server
        return f"{server.model} at {server.url}, {self._context.config.remote.concurrency} at once"
