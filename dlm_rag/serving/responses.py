"""What is sent back: OpenAI's form of an answer, whole or step by step, and events of every step."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

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
from dlm_rag.serving.requests import ParsedRequest
from dlm_rag.tokenizer import Tokenizer

Event = tuple[str | None, dict[str, Any] | str]  # name and data of a server-sent event


class EventSource(Protocol):
    """What a stream sends."""

    def new_events(self, done: bool) -> Iterator[Event]:
        """The events since the last call; raises `ApiError` where there is no answer."""
        ...


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


class ChatResponse:
    """One chat completion; room: that of its prompt, whose tokens are counted."""

    def __init__(
        self,
        asked: ParsedRequest,
        job: EngineRequest,
        model: str,
        tokenizer: Tokenizer,
        room: ContextBudget,
    ) -> None:
        self._asked, self._job, self._tokenizer, self._room = asked, job, tokenizer, room
        self._common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._canvas: dict[int, CommittedToken] = {}
        self._taken, self._sent = 0, ""  # steps on the canvas; text sent
        self._scores: dict[int, ScoredToken] = {}
        self._sent_logprobs = 0

    def build_completion(self) -> dict[str, Any]:
        """The answer at once; raises `ApiError` where there is none."""
        text, reason, ends = self._finish()
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._build_record("chat.completion", reason, text, message=message) | ends

    def new_events(self, done: bool) -> Iterator[Event]:
        """Chunks for the steps since the last call, at the end with those that end the stream.

        The contents of all chunks together are the text.
        """
        rollout = self._job.rollout
        while rollout is not None and self._take_step(rollout):
            step, text = rollout.steps[self._taken - 1], self._stable_text(rollout)
            role = {"role": "assistant"} if self._taken == 1 else {}
            canvas = [
                self._canvas[n].token if n in self._canvas else None for n in range(rollout.canvas_length)
            ]
            shown = {"step": step.step, "canvas": canvas, "query": step.query, "passages": step.passage_ids}
            yield None, self._build_chunk(text, None, role) | {"dlm_rag": shown}
            self._sent = max(self._sent, text, key=len)
        if done:
            text, reason, ends = self._finish()
            usage = {"usage": ends.pop("usage")}
            last = self._build_chunk(text, reason) | ends
            yield None, last if self._asked.include_usage else last | usage
            if self._asked.include_usage:
                yield None, self._build_chunk("", None) | {"choices": []} | usage
            yield None, "[DONE]"

    def _build_chunk(
        self, text: str, reason: str | None, more: dict[str, str] | None = None
    ) -> dict[str, Any]:
        delta = {"content": text[len(self._sent) :]} | (more or {})
        return self._build_record("chat.completion.chunk", reason, text, delta=delta)

    def _build_record(
        self, kind: str, reason: str | None, text: str, **content: dict[str, Any]
    ) -> dict[str, Any]:
        """text: up to which the log-probabilities of tokens are due."""
        due = self._new_logprobs(text) if self._asked.logprobs else []
        logprobs = {"content": due, "refusal": None} if due else None
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": reason}
        return self._common | {"object": kind, "choices": [choice]}

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
        while len(ids) < most and (token := self._canvas.get(len(ids))) and not self._ends_text(token):
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

    def _ends_text(self, token: CommittedToken) -> bool:
        return token.token_id in self._tokenizer.end_ids

    def _finish(self) -> tuple[str, str, dict[str, Any]]:
        """The text up to a stop text, why it ends there, and what is known besides: usage and sources."""
        rollout = get_finished_rollout(self._job)
        while self._take_step(rollout):
            pass
        at = find_stop(rollout.response, self._asked.stops)
        ended = at is not None or any(map(self._ends_text, self._canvas.values()))
        # The prompt is that of the last pass; what fills the canvas after the end is not counted.
        seen = rollout.steps[-2 if len(rollout.steps) > 1 else -1]
        found = {name: rollout.passages[name] for name in (*seen.passage_ids, *seen.dropped)}
        prompt = len(fit_passages(self._tokenizer, rollout.question, found, self._room).prompt)
        written = rollout.tokens_before_end(self._tokenizer.end_ids)
        cited = dict.fromkeys(p["id"] for unit in rollout.citations for p in unit["passages"])
        ends = {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": written,
                "total_tokens": prompt + written,
            },
            "dlm_rag": {
                "answer": rollout.answer,
                "sources": [{"id": name, "text": rollout.passages[name]} for name in cited],
                "citations": rollout.citations,
                "steps": len(rollout.steps) - 1,
                "forwards": rollout.forwards,
                "retrievals": rollout.retrievals,
                "tokens": rollout.tokens_committed,
            },
        }
        return rollout.response[:at], "stop" if ended else "length", ends


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
