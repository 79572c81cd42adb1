"""What is sent back: OpenAI's form of an answer, whole or step by step, and events of every step."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

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


def _build_head(form: str, model: str) -> dict[str, Any]:
    kind = "cmpl" if form == "text_completion" else "chatcmpl"
    ids = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time())}
    return ids | {"model": model, "object": form}


def build_task_completion(text: str, model: str) -> dict[str, Any]:
    """A chat completion that no model has written (`conversation.answer_chat_task`)."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
    return _build_head("chat.completion", model) | {"choices": [choice], "usage": usage}


class ChatResponse:
    """One completion, of as many choices as there are jobs."""

    def __init__(self, asked: ParsedRequest, jobs: Sequence[EngineRequest], context: ReplyContext) -> None:
        self._asked = asked
        self._choices = [Choice(asked, job, n, context) for n, job in enumerate(jobs)]
        chat = "chat.completion.chunk" if asked.stream else "chat.completion"
        self._head = _build_head("text_completion" if asked.plain else chat, context.model)

    def build_completion(self) -> dict[str, Any]:
        """The answer at once; raises `ApiError` where there is none."""
        ends, choices = self._finish()
        return self._head | {"choices": choices, "usage": _add_usage(ends), "dlm_rag": ends[0].record}

    def new_events(self, done: bool) -> Iterator[Event]:
        """Chunks for the steps since the last call, at the end with those that end the stream.

        The contents of all chunks of a choice together are its content.
        """
        for choice in self._choices:
            for shown, record in choice.new_steps():
                yield None, self._head | {"choices": [record], "dlm_rag": shown}
        if done:
            ends, lasts = self._finish()
            for choice, end, last in zip(self._choices, ends, lasts, strict=True):
                for event in end.reply.build_source_events():
                    yield None, self._head | {"choices": [choice.build_empty()], "event": event}
                chunk = self._head | {"choices": [last], "dlm_rag": end.record}
                if choice is self._choices[-1] and not self._asked.include_usage:
                    chunk["usage"] = _add_usage(ends)
                yield None, chunk
            if self._asked.include_usage:
                yield None, self._head | {"choices": [], "usage": _add_usage(ends)}
            yield None, "[DONE]"

    def _finish(self) -> tuple[list[ChoiceEnd], list[dict[str, Any]]]:
        """The end of each choice, and the record that a client gets of it; of several, with its own."""
        ends = [choice.finish() for choice in self._choices]
        records = [choice.build_end(end) for choice, end in zip(self._choices, ends, strict=True)]
        if len(ends) > 1:
            records = [each | {"dlm_rag": end.record} for each, end in zip(records, ends, strict=True)]
        return ends, records


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
        """The events since the last call; raises `ApiError` where there is no answer."""
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
