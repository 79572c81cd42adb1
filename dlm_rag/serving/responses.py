"""What is sent back: OpenAI's form of an answer, whole or step by step, and events of every step."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from dlm_rag.decode.rollout import CommittedToken, Rollout
from dlm_rag.evidence.truncation import ContextBudget, fit_passages
from dlm_rag.page.render import (
    build_end_record,
    build_step_record,
    find_bridge_entities,
    uses_guesses_in_query,
)
from dlm_rag.serving.async_engine import EngineRequest
from dlm_rag.serving.middleware import ApiError
from dlm_rag.serving.requests import ParsedRequest
from dlm_rag.tokenizer import Tokenizer


def get_request_error(job: EngineRequest) -> ApiError | None:
    """Why a job that is done has no answer; without what may name files or hosts, which is in the log."""
    if job.error is None and job.rollout is not None and job.rollout.error:
        return ApiError(500, job.rollout.error.partition(":")[0])
    return job.error


def get_finished_rollout(job: EngineRequest) -> Rollout:
    """The rollout of a job that is done; raises `ApiError` where there is no answer."""
    if (error := get_request_error(job)) is not None:
        raise error
    assert job.rollout is not None
    return job.rollout


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of the stop texts begins; None where there is none."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


class CanvasTracker:
    """The canvas of a rollout that grows, step by step, and the text in front that changes no more."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._held: dict[int, CommittedToken] = {}
        self._taken = 0  # steps

    def advance_steps(self, rollout: Rollout) -> Iterator[int]:
        """The steps that are new, by their numbers; the canvas is that after the step."""
        while self._taken < len(rollout.steps):
            step = rollout.steps[self._taken]
            for position in step.remasked:
                self._held.pop(position, None)
            self._held.update({token.position: token for token in step.written_tokens})
            self._taken += 1
            yield self._taken - 1

    def canvas(self, length: int) -> list[str | None]:
        """The text of each token, None where it is masked."""
        return [token.token if (token := self._held.get(n)) else None for n in range(length)]

    @property
    def has_end_token(self) -> bool:
        """Whether an end token stands on the canvas."""
        return any(token.token_id in self._tokenizer.end_ids for token in self._held.values())

    def stable_text(self, rollout: Rollout) -> str:
        """The beginning of the final text; with edits nothing is certain before the end, of noise
        nothing in the block under work.

        Held back are blanks and a character that is not whole, at the end, and what may be the beginning
        of a stop text.
        """
        settings = rollout.settings
        if settings["edit_threshold"] is not None:
            return ""
        ids: list[int] = []
        most = rollout.canvas_length
        if settings.get("temperature_high") is not None:  # of noise what stands before the open block
            block = settings["block_length"]
            most = max(self._held, default=0) // block * block
        while (
            len(ids) < most
            and (token := self._held.get(len(ids)))
            and token.token_id not in self._tokenizer.end_ids
        ):
            ids.append(token.token_id)
        text = self._tokenizer.decode_with_offsets(ids)[0].rstrip("\ufffd").strip()
        begun = (n for n in range(len(text)) if any(stop.startswith(text[n:]) for stop in self._stops))
        bounds = [next(begun, None), find_stop(text, self._stops)]
        return text[: min((at for at in bounds if at is not None), default=len(text))]


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
        self._following, self._sent = CanvasTracker(tokenizer, asked.stops), ""

    def build_completion(self) -> dict[str, Any]:
        """The answer at once; raises `ApiError` where there is none."""
        rollout = get_finished_rollout(self._job)
        text, reason = self._text(rollout)
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._common | {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
            "usage": self._usage(rollout),
            "dlm_rag": _make_answer_record(rollout),
        }

    def new_chunks(self, done: bool) -> Iterator[dict[str, Any]]:
        """The chunks for the steps since the last call, at the end with those that end the stream.

        The contents of all chunks together are the text. Raises `ApiError` where there is no answer.
        """
        rollout = self._job.rollout
        for number in self._following.advance_steps(rollout) if rollout else ():
            assert rollout is not None
            step, text = rollout.steps[number], self._following.stable_text(rollout)
            delta = {"content": text[len(self._sent) :]} | ({"role": "assistant"} if not number else {})
            self._sent = max(self._sent, text, key=len)
            yield self._chunk(delta) | {
                "dlm_rag": {
                    "step": step.step,
                    "canvas": self._following.canvas(rollout.canvas_length),
                    "query": step.query,
                    "passages": step.passage_ids,
                }
            }
        if not done:
            return
        rollout = get_finished_rollout(self._job)
        text, reason = self._text(rollout)
        last = self._chunk({"content": text[len(self._sent) :]}, reason) | {
            "dlm_rag": _make_answer_record(rollout)
        }
        usage = {"usage": self._usage(rollout)}
        yield last if self._asked.include_usage else last | usage
        if self._asked.include_usage:
            yield self._chunk({}) | {"choices": []} | usage

    def _chunk(self, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._common | {"object": "chat.completion.chunk", "choices": [choice]}

    def _text(self, rollout: Rollout) -> tuple[str, str]:
        """The text, up to a stop text, and why it ends there."""
        for _ in self._following.advance_steps(rollout):
            pass
        at = find_stop(rollout.response, self._asked.stops)
        if at is not None:
            return rollout.response[:at], "stop"
        return rollout.response, "stop" if self._following.has_end_token else "length"

    def _usage(self, rollout: Rollout) -> dict[str, int]:
        """Tokens of the prompt of the last pass, and of the text; what fills the canvas is not counted."""
        seen = rollout.steps[-2 if len(rollout.steps) > 1 else -1]
        names = (*seen.passage_ids, *seen.dropped)
        found = {name: rollout.passages[name] for name in names}
        prompt = fit_passages(self._tokenizer, rollout.question, found, self._room).prompt
        counts = len(prompt), rollout.tokens_before_end(self._tokenizer.end_ids)
        return {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}


class AnswerEvents:
    """The steps of one question as the trace page takes them."""

    def __init__(self, job: EngineRequest, tokenizer: Tokenizer) -> None:
        self._job, self._end_ids = job, tokenizer.end_ids
        self._sent, self._seen = 0, set[str]()

    def new_events(self, done: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and data of the events since the last call; raises `ApiError` for no answer."""
        rollout = self._job.rollout
        if rollout is not None and not self._sent and rollout.steps:
            start = {
                "id": rollout.id,
                "question": rollout.question,
                "canvas": rollout.canvas_length,
                "guesses": uses_guesses_in_query(rollout.settings),
                "ghosts": True,
                "settings": [f"decode.{key}={value}" for key, value in rollout.settings.items()],
            }
            yield "start", start
        while rollout is not None and self._sent < len(rollout.steps):
            step = rollout.steps[self._sent]
            new = [name for name in (*step.passage_ids, *step.dropped) if name not in self._seen]
            self._seen.update(new)
            texts = {name: rollout.passages[name] for name in new}
            yield "step", {"step": step.step} | build_step_record(step, texts, self._end_ids)
            self._sent += 1
        if done:
            rollout = get_finished_rollout(self._job)
            end = build_end_record(rollout, find_bridge_entities([rollout])[0])
            yield "end", end | {"record": rollout.answer_record()}


def _make_answer_record(rollout: Rollout) -> dict[str, Any]:
    """What is known at the end besides the text: the answer and its sources."""
    cited = dict.fromkeys(p["id"] for unit in rollout.citations for p in unit["passages"])
    return {
        "answer": rollout.answer,
        "sources": [{"id": name, "text": rollout.passages[name]} for name in cited],
        "citations": rollout.citations,
        "steps": len(rollout.steps) - 1,
        "forwards": rollout.forwards,
        "retrievals": rollout.retrievals,
        "tokens": rollout.tokens_committed,
    }
