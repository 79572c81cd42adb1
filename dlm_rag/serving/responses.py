"""What is sent back: OpenAI's form of an answer, whole or step by step, and events of every step."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from dlm_rag.page.render import (
    build_end_record,
    build_start_record,
    build_step_record,
    find_bridge_entities,
)
from dlm_rag.serving.async_engine import EngineRequest
from dlm_rag.serving.choice import Choice, ChoiceEnd, ReplyContext, get_finished_rollout
from dlm_rag.serving.requests import ParsedRequest
from dlm_rag.tokenizer import Tokenizer

Event = tuple[str | None, dict[str, Any] | str]  # name and data of a server-sent event


class EventSource(Protocol):
    """What a stream sends."""

    def new_events(self, done: bool) -> Iterator[Event]:
        """The events since the last call; raises `ApiError` where there is no answer."""
        ...


def build_task_completion(text: str, model: str) -> dict[str, Any]:
    """A chat completion that no model has written (`conversation.answer_chat_task`)."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    ids = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
    usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
    return ids | {"object": "chat.completion", "choices": [choice], "usage": usage}


class ChatResponse:
    """One completion, of as many choices as there are jobs."""

    def __init__(self, asked: ParsedRequest, jobs: Sequence[EngineRequest], context: ReplyContext) -> None:
        self._asked = asked
        self._choices = [Choice(asked, job, n, context) for n, job in enumerate(jobs)]
        kind = "cmpl" if asked.plain else "chatcmpl"
        ids = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": context.model}
        self._whole = ids | {"object": "text_completion" if asked.plain else "chat.completion"}
        self._chunk = ids | {"object": "text_completion" if asked.plain else "chat.completion.chunk"}

    def build_completion(self) -> dict[str, Any]:
        """The answer at once; raises `ApiError` where there is none."""
        ends = [choice.finish() for choice in self._choices]
        choices = [
            choice.build_whole(end) | self._describe(end)
            for choice, end in zip(self._choices, ends, strict=True)
        ]
        return self._whole | {"choices": choices, "usage": _add_usage(ends), "dlm_rag": ends[0].record}

    def new_events(self, done: bool) -> Iterator[Event]:
        """Chunks for the steps since the last call, at the end with those that end the stream.

        The contents of all chunks of a choice together are its content.
        """
        for choice in self._choices:
            for shown, record in choice.new_steps():
                yield None, self._chunk | {"choices": [record], "dlm_rag": shown}
        if done:
            ends = [choice.finish() for choice in self._choices]
            for choice, end in zip(self._choices, ends, strict=True):
                for event in end.reply.build_source_events():
                    yield None, self._chunk | {"choices": [choice.build_empty()], "event": event}
                last = self._chunk | {"choices": [choice.build_last(end) | self._describe(end)]}
                usage = {"usage": _add_usage(ends)} if choice is self._choices[-1] else {}
                yield None, last | {"dlm_rag": end.record} | ({} if self._asked.include_usage else usage)
            if self._asked.include_usage:
                yield None, self._chunk | {"choices": [], "usage": _add_usage(ends)}
            yield None, "[DONE]"

    def _describe(self, end: ChoiceEnd) -> dict[str, Any]:
        return {"dlm_rag": end.record} if len(self._choices) > 1 else {}


def _add_usage(ends: Sequence[ChoiceEnd]) -> dict[str, int]:
    """OpenAI's usage: the prompt once, the texts of all choices."""
    prompt, written = ends[0].prompt, sum(end.written for end in ends)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


class AnswerEvents:
    """The steps of one question as the trace page takes them: `start`, a `step` each, `end`."""

    def __init__(self, job: EngineRequest, tokenizer: Tokenizer) -> None:
        self._job, self._end_ids = job, tokenizer.end_ids
        self._sent, self._seen = 0, set[str]()

    def new_events(self, done: bool) -> Iterator[Event]:
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
