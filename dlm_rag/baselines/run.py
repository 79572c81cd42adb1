"""One question under a policy: what it asks of the model and of the retriever, and the record of both."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlm_rag.baselines.chat_client import ChatClient, ChatError, Completion
from dlm_rag.config import Config
from dlm_rag.decode.rollout import Rollout, RolloutStep
from dlm_rag.errors import UserError, summarize_error
from dlm_rag.questions import Question
from dlm_rag.retrieval.base import CorpusRetriever, Retriever
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.query import join_query
from dlm_rag.retrieval.retry import SearchUnavailableError
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
        self.settings = context.config.remote
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
        try:
            if isinstance(retriever, CorpusRetriever):
                with self._context.lock:
                    (found,) = retriever.search([join_query(text, "")])
            else:
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

    def ask_template(self, max_tokens: int | None = None, top: int = 0) -> Completion:
        """The reply to the prompt that `prompt` names, with the evidence there is."""
        form, passages = self._context.template, [passage.text for passage in self.evidence]
        message = form.write_message(self.question, passages)
        if not passages:
            message = NO_FACTS[form.answer].replace("{question}", self.question)
        if form.chat:
            return self.chat(message, form.tail, max_tokens=max_tokens, top=top)
        return self.complete(message + form.tail, max_tokens=max_tokens, top=top)

    def chat(
        self, message: str, written: str = "", *, stop: Sequence[str] = (), max_tokens: int | None = None,
        top: int = 0,
    ) -> Completion:  # fmt: skip
        """The reply to a user's message, in the model's chat template.

        written: what the reply begins with, which it continues. top: log-probabilities of so many of the
        likeliest tokens are asked for.
        """
        body: dict[str, Any] = {"messages": [{"role": "user", "content": message}]}
        if written:  # vLLM and SGLang have these two; llama.cpp continues without being asked
            body["messages"].append({"role": "assistant", "content": written})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if top:
            body |= {"logprobs": True, "top_logprobs": top}
        return self._ask(body, stop, max_tokens)

    def complete(
        self, prompt: str, *, stop: Sequence[str] = (), max_tokens: int | None = None, top: int = 0
    ) -> Completion:
        """What continues a plain text, without any chat template; top: as of `chat`."""
        body: dict[str, Any] = {"prompt": prompt}
        return self._ask(body | ({"logprobs": top} if top else {}), stop, max_tokens)

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
