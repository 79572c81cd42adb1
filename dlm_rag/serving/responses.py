"""Replies: OpenAI's form of an answer, whole or step by step, and the trace page's events of every step."""

import re
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from dlm_rag.decode.rollout import CommittedToken, Rollout, RolloutStep, describe_abstention
from dlm_rag.engine.rules import find_rule
from dlm_rag.evidence.prompt_segments import fit_passages
from dlm_rag.page.render import (
    build_end_record,
    build_start_record,
    build_step_record,
    find_bridge_entities,
)
from dlm_rag.serving.requests import ParsedRequest
from dlm_rag.text import find_answer, find_possible_mark, fold_title
from dlm_rag.tokenizer import Tokenizer

Event = tuple[str | None, dict[str, Any] | str]  # name and data of a server-sent event
Steps = AsyncIterable[tuple[Rollout, RolloutStep]]  # of one question, as they come
Link = Callable[[str, str], str]  # gives the address of a passage from its id and text
# What a client that shows Markdown would take for markup, or for a link that it loads or lets click on.
_MARKUP = re.compile(r"[\\`*_\[\]<>!#|~&]|(?<=[Ww]{3})\.|:(?=//)")
_LIVE = re.compile(r"\]\(|\]:|<[A-Za-z/!]|://|[Ww]{3}\.")


@dataclass(frozen=True)
class Reply:
    """The reasoning, the content of a message, OpenAI's annotations of it, the sources with their texts."""

    reasoning: str
    content: str
    annotations: list[dict[str, Any]] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Returns where the first of the stop texts begins; None where there is none."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def cut_open_reasoning(text: str, answer_form: str) -> str:
    """Returns what is reasoning for certain of a text that still grows: up to a possible answer mark."""
    if answer_form == "whole":
        return ""
    return text[: find_possible_mark(text)].rstrip()


def build_reply(rollout: Rollout, text: str, link: Link, note: str = "", cite: bool = True) -> Reply:
    """Returns the reply of a finished answer.

    text: of the response up to a stop text. note: stands below the answer; "" for nothing. cite: whether
    sources stand there too.
    """
    found = {name: rollout.passages[name] for name in rollout.sources}
    sources = [
        {"id": name, "title": fold_title(passage) or name, "text": passage, "url": link(name, passage)}
        for name, passage in found.items()
    ]
    mark, start, stop = find_answer(text, rollout.answer_form)
    reasoning = text[:mark].rstrip()
    if reason := rollout.abstain_reason:
        near = (
            f"- {escape_markup(fold_title(each['title']))}: **{escape_markup(each['sentence'])}**"
            for each in rollout.closest
        )
        said = "\n".join((f"{describe_abstention(reason, rollout.closest)}\n", *near)).rstrip()
        return Reply(reasoning, said, [], sources)
    content = text[start:stop] or text
    if _LIVE.search(content):  # a passage may hold a picture that tells its server who reads it
        content = escape_markup(content)
    if not cite:
        return Reply(reasoning, content, [], sources)
    # What the answer is cited from; where that is nothing, what the reasoning is.
    units = [unit for unit in rollout.citations if unit["kind"] == "answer" and unit["passages"]]
    cited = {passage["id"] for unit in units or rollout.citations for passage in unit["passages"]}
    marks = (f" [{number}]" for number, each in enumerate(sources, start=1) if each["id"] in cited)
    lines = [f"[{number}] {escape_markup(each['title'])}" for number, each in enumerate(sources, start=1)]
    whole = "\n\n".join(filter(None, (content + "".join(marks), "\n".join(lines), note)))
    return Reply(reasoning, whole, _annotate(whole, len(content), sources), sources)


def _annotate(content: str, start: int, sources: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns OpenAI's url_citation of every source, by its number, at its first mark from `start` on."""
    annotations = []
    for number, each in enumerate(sources, start=1):
        begin = content.index(f"[{number}]", start)
        place = {"start_index": begin, "end_index": begin + len(f"[{number}]")}
        found = place | {"title": each["title"], "url": each["url"]}
        annotations.append({"type": "url_citation", "url_citation": found})
    return annotations


def escape_markup(text: str) -> str:
    """Returns a text that a client shows as it is, whatever Markdown or HTML it holds."""
    return _MARKUP.sub(r"\\\g<0>", text)


@dataclass
class ChatResponse:
    """One chat completion, whole or as a stream.

    link, note: as `build_reply` takes them.
    """

    asked: ParsedRequest
    model: str
    tokenizer: Tokenizer
    link: Link
    note: str

    def __post_init__(self) -> None:
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model,
            "object": "chat.completion.chunk" if self.asked.stream else "chat.completion",
        }  # fmt: skip

    def build_completion(self, rollout: Rollout) -> dict[str, Any]:
        """Returns the answer at once."""
        reply, end = self._finish(rollout)
        message: dict[str, Any] = {"role": "assistant", "refusal": None, "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.annotations:
            message["annotations"] = reply.annotations
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": end.pop("reason")}
        return self._head | {"choices": [choice]} | end

    async def stream(self, steps: Steps) -> AsyncGenerator[Event]:
        """Yields a chunk for each step, at the end those that end the stream.

        The contents of all chunks together are the message's.
        """
        sent, tokens = "", dict[int, CommittedToken]()
        async for rollout, step in steps:
            tokens = step.write_tokens(tokens)
            canvas = [tokens[n].token if n in tokens else None for n in range(rollout.canvas_length)]
            text = cut_open_reasoning(self._find_stable_text(rollout, tokens), rollout.answer_form)
            delta: dict[str, Any] = {"content": ""} | ({} if step.step else {"role": "assistant"})
            if new := text[len(sent) :]:
                delta["reasoning_content"], sent = new, text
            shown = {"step": step.step, "canvas": canvas, "query": step.query, "passages": step.passage_ids}
            yield None, self._build_chunk(delta, dlm_rag=shown)
        reply, end = self._finish(rollout)
        delta = {"content": reply.content}
        if rest := reply.reasoning[len(sent) :]:
            delta["reasoning_content"] = rest
        if reply.annotations:
            delta["annotations"] = reply.annotations
        reason, usage = end.pop("reason"), end.pop("usage")
        last = {} if self.asked.include_usage else {"usage": usage}
        yield None, self._build_chunk(delta, reason, **end, **last)
        if self.asked.include_usage:
            yield None, self._head | {"choices": [], "usage": usage}
        yield None, "[DONE]"

    def _build_chunk(self, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._head | {"choices": [choice]} | more

    def _find_stable_text(self, rollout: Rollout, tokens: dict[int, CommittedToken]) -> str:
        """Returns the beginning of the final text; tokens: those of the canvas, by position.

        With edits nothing is certain before the end, of uniform noise nothing in the open block. Held back
        at the end are blanks, a character that is not whole, and what may begin a stop text.
        """
        settings, most = rollout.settings, min(rollout.canvas_length, self.asked.max_tokens or sys.maxsize)
        if settings["edit_threshold"] is not None:
            return ""
        if find_rule(settings["commit_rule"] or "threshold").redraws:  # finished blocks are certain
            block = settings["block_length"]
            most = max(tokens, default=0) // block * block
        held = takewhile(lambda token: token is not None, map(tokens.get, range(most)))
        text = self._decode(token.token_id for token in held if token)
        stops = self.asked.stops
        begins = [n for n in range(len(text)) if any(stop.startswith(text[n:]) for stop in stops)]
        at = find_stop(text, stops)
        return text[: min([*begins[:1], *([] if at is None else [at])], default=len(text))]

    def _decode(self, ids: Iterable[int]) -> str:
        """Returns the text of tokens up to one that ends it, without half a character."""
        kept = [*takewhile(lambda token: token not in self.tokenizer.end_ids, ids)]
        return self.tokenizer.decode_with_offsets(kept)[0].rstrip("\ufffd").strip()

    def _finish(self, rollout: Rollout) -> tuple[Reply, dict[str, Any]]:
        """Returns the reply, and why it ends, its usage and record."""
        asked, end_ids, tokens = self.asked, self.tokenizer.end_ids, rollout.final_tokens()
        most, text = asked.max_tokens or sys.maxsize, rollout.response
        written = rollout.tokens_before_end(end_ids)
        # Said without the model, or up to an end token.
        ended = not rollout.canvas_length or any(token.token_id in end_ids for token in tokens.values())
        if written > most:
            written, ended = most, False
            text = self._decode(token.token_id for _, token in sorted(tokens.items())[:most])
        if (at := find_stop(text, asked.stops)) is not None:
            text, ended = text[:at], True
        # The prompt is that of the last pass; what fills the canvas after the end is not counted.
        seen = rollout.steps[-2 if len(rollout.steps) > 1 else -1]
        found = {name: rollout.passages[name] for name in (*seen.passage_ids, *seen.dropped)}
        evidence = fit_passages(self.tokenizer, rollout.question, found, asked.room, asked.system)
        prompt = len(evidence.prompt)
        usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        reply = build_reply(rollout, text, self.link, self.note, asked.cite)
        record = rollout.to_dict() | {"sources": reply.sources}
        del record["id"], record["seconds"]
        if asked.unread:
            record["unread"] = asked.unread
        return reply, {"reason": "stop" if ended else "length", "usage": usage, "dlm_rag": record}


async def stream_trace(steps: Steps, end_ids: Collection[int]) -> AsyncGenerator[Event]:
    """Yields the steps of one question as the trace page takes them: `start`, a `step` each, `end`."""
    seen = set[str]()
    async for rollout, step in steps:
        if step.step == 0:
            start = build_start_record(rollout, ghosts=True)
            yield "start", {"id": rollout.id, "question": rollout.question} | start
        yield "step", {"step": step.step} | build_step_record(rollout, step, seen, end_ids)
    end = build_end_record(rollout, find_bridge_entities([rollout])[0])
    yield "end", end | {"record": rollout.to_dict()}
