"""Replies: OpenAI's form of an answer, whole or step by step, and the trace page's events of every step."""

import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlm_rag.decode.abstention import describe_abstention
from dlm_rag.decode.rollout import CommittedToken, Rollout
from dlm_rag.engine.rules import find_rule
from dlm_rag.evidence.prompt_segments import ContextBudget, fit_passages
from dlm_rag.page.render import (
    build_end_record,
    build_start_record,
    build_step_record,
    find_bridge_entities,
)
from dlm_rag.serving.async_engine import EngineRequest
from dlm_rag.serving.http_server import ApiError
from dlm_rag.serving.requests import ParsedRequest
from dlm_rag.text import find_answer, find_possible_mark, fold_title
from dlm_rag.tokenizer import Tokenizer

Event = tuple[str | None, dict[str, Any] | str]  # name and data of a server-sent event
# What a client that shows Markdown would take for markup, or for a link that it loads or lets click on.
_MARKUP = re.compile(r"[\\`*_\[\]<>!#|~&]|(?<=[Ww]{3})\.|:(?=//)")
_LIVE = re.compile(r"\]\(|\]:|<[A-Za-z/!]|://|[Ww]{3}\.")


@dataclass(frozen=True)
class ReplyContext:
    """What the replies of a server have in common.

    room: of the prompt, whose tokens are counted. link: gives the address of a passage from its id and
    text. note: stands below the answer, and says what the model knows; "" for nothing.
    """

    model: str
    tokenizer: Tokenizer
    room: ContextBudget
    link: Callable[[str, str], str]
    note: str = ""


@dataclass(frozen=True)
class Reply:
    """The reasoning, the content of a message, OpenAI's annotations of it, the sources with their texts."""

    reasoning: str
    content: str
    annotations: list[dict[str, Any]] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)


def get_finished_rollout(job: EngineRequest) -> Rollout:
    """Returns the rollout of a job that is done; raises `ApiError` where there is no answer.

    The error's sentence names no file or host; the log does.
    """
    if job.error is not None:
        raise job.error
    assert job.rollout is not None
    if job.rollout.error:
        raise ApiError(500, job.rollout.error.partition(":")[0])
    return job.rollout


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Returns where the first of the stop texts begins; None where there is none."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def cut_open_reasoning(text: str, answer_form: str) -> str:
    """Returns what is reasoning for certain of a text that still grows: up to a possible answer mark."""
    if answer_form == "whole":
        return ""
    return text[: find_possible_mark(text)].rstrip()


def build_reply(rollout: Rollout, text: str, asked: ParsedRequest, context: ReplyContext) -> Reply:
    """Returns the reply of a finished answer; text: of the response up to a stop text."""
    sources = _list_sources(rollout, context.link)
    mark, start, stop = find_answer(text, rollout.answer_form)
    reasoning = text[:mark].rstrip()
    if reason := rollout.abstain_reason:
        return Reply(reasoning, _say_what_is_closest(rollout, reason), [], sources)
    content = text[start:stop] or text
    if _LIVE.search(content):  # a passage may hold a picture that tells its server who reads it
        content = escape_markup(content)
    if not asked.cite:
        return Reply(reasoning, content, [], sources)
    # What the answer is cited from; where that is nothing, what the reasoning is.
    units = [unit for unit in rollout.citations if unit["kind"] == "answer" and unit["passages"]]
    cited = {passage["id"] for unit in units or rollout.citations for passage in unit["passages"]}
    marks = (f" [{number}]" for number, each in enumerate(sources, start=1) if each["id"] in cited)
    lines = [f"[{number}] {escape_markup(each['title'])}" for number, each in enumerate(sources, start=1)]
    whole = "\n\n".join(filter(None, (content + "".join(marks), "\n".join(lines), context.note)))
    return Reply(reasoning, whole, _annotate(whole, len(content), sources), sources)


def _say_what_is_closest(rollout: Rollout, reason: str) -> str:
    """Returns why there is no answer, with the passages that come closest, the best sentence in bold."""
    lines = [
        f"- {escape_markup(fold_title(each['title']))}: **{escape_markup(each['sentence'])}**"
        for each in rollout.closest
    ]
    said = describe_abstention(reason, rollout.closest)
    return "\n".join([f"{said}\n", *lines]) if lines else said


def _annotate(content: str, start: int, sources: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns OpenAI's url_citation of every source, by its number, at its first mark from `start` on."""
    annotations = []
    for number, each in enumerate(sources, start=1):
        begin = content.index(f"[{number}]", start)
        place = {"start_index": begin, "end_index": begin + len(f"[{number}]")}
        found = place | {"title": each["title"], "url": each["url"]}
        annotations.append({"type": "url_citation", "url_citation": found})
    return annotations


def _list_sources(rollout: Rollout, link: Callable[[str, str], str]) -> list[dict[str, Any]]:
    """Returns the sources of an answer in the order in which they are cited first."""
    texts = {name: rollout.passages[name] for name in rollout.sources}
    return [
        {"id": name, "title": fold_title(text) or name, "text": text, "url": link(name, text)}
        for name, text in texts.items()
    ]


def escape_markup(text: str) -> str:
    """Returns a text that a client shows as it is, whatever Markdown or HTML it holds."""
    return _MARKUP.sub(r"\\\g<0>", text)


class ChatResponse:
    """One chat completion, and what of it was sent."""

    def __init__(self, asked: ParsedRequest, job: EngineRequest, context: ReplyContext) -> None:
        self._asked, self._job, self._context = asked, job, context
        self._canvas: dict[int, CommittedToken] = {}
        self._taken, self._sent = 0, ""  # steps on the canvas; text sent
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": context.model,
            "object": "chat.completion.chunk" if asked.stream else "chat.completion",
        }  # fmt: skip

    def build_completion(self) -> dict[str, Any]:
        """Returns the answer at once; raises `ApiError` where there is none."""
        reply, end = self._finish()
        message: dict[str, Any] = {"role": "assistant", "refusal": None, "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.annotations:
            message["annotations"] = reply.annotations
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": end.pop("reason")}
        return self._head | {"choices": [choice]} | end

    def new_events(self, done: bool) -> Iterator[Event]:
        """Yields chunks for the steps since the last call, at the end those that end the stream.

        The contents of all chunks together are the message's.
        """
        rollout = self._job.rollout
        while rollout is not None and self._take_step(rollout):
            step, length = rollout.steps[self._taken - 1], rollout.canvas_length
            canvas = [self._canvas[n].token if n in self._canvas else None for n in range(length)]
            text = cut_open_reasoning(self._find_stable_text(rollout), rollout.answer_form)
            delta: dict[str, Any] = {"content": ""}
            if self._taken == 1:
                delta["role"] = "assistant"
            if new := text[len(self._sent) :]:
                delta["reasoning_content"], self._sent = new, text
            shown = {"step": step.step, "canvas": canvas, "query": step.query, "passages": step.passage_ids}
            yield None, self._build_chunk(delta, dlm_rag=shown)
        if done:
            reply, end = self._finish()
            delta = {"content": reply.content}
            if rest := reply.reasoning[len(self._sent) :]:
                delta["reasoning_content"] = rest
            if reply.annotations:
                delta["annotations"] = reply.annotations
            reason, usage = end.pop("reason"), end.pop("usage")
            last = {} if self._asked.include_usage else {"usage": usage}
            yield None, self._build_chunk(delta, reason, **end, **last)
            if self._asked.include_usage:
                yield None, self._head | {"choices": [], "usage": usage}
            yield None, "[DONE]"

    def _build_chunk(self, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._head | {"choices": [choice]} | more

    def _take_step(self, rollout: Rollout) -> bool:
        """Brings the canvas to the next step, if there is one yet."""
        if self._taken == len(rollout.steps):
            return False
        self._canvas = rollout.steps[self._taken].write_tokens(self._canvas)
        self._taken += 1
        return True

    def _find_stable_text(self, rollout: Rollout) -> str:
        """Returns the beginning of the final text.

        With edits nothing is certain before the end, of uniform noise nothing in the open block. Held back
        at the end are blanks, a character that is not whole, and what may begin a stop text.
        """
        settings, most = rollout.settings, min(rollout.canvas_length, self._asked.max_tokens or sys.maxsize)
        if settings["edit_threshold"] is not None:
            return ""
        if find_rule(settings["commit_rule"] or "threshold").redraws:  # finished blocks are certain
            block = settings["block_length"]
            most = max(self._canvas, default=0) // block * block
        tokenizer, ids = self._context.tokenizer, list[int]()
        while len(ids) < most and (token := self._canvas.get(len(ids))):
            if token.token_id in tokenizer.end_ids:
                break
            ids.append(token.token_id)
        text = tokenizer.decode_with_offsets(ids)[0].rstrip("\ufffd").strip()
        stops = self._asked.stops
        begins = [n for n in range(len(text)) if any(stop.startswith(text[n:]) for stop in stops)]
        at = find_stop(text, stops)
        return text[: min([*begins[:1], *([] if at is None else [at])], default=len(text))]

    def _cut_response(self, rollout: Rollout) -> tuple[str, bool]:
        """Returns the response up to the request's `max_tokens`, and whether that is all of it."""
        tokenizer, most = self._context.tokenizer, self._asked.max_tokens
        if most is None or rollout.tokens_before_end(tokenizer.end_ids) <= most:
            return rollout.response, True
        ids = [token.token_id for _, token in sorted(self._canvas.items())][:most]
        return tokenizer.decode_with_offsets(ids)[0].rstrip("\ufffd").strip(), False

    def _finish(self) -> tuple[Reply, dict[str, Any]]:
        """Returns the reply, and why it ends, its usage and record; raises `ApiError`."""
        rollout = get_finished_rollout(self._job)
        while self._take_step(rollout):
            pass
        context, end_ids = self._context, self._context.tokenizer.end_ids
        text, whole = self._cut_response(rollout)
        at = find_stop(text, self._asked.stops)
        ended = at is not None or (
            whole and any(token.token_id in end_ids for token in self._canvas.values())
        )
        ended |= not rollout.canvas_length  # said without the model
        # The prompt is that of the last pass; what fills the canvas after the end is not counted.
        seen = rollout.steps[-2 if len(rollout.steps) > 1 else -1]
        found = {name: rollout.passages[name] for name in (*seen.passage_ids, *seen.dropped)}
        question, system = rollout.question, self._asked.system
        prompt = len(fit_passages(context.tokenizer, question, found, context.room, system).prompt)
        written = min(rollout.tokens_before_end(end_ids), self._asked.max_tokens or sys.maxsize)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
        }
        reply = build_reply(rollout, text[:at], self._asked, context)
        record = rollout.answer_record() | {"sources": reply.sources}
        del record["id"], record["seconds"]
        if self._asked.unread:
            record["unread"] = self._asked.unread
        return reply, {"reason": "stop" if ended else "length", "usage": usage, "dlm_rag": record}


class AnswerEvents:
    """The steps of one question as the trace page takes them: `start`, a `step` each, `end`."""

    def __init__(self, job: EngineRequest, tokenizer: Tokenizer) -> None:
        self._job, self._end_ids = job, tokenizer.end_ids
        self._sent, self._seen = 0, set[str]()

    def new_events(self, done: bool) -> Iterator[Event]:
        """Yields the events since the last call; raises `ApiError` where there is no answer."""
        rollout = self._job.rollout
        if rollout is not None and not self._sent and rollout.steps:
            start = build_start_record(rollout, ghosts=True)
            yield "start", {"id": rollout.id, "question": rollout.question} | start
        while rollout is not None and self._sent < len(rollout.steps):
            step = rollout.steps[self._sent]
            yield "step", {"step": step.step} | build_step_record(rollout, step, self._seen, self._end_ids)
            self._sent += 1
        if done:
            rollout = get_finished_rollout(self._job)
            end = build_end_record(rollout, find_bridge_entities([rollout])[0])
            yield "end", end | {"record": rollout.answer_record()}
