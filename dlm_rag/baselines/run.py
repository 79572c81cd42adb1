"""Questions under a policy, some at once: what each asks of the model and the retriever, and its record."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from dlm_rag.baselines import POLICIES, BaselinePolicy
from dlm_rag.baselines.chat_client import ChatClient, ChatError, Completion
from dlm_rag.config import Config
from dlm_rag.config.fields import import_object, resolve_or_import
from dlm_rag.decode.rollout import Rollout, RolloutStep
from dlm_rag.errors import ConfigError, UserError, summarize_error
from dlm_rag.questions import Question
from dlm_rag.retrieval.base import CorpusRetriever, Retriever, SearchUnavailableError
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import join_query
from dlm_rag.tokenizer.prompts import PromptTemplate

log = logging.getLogger(__name__)
MAX_TOKENS = 512  # of a reply, where neither a policy nor `decode.max_new_tokens` says
# What a prompt says where there are no facts, by the form of the answer: SARDI's without its words on
# facts, and that of FlashRAG (examples/methods/run_exp.py, zero_shot).
NO_FACTS = {
    "marked": 'Think step-by-step, then provide the final answer after the "###" marker.\n\n'
    "Question:\n{question}",
    "whole": "Answer the question based on your own knowledge. Only give me the answer and do not output "
    "any other words.\n\nQuestion: {question}",
}
NO_FACTS["titled"] = NO_FACTS["marked"]


@dataclass
class BaselineContext:
    """What all questions of a job share."""

    client: ChatClient
    retriever: Retriever
    config: Config
    template: PromptTemplate
    lock: threading.Lock = field(default_factory=threading.Lock)  # of a retriever in this process


class BaselineRun:
    """What a policy can do: ask the model, search, answer.

    Every method may raise `ChatError` or `SearchUnavailableError`: the question has no answer then.

    evidence: the passages that a prompt may show now, in rank order.
    """

    def __init__(self, context: BaselineContext, question: Question) -> None:
        self._context, self.question = context, question.question
        self.evidence: list[Passage] = []
        self.rollout = Rollout(question.id, question.question, "joint", 0)
        self.rollout.usage = dict.fromkeys(
            ("requests", "prompt_tokens", "completion_tokens", "cut_replies"), 0
        )

    def search(self, text: str, keep: int = 0) -> list[Passage]:
        """What a text finds, best first; it replaces the evidence.

        keep: where it joins the evidence instead, the most passages that are kept.
        """
        steps, retriever = self.rollout.steps, self._context.retriever
        is_local = isinstance(retriever, CorpusRetriever)
        turn: AbstractContextManager[Any] = self._context.lock if is_local else nullcontext()
        try:
            with turn:
                (found,) = retriever.search([join_query(text, "")])
        except (UserError, SearchUnavailableError):
            raise
        except Exception as error:
            log.warning("a search failed", exc_info=error)
            raise SearchUnavailableError(f"a search failed ({summarize_error(error)})") from None
        held = self.evidence if keep else []
        self.evidence = list({passage.id: passage for passage in (*held, *found)}.values())[: keep or None]
        self.rollout.passages |= {passage.id: passage.text for passage in found}
        ids = tuple(passage.id for passage in self.evidence)
        steps.append(RolloutStep(len(steps), text, ids, retrieved=True))
        return found

    @staticmethod
    def write_facts(template: str, passages: Sequence[Passage]) -> list[str]:
        """Passages in rank order as a prompt shows them; template: as `PromptTemplate.fact`."""
        form = PromptTemplate(fact=template)
        return [form.write_fact(n, passage.text) for n, passage in enumerate(passages, start=1)]

    @property
    def answer_form(self) -> str:
        """Where the answer stands in a reply to the prompt that `prompt` names."""
        return self._context.template.answer

    def ask_template(self, max_tokens: int | None = None) -> Completion:
        """The reply to the prompt that `prompt` names, with the evidence there is."""
        form, passages = self._context.template, [passage.text for passage in self.evidence]
        message = form.write_message(self.question, passages)
        if not passages:
            message = NO_FACTS[form.answer].replace("{question}", self.question)
        if form.chat:
            return self.chat(message, form.tail, max_tokens=max_tokens)
        return self.complete(message + form.tail, max_tokens=max_tokens)

    def chat(
        self, message: str, written: str = "", *, stop: Sequence[str] = (), max_tokens: int | None = None
    ) -> Completion:
        """The reply to a user's message, in the model's chat template.

        written: what the reply begins with, which it continues.
        """
        body: dict[str, Any] = {"messages": [{"role": "user", "content": message}]}
        if written:  # vLLM and SGLang have these two; llama.cpp continues without being asked
            body["messages"].append({"role": "assistant", "content": written})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return self._ask(body, stop, max_tokens)

    def complete(
        self,
        prompt: str,
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        log_probs: bool = False,
    ) -> Completion:
        """What continues a plain text, without any chat template."""
        return self._ask({"prompt": prompt} | ({"logprobs": 1} if log_probs else {}), stop, max_tokens)

    def _ask(self, body: dict[str, Any], stop: Sequence[str], max_tokens: int | None) -> Completion:
        decode, usage = self._context.config.decode, self.rollout.usage
        if not self.rollout.steps:  # the first search, if any, is not with the question alone
            self.rollout.steps.append(RolloutStep(0, None, (), retrieved=False))
        body |= {"temperature": decode.temperature, "seed": decode.seed}
        body["max_tokens"] = max_tokens or decode.max_new_tokens or MAX_TOKENS
        reply = self._context.client.ask(body | ({"stop": list(stop)} if stop else {}))
        if reply.prompt_tokens is None or reply.response_tokens is None:
            raise ChatError(f"{self._context.client.server.url} does not count tokens in its replies")
        usage["requests"] += reply.requests
        usage["prompt_tokens"] += reply.prompt_tokens
        usage["completion_tokens"] += reply.response_tokens
        usage["cut_replies"] += reply.finish_reason == "length"
        return reply

    def respond(self, text: str, form: str = "marked") -> None:
        """Ends with a response; form: where its answer stands, see `text.find_answer_span`."""
        self.rollout.response, self.rollout.answer_form = text.strip(), form


PROBE_TOKENS = 16  # some servers refuse less
# By `BaselinePolicy.needs`: a short request, and what the server must have for it.
PROBES: dict[str, tuple[Callable[[BaselineRun], Completion], str]] = {
    "template": (lambda run: run.ask_template(PROBE_TOKENS), "chat completions"),
    "text": (lambda run: run.complete("Hello", max_tokens=PROBE_TOKENS), "/completions of plain text"),
    "text_log_probs": (
        lambda run: run.complete("Hello", max_tokens=PROBE_TOKENS, log_probs=True),
        "/completions with logprobs",
    ),
    "continued_chat": (
        lambda run: run.chat("Hello", "Hello,", max_tokens=PROBE_TOKENS), "continue_final_message",
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
        ask, what = PROBES[self._policy.needs]
        try:
            ask(BaselineRun(self._context, Question("probe", "Who?")))
        except ChatError as error:
            raise ConfigError(
                f"remote.policy={name} needs {what} of {client.server.url}: {error}"
            ) from None

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
