"""Questions under a policy, some at once: what each asks of the model and the retriever, and its record.

The published policies of when to retrieve search the same index with the same retriever, `retrieval.top_k`
passages at a time, and differ in when, with what, and in which passages a prompt shows. Numbers are those
of the publications named; prompts are in prompts.yaml. A request that fails temporarily (no connection, no
answer in time, 429, 5xx, an answer of another form) is repeated after a pause that doubles; other refusals
are reported in the server's words.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import yaml

from dlm_rag.baselines import POLICIES, BaselinePolicy
from dlm_rag.config import Config
from dlm_rag.config.fields import import_object, resolve_or_import
from dlm_rag.decode.rollout import Rollout, RolloutStep
from dlm_rag.errors import ConfigError, RunError, UserError, suggest_nearest, summarize_error
from dlm_rag.files.checked_json import parse_json
from dlm_rag.questions import Question
from dlm_rag.retrieval import http
from dlm_rag.retrieval.base import CorpusRetriever, Retriever, SearchUnavailableError, join_query
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.text import replace_control_chars
from dlm_rag.tokenizer.prompts import PromptTemplate

log = logging.getLogger(__name__)
REQUEST_SECONDS, ATTEMPTS = 120.0, 5  # of a request: seconds for its whole answer, and attempts
INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 30.0  # pauses between attempts
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
USAGE_COUNTS = ("prompt_tokens", "completion_tokens")
_MODEL_URL = re.compile(r"openai(s?)://([^/?#]+(?:/[^?#]+)*?/v1)/([^?#]+)")
MAX_TOKENS = 512  # of a reply, where neither a policy nor `decode.max_new_tokens` says
REFUSED_TEXT_STATUSES = (400, 413, 422)  # of one text alone
# Passages as each prompt shows them.
IRCOT_FACT = "Wikipedia Title: {title}\n{text}"
SEARCH_R1_FACT = "Doc {number}(Title: {title}) {text}"
IRCOT_ROUNDS, IRCOT_PASSAGES, IRCOT_TOKENS = 8, 15, 256
SEARCH_R1_TURNS, SEARCH_R1_TOKENS, SEARCH_R1_PASSAGES = 4, 500, 10**6
PROMPTS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text("utf-8"))
MIN_SENTENCE_CHARS = 5
# Not after an initial or a title: "Edward L. Cahn".
_SENTENCE_END = re.compile(r"(?<!\b[A-Z])(?<!\b[MDS][rt])(?<!\bMrs)[.?!](?=\s)")
_REASONING = re.compile(r"thus\b|so\b|that is,|therefore|hence", re.IGNORECASE)
_ACTION_TAG = re.compile(r"<(search|answer)>")


class ChatError(http.UnusableAnswerError):
    """A request came to nothing: refused with an HTTP status, or (status None) every attempt failed."""


@dataclass(frozen=True)
class Completion:
    """What the model wrote; token counts are the server's, None where it gives none."""

    text: str
    finish_reason: str
    prompt_tokens: int | None
    response_tokens: int | None
    requests: int = 1


class ChatClient:
    """Asks the `model` at `url`, which ends in /v1; may be used by several threads.

    address: openai://HOST:PORT/v1/NAME; setting: that names it, as errors begin. key_variable: of the
    environment, that holds the server's key. Raises `ConfigError`.
    """

    def __init__(self, setting: str, address: str, key_variable: str) -> None:
        if (found := _MODEL_URL.fullmatch(address)) is None or "@" in found[2]:
            raise ConfigError(f"{setting}={address} is not openai://HOST:PORT/v1/NAME (openais:// for TLS)")
        self.url, self.model = f"http{found[1]}://{found[2]}", found[3]
        self._setting = f"{setting}={address}"
        self._client = http.HttpClient(self.url, key_variable, use_proxy=True)

    def check_model(self) -> None:
        """Raises `ConfigError` if the server does not answer, or does not have the model."""
        try:
            names = [str(model["id"]) for model in self._send("/models")["data"]]
        except (ChatError, http.RetryableFailure, LookupError, TypeError) as error:
            said = f" ({error})" if isinstance(error, ChatError | http.RetryableFailure) else ""
            raise ConfigError(
                f"{self._setting} does not list its models{said}: give the URL of an OpenAI-style server, "
                "with its /v1"
            ) from None
        if self.model not in names:
            known = replace_control_chars(", ".join(names)) or "none"
            near = suggest_nearest(self.model, names)
            raise ConfigError(f"{self._setting} has no model '{self.model}', but {known}{near}")

    def ask(self, body: dict[str, Any]) -> Completion:
        """The reply to messages, or what continues a prompt. Raises `ChatError`."""
        failure = ""
        pauses = http.iterate_backoff_seconds(INITIAL_RETRY_SECONDS, MAX_RETRY_SECONDS)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return replace(self._complete(body), requests=attempt)
            except http.RetryableFailure as error:
                failure = str(error)
            if attempt < ATTEMPTS:
                time.sleep(next(pauses))
        raise ChatError(f"{self.url} failed {ATTEMPTS} times, at last with {failure}")

    def _complete(self, body: dict[str, Any]) -> Completion:
        is_chat = "messages" in body
        answer = self._send("/chat/completions" if is_chat else "/completions", body)
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if is_chat else choice["text"]
            if text is None and choice.get("finish_reason") == "length":  # all that it wrote were thoughts
                text = ""
        except (LookupError, TypeError):
            text = None
        if not isinstance(text, str):
            raise http.RetryableFailure("an answer of another form (a reply without text)")
        usage = answer.get("usage")
        counts = [usage.get(name) if isinstance(usage, dict) else None for name in USAGE_COUNTS]
        known = [count if type(count) is int and 0 <= count < 2**53 else None for count in counts]
        return Completion(text, str(choice.get("finish_reason")), known[0], known[1])

    def _send(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns the JSON of an answer; raises `ChatError` for a refusal, else `RetryableFailure`."""
        asked = None if body is None else {"model": self.model} | body
        try:
            answer = self._client.send(self.url + path, asked, REQUEST_SECONDS, RETRYABLE_STATUSES)
            found = parse_json(answer, "an answer of another form", UserError, "answer")
        except UserError as error:
            raise http.RetryableFailure(str(error)) from None
        except http.UnusableAnswerError as error:
            said = str(error) if error.status else f"{self.url}: {error}"
            raise ChatError(said, error.status) from None
        if isinstance(found, dict) and found.get("error"):  # that some servers call a success
            raise http.RetryableFailure(self._client.describe_refusal(200, answer))
        return found


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
        self.answer_form = context.template.answer  # of a reply to the prompt that `prompt` names
        self.evidence: list[Passage] = []
        self.rollout = Rollout(question.id, question.question, "joint", 0)
        self.rollout.usage = dict.fromkeys(("requests", *USAGE_COUNTS, "cut_replies"), 0)

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

    def ask_template(self, max_tokens: int | None = None) -> Completion:
        """The reply to the prompt that `prompt` names, with the evidence there is."""
        form, passages = self._context.template, [passage.text for passage in self.evidence]
        message = form.write_message(self.question, passages)
        if not passages:
            kind = "whole" if form.answer == "whole" else "marked"
            message = PROMPTS[f"no_facts_{kind}"].replace("{question}", self.question)
        if form.chat:
            return self.chat(message, form.tail, max_tokens=max_tokens)
        return self.complete(message + form.tail, max_tokens=max_tokens)

    def chat(
        self, message: str, written: str = "", *, stop: Sequence[str] = (), max_tokens: int | None = None
    ) -> Completion:
        """The reply to a user's message in the model's chat template; written: what it continues."""
        body: dict[str, Any] = {"messages": [{"role": "user", "content": message}]}
        if written:  # vLLM and SGLang have these two; llama.cpp continues without being asked
            body["messages"].append({"role": "assistant", "content": written})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return self._ask(body, stop, max_tokens)

    def complete(
        self, prompt: str, *, stop: Sequence[str] = (), max_tokens: int | None = None
    ) -> Completion:
        """What continues a plain text, without any chat template."""
        return self._ask({"prompt": prompt}, stop, max_tokens)

    def _ask(self, body: dict[str, Any], stop: Sequence[str], max_tokens: int | None) -> Completion:
        decode, usage = self._context.config.decode, self.rollout.usage
        if not self.rollout.steps:  # the first search, if any, is not with the question alone
            self.rollout.steps.append(RolloutStep(0, None, (), retrieved=False))
        body |= {"temperature": decode.temperature, "seed": decode.seed}
        body["max_tokens"] = max_tokens or decode.max_new_tokens or MAX_TOKENS
        reply = self._context.client.ask(body | ({"stop": list(stop)} if stop else {}))
        if reply.prompt_tokens is None or reply.response_tokens is None:
            raise ChatError(f"{self._context.client.url} does not count tokens in its replies")
        usage["requests"] += reply.requests
        usage["prompt_tokens"] += reply.prompt_tokens
        usage["completion_tokens"] += reply.response_tokens
        usage["cut_replies"] += reply.finish_reason == "length"
        return reply

    def respond(self, text: str, form: str = "marked") -> None:
        """Ends with a response; form: where its answer stands, see `text.find_answer`."""
        self.rollout.response, self.rollout.answer_form = text.strip(), form


def write_facts(template: str, passages: Sequence[Passage]) -> list[str]:
    """Passages in rank order as a prompt shows them; template: as `PromptTemplate.fact`."""
    form = PromptTemplate(fact=template)
    return [form.write_fact(n, passage.text) for n, passage in enumerate(passages, start=1)]


def find_action(text: str, closed: bool = True) -> tuple[str, str] | None:
    """Returns the first search or answer of a text and its content; closed=False: the first left open."""
    last_close = {kind: text.rfind(f"</{kind}>") for kind in ("search", "answer")}
    for tag in _ACTION_TAG.finditer(text):
        if (last_close[tag[1]] >= tag.end()) == closed:
            stop = text.find(f"</{tag[1]}>", tag.end()) if closed else len(text)
            return tag[1], text[tag.end() : stop]
    return None


def cut_sentence(text: str) -> str:
    """The text up to the end of its first sentence of at least `MIN_SENTENCE_CHARS` characters."""
    ends = (found.end() for found in _SENTENCE_END.finditer(text))
    return text[: next((end for end in ends if end >= MIN_SENTENCE_CHARS), len(text))]


def answer_directly(run: BaselineRun) -> None:
    """No retrieval."""
    run.respond(run.ask_template().text, run.answer_form)


def answer_static(run: BaselineRun) -> None:
    """One search, with the question; then the answer."""
    run.search(run.question)
    answer_directly(run)


def answer_ircot(run: BaselineRun) -> None:
    """IRCoT (Trivedi et al. 2023, arXiv 2212.10509, sections 3 and 4).

    A search with the question, then with each new sentence of the chain of thought that is no mere
    conclusion, up to 8 or "answer is"; passages add up to 15, and a reader writes a chain with all of them.
    """

    def think(written: str) -> str:
        facts = "\n\n".join(write_facts(IRCOT_FACT, run.evidence))
        prompt = f"{PROMPTS['ircot']}\n\n\n{facts}\n\nQ: {run.question}\nA: {written}"
        return run.complete(prompt.rstrip(), stop=["\n"], max_tokens=IRCOT_TOKENS).text.strip()

    chain: list[str] = []
    for _ in range(IRCOT_ROUNDS):
        facts = [sentence for sentence in chain if not _REASONING.match(sentence)]
        run.search(facts[-1] if facts else run.question, keep=IRCOT_PASSAGES)
        sentence = cut_sentence(think(" ".join(chain)))
        chain.append(sentence)
        if not sentence or "answer is" in sentence:
            break
    response = think("")
    run.respond(response, "marked" if "answer is" in response else "whole")


def answer_search_r1(run: BaselineRun) -> None:
    """Search-R1's loop (Jin et al. 2025, arXiv 2503.09516, algorithm 1), of trained and other models.

    The model writes until it closes a search or an answer; what a search finds is put into its reply, which
    goes on. After 4 turns it has one more, whose search is not made.
    """
    asked = run.question.strip()
    asked += "?" * (not asked.endswith("?"))
    message = PROMPTS["search_r1"].replace("{question}", asked) + "\n"
    dialogue, replies = "", ""
    for turn in range(SEARCH_R1_TURNS + 1):
        reply = run.chat(message, dialogue, stop=["</search>", "</answer>"], max_tokens=SEARCH_R1_TOKENS)
        text, left_open = reply.text, find_action(reply.text, closed=False)
        if left_open and reply.finish_reason == "stop":  # servers leave out what stopped them
            text += f"</{left_open[0]}>"
        replies, action = replies + text, find_action(text)
        if turn == SEARCH_R1_TURNS or (action and action[0] == "answer"):
            break
        dialogue += text
        if action:
            found = run.search(action[1].strip(), keep=SEARCH_R1_PASSAGES)
            facts = "\n".join(write_facts(SEARCH_R1_FACT, found))
            dialogue += f"\n\n<information>{facts}</information>\n\n"
        else:
            dialogue += f"\n{PROMPTS['search_r1_invalid']}\n"
    run.respond(replies)


PROBE_TOKENS = 16  # some servers refuse less
# By `BaselinePolicy.needs`: a short request, and what the server must have for it.
PROBES: dict[str, tuple[Callable[[BaselineRun], Completion], str]] = {
    "template": (lambda run: run.ask_template(PROBE_TOKENS), "chat completions"),
    "text": (lambda run: run.complete("Hello", max_tokens=PROBE_TOKENS), "/completions of plain text"),
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
        found = resolve_or_import(POLICIES, name, "remote.policy", 1)
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
            raise ConfigError(f"remote.policy={name} needs {what} of {client.url}: {error}") from None

    def stream(
        self, questions: Sequence[Question], step: Callable[[Rollout], None] | None = None
    ) -> Iterator[Rollout]:
        """The rollouts as they finish; what a question comes to nothing by is its `error`.

        A rollout's seconds are those since the last: together they are the run's. Raises `UserError` for
        what no question can be answered with, and `RunError` where the server refuses all requests, and
        once so many in a row came to nothing that it must be gone.
        """
        concurrency, last, in_a_row = self._context.config.remote.concurrency, time.perf_counter(), 0
        # Its threads are daemons: whoever stops this need not wait for answers that are under way.
        with ThreadPool(concurrency) as pool:
            for rollout, gone in pool.imap_unordered(self._answer_one, questions):
                rollout.steps = rollout.steps or [RolloutStep(0, None, (), retrieved=False)]
                rollout.settings, rollout.finished, now = self._settings, True, time.perf_counter()
                rollout.steps[-1].seconds["server"], last = now - last, now
                yield rollout
                in_a_row = in_a_row + 1 if gone else 0
                if in_a_row > concurrency:
                    raise RunError(f"{rollout.error}: the same command resumes here")

    def _answer_one(self, question: Question) -> tuple[Rollout, bool]:
        """The rollout of a question, and whether the server did not answer."""
        run = BaselineRun(self._context, question)
        try:
            self._answer(run)
        except SearchUnavailableError as error:
            run.rollout.error = str(error)
        except ChatError as error:
            if error.status not in (None, *REFUSED_TEXT_STATUSES):
                said = f"{self._context.client.url} refuses ({error})"
                raise RunError(f"{said}: what is there is kept") from None
            failed = Rollout(question.id, question.question, "joint", 0, error=str(error))
            return failed, error.status is None
        return run.rollout, False

    def describe(self) -> str:
        """The model, and where it is."""
        client = self._context.client
        return f"{client.model} at {client.url}, {self._context.config.remote.concurrency} at once"
