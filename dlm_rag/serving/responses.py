"""What is sent back: OpenAI's form of an answer, whole or step by step, and events of every step."""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dlm_rag.decode.rollout import CommittedToken, Rollout
from dlm_rag.decode.token_logprobs import ScoredToken, score_tokens
from dlm_rag.evidence.truncation import ContextBudget, fit_passages
from dlm_rag.page.render import (
    build_end_record,
    build_start_record,
    build_step_record,
    find_bridge_entities,
)
from dlm_rag.serving.async_engine import EngineRequest
from dlm_rag.serving.middleware import ApiError
from dlm_rag.serving.reply import Reply, build_reply, cut_open_reasoning
from dlm_rag.serving.requests import ParsedRequest
from dlm_rag.tokenizer import Tokenizer

Event = tuple[str | None, dict[str, Any] | str]  # name and data of a server-sent event


@dataclass(frozen=True)
class ReplyContext:
    """What the replies of a server have in common.

    room: of the prompt, whose tokens are counted. link: the address of a passage, of its id and text. note:
    see `build_reply`.
    """

    model: str
    tokenizer: Tokenizer
    room: ContextBudget
    link: Callable[[str, str], str]
    note: str = ""


@dataclass(frozen=True)
class ChoiceEnd:
    """A finished choice: its text as written, why it ends there, tokens of prompt and text, the rest."""

    reply: Reply
    text: str
    reason: str
    prompt: int
    written: int
    record: dict[str, Any]


def get_finished_rollout(job: EngineRequest) -> Rollout:
    """The rollout of a job that is done; raises `ApiError` where there is no answer.

    The sentence has nothing that may name files or hosts, which is in the log.
    """
    if job.error is not None:
        raise job.error
    assert job.rollout is not None
    if job.rollout.error:
        raise ApiError(500, job.rollout.error.partition(":")[0])
    return job.rollout


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of the stop texts begins; None where there is none."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def _describe_logprob(text: str, nats: float | None) -> dict[str, Any]:
    """In OpenAI's form; bytes are unknown of a token that is no whole character."""
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": nats, "bytes": known}


class Choice:
    """One answer on its way: what of its text was sent."""

    def __init__(self, asked: ParsedRequest, job: EngineRequest, index: int, context: ReplyContext) -> None:
        self._asked, self._job, self._index, self._context = asked, job, index, context
        self._tokenizer = context.tokenizer
        self._canvas: dict[int, CommittedToken] = {}
        self._taken, self._sent = 0, ""  # steps on the canvas; text sent
        self._scores: dict[int, ScoredToken] = {}
        self._sent_logprobs = 0

    def new_steps(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The steps since the last call: what is shown of each, and its choice."""
        rollout = self._job.rollout
        while rollout is not None and self._take_step(rollout):
            step, written = rollout.steps[self._taken - 1], self._stable_text(rollout)
            canvas = [
                self._canvas[n].token if n in self._canvas else None for n in range(rollout.canvas_length)
            ]
            shown = {"step": step.step, "canvas": canvas, "query": step.query, "passages": step.passage_ids}
            text = written if self._asked.plain else cut_open_reasoning(written, rollout.answer_form)
            new = text[len(self._sent) :]
            self._sent = max(self._sent, text, key=len)
            if self._asked.plain:
                yield shown, self._build_record(None, written, {"text": new})
                continue
            delta: dict[str, Any] = {"content": ""}
            if self._taken == 1:
                delta["role"] = "assistant"
            if new:
                delta["reasoning_content"] = new
            if self._asked.search_calls and step.retrieved:
                asked = json.dumps({"query": step.query}, ensure_ascii=False)
                call = {"name": "search", "arguments": asked}
                number = sum(each.retrieved for each in rollout.steps[: self._taken]) - 1
                ids = {"index": number, "id": f"search-{number}", "type": "function"}
                delta["tool_calls"] = [ids | {"function": call}]
            yield shown, self._build_record(None, written, {"delta": delta})

    def build_empty(self) -> dict[str, Any]:
        """The choice of a chunk without text."""
        return self._build_record(None, "", {"delta": {"content": ""}})

    def build_end(self, end: ChoiceEnd) -> dict[str, Any]:
        """The choice of a reply or, in a stream, of its last chunk: what was not sent before."""
        reply, sent = end.reply, len(self._sent)
        if self._asked.plain:
            return self._build_record(end.reason, end.text, {"text": reply.content[sent:]})
        message: dict[str, Any] = {"content": reply.content}
        if rest := reply.reasoning[sent:]:
            message["reasoning_content"] = rest
        if reply.annotations:
            message["annotations"] = reply.annotations
        if self._asked.stream:
            return self._build_record(end.reason, end.text, {"delta": message})
        whole = {"role": "assistant", "refusal": None} | message
        return self._build_record(end.reason, end.text, {"message": whole})

    def _build_record(self, reason: str | None, written: str, content: dict[str, Any]) -> dict[str, Any]:
        """A choice in OpenAI's form; written: the text up to which log-probabilities of tokens are due."""
        due = self._new_logprobs(written) if self._asked.logprobs else []
        logprobs = {"content": due, "refusal": None} if due else None
        return {"index": self._index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _new_logprobs(self, text: str) -> list[dict[str, Any]]:
        """Those of the tokens that begin in the text, a stable one, and were not sent yet."""
        ids = self._ids_before_end(len(self._scores))
        whole, spans = self._tokenizer.decode_with_offsets(ids)
        begin = len(whole) - len(whole.lstrip())
        shown = [
            n
            for n, (first, last) in enumerate(spans)
            if first < begin + len(text) and (first >= begin or last > begin)
            if ids[n] not in self._tokenizer.special_ids
        ]
        new, self._sent_logprobs = shown[self._sent_logprobs :], max(len(shown), self._sent_logprobs)
        return [
            _describe_logprob(token.token, token.log_prob)
            | {"top_logprobs": [_describe_logprob(other, nats) for _, other, nats in top]}
            for token, top in map(self._scores.__getitem__, new)
        ]

    def _ids_before_end(self, most: int) -> list[int]:
        """The written tokens in front, at most so many, up to an end token."""
        ids: list[int] = []
        while len(ids) < most and (token := self._canvas.get(len(ids))):
            if token.token_id in self._tokenizer.end_ids:
                break
            ids.append(token.token_id)
        return ids

    def _take_step(self, rollout: Rollout) -> bool:
        """Brings the canvas to the next step, if there is one yet."""
        if self._taken == len(rollout.steps):
            return False
        self._canvas = rollout.steps[self._taken].write_tokens(self._canvas)
        if self._asked.logprobs:
            self._scores = score_tokens(rollout.steps[self._taken], self._scores)
        self._taken += 1
        return True

    def _stable_text(self, rollout: Rollout) -> str:
        """The beginning of the final text; with edits nothing is certain before the end, of noise nothing
        in the block under work.

        Held back are blanks and a character that is not whole, at the end, and what may be the beginning
        of a stop text.
        """
        settings, most = rollout.settings, rollout.canvas_length
        if settings["edit_threshold"] is not None:
            return ""
        if settings.get("temperature_high") is not None:  # of noise what stands before the open block
            block = settings["block_length"]
            most = max(self._canvas, default=0) // block * block
        text = self._tokenizer.decode_with_offsets(self._ids_before_end(most))[0].rstrip("\ufffd").strip()
        begun = (
            n for n in range(len(text)) if any(stop.startswith(text[n:]) for stop in self._asked.stops)
        )
        bounds = [next(begun, None), find_stop(text, self._asked.stops)]
        return text[: min((at for at in bounds if at is not None), default=len(text))]

    def finish(self) -> ChoiceEnd:
        """The text up to a stop text, why it ends there, and what is known besides; raises `ApiError`."""
        rollout = get_finished_rollout(self._job)
        while self._take_step(rollout):
            pass
        at, end_ids = find_stop(rollout.response, self._asked.stops), self._tokenizer.end_ids
        ended = at is not None or any(token.token_id in end_ids for token in self._canvas.values())
        # The prompt is that of the last pass; what fills the canvas after the end is not counted.
        seen = rollout.steps[-2 if len(rollout.steps) > 1 else -1]
        found = {name: rollout.passages[name] for name in (*seen.passage_ids, *seen.dropped)}
        context, system = self._context, self._asked.system
        prompt = fit_passages(self._tokenizer, rollout.question, found, context.room, system).prompt
        written = rollout.tokens_before_end(end_ids)
        text = rollout.response[:at]
        reply = build_reply(rollout, text, self._asked, context.link, context.note)
        record = rollout.answer_record() | {"sources": reply.sources}
        del record["id"], record["seconds"]
        if self._asked.unread:
            record["unread"] = self._asked.unread
        return ChoiceEnd(reply, text, "stop" if ended else "length", len(prompt), written, record)


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
