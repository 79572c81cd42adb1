"""Chat completions, and the stream of the page: what is asked, read by pydantic, and the reply to it.

No field is ignored silently: what cannot be honoured is refused, unless it asks for what happens anyway.
"""

import copy
import re
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from typing import Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field, create_model

from dlm_rag.answer_forms import find_answer, find_possible_mark
from dlm_rag.config import DecodeConfig
from dlm_rag.config.fields import find_idle_settings, get_field_metadata
from dlm_rag.decode.rollout import CommittedToken, Rollout, RolloutStep, describe_abstention
from dlm_rag.engine.engine import Decoder
from dlm_rag.engine.rules import find_rule
from dlm_rag.errors import QuestionError, UserError, suggest_nearest
from dlm_rag.evidence.prompt_segments import ContextBudget, fit_passages, truncate_evidence
from dlm_rag.page import render
from dlm_rag.questions import Question
from dlm_rag.serving.conversation import make_question_stand_alone
from dlm_rag.serving.http_server import ApiError, RequestBody, parse_body
from dlm_rag.text import fold_title
from dlm_rag.tokenizer import Tokenizer

# OpenAI's fields that ask for nothing with these values, and for what is not there with others. None: for
# nothing with any value: labels, and tools, of which "auto" lets a model use none.
UNUSED_FIELDS: dict[str, tuple[Any, ...] | None] = {
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "top_p": (1,),
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "store": (False,),
    "modalities": (["text"],), "service_tier": ("auto", "default"),
    "user": None, "metadata": None, "safety_identifier": None, "prompt_cache_key": None,
    "tools": None, "functions": None, "parallel_tool_calls": None,
    "batch_size": (), "overlap": (),  # settings that hold for all rows of the engine
}  # fmt: skip
_SETTINGS = {item.name: item for item in fields(DecodeConfig) if item.name not in UNUSED_FIELDS}
MAX_MESSAGES, MAX_PARTS = 1024, 64
# Characters of a question for each token of the context: tokenizing 1 MiB takes seconds.
MAX_QUESTION_CHARS_PER_TOKEN = 16


class TextPart(RequestBody):
    """A part of a message."""

    type: Literal["text"]
    text: str


Tokens = Annotated[int, Field(ge=1)] | None
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=4)]
StopTexts = Annotated[Stops | None, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)]
_AsParts = BeforeValidator(lambda said: [{"type": "text", "text": said}] if isinstance(said, str) else said)
# The length first: the faults of 250,000 parts take seconds to describe.
Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS), _AsParts]


class Message(RequestBody):
    """A message of a chat; of an answer that is sent back, its text alone is read."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Parts | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    reasoning_content: Any = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or [])


class _Chat(RequestBody):
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)]
    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, bool | None] | None = None
    max_tokens: Tokens = None
    max_completion_tokens: Tokens = None
    stop: StopTexts = None
    cite: bool | None = None


_FIELDS: dict[str, Any] = dict.fromkeys(UNUSED_FIELDS, (Any, None))
for _name, _item in _SETTINGS.items():
    _FIELDS[_name] = Union[_item.type, None], None  # noqa: UP007 - mypy takes the type for a text
ChatBody = create_model("ChatBody", __base__=_Chat, **_FIELDS)


@dataclass(frozen=True)
class ChatRequest:
    """A request, read.

    question: as it stands on its own, with the system prompt, where the model reads one. asked: as it was
    typed. room: of its prompt. unread: the fields of the request that the model does not read.
    """

    body: _Chat
    question: Question
    asked: str
    settings: DecodeConfig
    room: ContextBudget
    unread: tuple[str, ...]


class ChatParser:
    """Reads requests for one decoder, of whose settings a request changes some; raises `ApiError`."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._own = decoder, decoder.config
        self._tokenizer = copy.deepcopy(decoder.tokenizer)  # for the thread that reads requests
        self._max_chars = MAX_QUESTION_CHARS_PER_TOKEN * decoder.denoiser.config.max_position_embeddings

    def parse_chat(self, body: bytes) -> ChatRequest:
        """Reads a chat completion in OpenAI's form."""
        asked = parse_body(ChatBody, body)
        for name, values in UNUSED_FIELDS.items():
            if values is not None and getattr(asked, name) not in (None, *values):
                raise ApiError(400, f"'{name}' cannot be honoured here: leave it out", name)
        for name in {*(asked.stream_options or ())} - {"include_usage", "include_obfuscation"}:
            raise ApiError(400, f"'stream_options' has no field {name[:60]!a}", "stream_options")
        if asked.stream_options and not asked.stream:
            raise ApiError(400, "'stream_options' has no effect without stream=true", "stream_options")
        return self._read(asked)

    def parse_answer(self, body: bytes) -> ChatRequest:
        """Reads a request of our own form: messages, and settings."""
        asked = parse_body(ChatBody, body)
        for name in sorted(asked.model_fields_set - {"messages", *_SETTINGS}):
            raise ApiError(400, f"the field '{name}' is not known{suggest_nearest(name, _SETTINGS)}", name)
        return self._read(asked)

    def _read(self, body: _Chat) -> ChatRequest:
        """Returns the question with its settings and the room of its prompt."""
        turns = [(each.role, each.text) for each in body.messages if each.role in ("user", "assistant")]
        rules = (each.text for each in body.messages if each.role in ("system", "developer"))
        system = "\n\n".join(text for text in rules if text.strip())
        if not turns or turns[-1][0] != "user":
            raise ApiError(400, "the last message must be a question, of the role 'user'", "messages")
        asked = turns[-1][1]
        if not asked.strip():
            raise ApiError(400, "the question is blank", "messages")
        unread = ("system",) if system and not self._tokenizer.reads_system_prompts else ()
        settings, shape = self._resolve_settings(body), self._decoder.denoiser.config
        room = ContextBudget.from_config(shape, self._decoder.evidence_layout, settings.max_new_tokens)
        try:
            if len(asked) + len(system) > self._max_chars:
                raise QuestionError(f"the question has more than {self._max_chars} characters")
            # By the id and the seed a sampling draws: the same question gives the same text again.
            question = Question("q1", make_question_stand_alone(turns), system="" if unread else system)
            if not question.question:
                raise ApiError(400, "the question is blank", "messages")  # of characters that nobody sees
            truncate_evidence(self._tokenizer.build_prompt(question.question, [], question.system), room)
        except QuestionError as error:
            raise ApiError(400, str(error), None, "context_length_exceeded") from None
        return ChatRequest(body, question, asked, settings, room, unread)

    def _resolve_settings(self, asked: _Chat) -> DecodeConfig:
        """Returns the settings of a request, on top of the server's."""
        own, limit = self._own, self._own.max_new_tokens or 0
        sent = {name: getattr(asked, name) for name in asked.model_fields_set if name in _SETTINGS}
        given = {name: value for name, value in sent.items() if value is not None}  # null: not sent
        for name, value in given.items():  # a client must not choose what code the server imports
            table = get_field_metadata(_SETTINGS[name], "table")
            if table and ":" in str(value) and value != getattr(own, name):
                raise ApiError(400, f"{name}={value!s:.60} is not one of this server's choices", name)
        if (mode := given.get("mode") or own.mode) != own.mode:
            idle = find_idle_settings("decode", own, {"decode.mode": mode})
            own = replace(own, **{name: DecodeConfig.__dataclass_fields__[name].default for name in idle})
            own.__dict__["given"] = self._own.given.difference(idle)  # `replace` forgets what was set
        try:
            settings = self._decoder.resolve_settings(own, **given)
        except UserError as error:
            raise ApiError(400, str(error)) from None
        if (length := settings.max_new_tokens or 0) > limit:
            reason = f"max_new_tokens={length} is more than the {limit} of this server"
            raise ApiError(400, reason, "max_new_tokens")
        return settings


Event = tuple[str | None, dict[str, Any] | str]  # name and data of a server-sent event
Steps = AsyncGenerator[tuple[Rollout, RolloutStep]]  # of one question, as they come
Link = Callable[[str, str], str]  # gives the address of a passage from its id and text
# What a client that shows Markdown would take for markup, or for a link that it loads or lets click on.
_MARKUP = re.compile(r"[\\`*_\[\]<>!#|~&]|(?<=[Ww]{3})\.|:(?=//)")
_LIVE = re.compile(r"\]\(|\]:|<[A-Za-z/!]|://|[Ww]{3}\.")


def build_message(
    rollout: Rollout, text: str, link: Link, note: str = "", cite: bool = True
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the message of a finished answer in OpenAI's form, and its sources with their texts.

    text: of the response up to a stop text. note: below the answer, if any. cite: whether sources are, too.
    """
    sources = [
        {"id": name, "title": fold_title(text) or fold_title(name), "text": text, "url": link(name, text)}
        for name, text in ((name, rollout.passages[name]) for name in rollout.sources)
    ]
    mark, start, stop = find_answer(text, rollout.answer_form)
    message: dict[str, Any] = {"reasoning_content": text[:mark].rstrip(), "annotations": []}
    if reason := rollout.abstain_reason:
        near = (
            f"- {escape_markup(fold_title(each['title']))}: **{escape_markup(each['sentence'])}**"
            for each in rollout.closest
        )
        said = "\n".join((f"{describe_abstention(reason, rollout.closest)}\n", *near)).rstrip()
        return message | {"content": said}, sources
    content = text[start:stop] or text
    if _LIVE.search(content):  # a passage may hold a picture that tells its server who reads it
        content = escape_markup(content)
    if not cite:
        return message | {"content": content}, sources
    # What the answer is cited from; where that is nothing, what the reasoning is.
    units = [unit for unit in rollout.citations if unit["kind"] == "answer" and unit["passages"]]
    cited = {passage["id"] for unit in units or rollout.citations for passage in unit["passages"]}
    marks = (f" [{number}]" for number, each in enumerate(sources, start=1) if each["id"] in cited)
    lines = [f"[{number}] {escape_markup(each['title'])}" for number, each in enumerate(sources, start=1)]
    whole = "\n\n".join(filter(None, (content + "".join(marks), "\n".join(lines), note)))
    for number, each in enumerate(sources, start=1):  # each at its first mark
        begin = whole.index(f"[{number}]", len(content))
        place = {"start_index": begin, "end_index": begin + len(f"[{number}]")}
        cited_as = place | {"title": each["title"], "url": each["url"]}
        message["annotations"].append({"type": "url_citation", "url_citation": cited_as})
    return message | {"content": whole}, sources


def escape_markup(text: str) -> str:
    """Returns a text that a client shows as it is, whatever Markdown or HTML it holds."""
    return _MARKUP.sub(r"\\\g<0>", text)


class ChatResponse:
    """One chat completion, whole or as a stream; link, note: as `build_message` takes them."""

    def __init__(self, asked: ChatRequest, model: str, tokenizer: Tokenizer, link: Link, note: str) -> None:
        self.asked, self.tokenizer, self.link, self.note, body = asked, tokenizer, link, note, asked.body
        # The canvas stays as long as it is: another one has another answer.
        self._most = min(body.max_tokens or sys.maxsize, body.max_completion_tokens or sys.maxsize)
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
        }  # fmt: skip

    async def complete(self, steps: Steps) -> dict[str, Any]:
        """Returns the answer at once."""
        *_, (rollout, _) = [step async for step in steps]
        message, reason, end = self._finish(rollout)
        return self._wrap({"message": {"role": "assistant", "refusal": None} | message}, reason, **end)

    async def stream(self, steps: Steps) -> AsyncGenerator[Event]:
        """Yields a chunk for each step, then those that end it; their contents are the message's."""
        sent, tokens = "", dict[int, CommittedToken]()
        async for rollout, step in steps:
            tokens = step.write_tokens(tokens)
            canvas = [tokens[n].token if n in tokens else None for n in range(rollout.canvas_length)]
            text = self._find_stable_reasoning(rollout, tokens)
            delta: dict[str, Any] = {"content": ""} | ({} if step.step else {"role": "assistant"})
            if new := text[len(sent) :]:
                delta["reasoning_content"], sent = new, text
            shown = {"step": step.step, "canvas": canvas, "query": step.query, "passages": step.passage_ids}
            yield None, self._wrap({"delta": delta}, dlm_rag=shown)
        message, reason, end = self._finish(rollout, sent)
        apart = (self.asked.body.stream_options or {}).get("include_usage")  # in a chunk of its own
        usage = {"usage": end.pop("usage")}
        yield None, self._wrap({"delta": message}, reason, **(end if apart else end | usage))
        if apart:
            yield None, self._head | {"choices": []} | usage
        yield None, "[DONE]"

    def _wrap(self, part: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "logprobs": None, "finish_reason": reason} | part
        return self._head | {"choices": [choice]} | more

    def _find_stable_reasoning(self, rollout: Rollout, tokens: dict[int, CommittedToken]) -> str:
        """Returns the beginning of the final reasoning, up to what may begin a stop text or an answer."""
        own, most = rollout.settings, min(rollout.canvas_length, self._most)
        if not tokens or self.tokenizer.template.answer == "whole" or own["edit_threshold"] is not None:
            return ""
        if find_rule(own["commit_rule"]).redraws:  # finished blocks are certain
            block = own["block_length"]
            most = min(most, max(tokens) // block * block)
        held = takewhile(lambda token: token is not None, map(tokens.get, range(most)))
        text = self._decode(token.token_id for token in held if token)
        stops = self.asked.body.stop or []
        ends = [text.index(stop) for stop in stops if stop in text]
        open_end = max(0, len(text) + 1 - max(map(len, stops), default=1))
        text = text[: min([*ends, open_end])]
        return text[: find_possible_mark(text)].rstrip()

    def _decode(self, ids: Iterable[int]) -> str:
        """Returns the text of tokens up to one that ends it, without half a character."""
        kept = [*takewhile(lambda token: token not in self.tokenizer.end_ids, ids)]
        return self.tokenizer.decode_with_offsets(kept)[0].rstrip("\ufffd").strip()

    def _finish(self, rollout: Rollout, sent: str = "") -> tuple[dict[str, Any], str, dict[str, Any]]:
        """Returns the message after the reasoning that was sent, why it ends, its usage and record."""
        asked, end_ids, tokens = self.asked, self.tokenizer.end_ids, rollout.final_tokens()
        text, written = rollout.response, rollout.tokens_before_end(end_ids)
        # Said without the model, or up to an end token.
        ended = not rollout.canvas_length or any(token.token_id in end_ids for token in tokens.values())
        if written > self._most:
            written, ended = self._most, False
            text = self._decode(token.token_id for _, token in sorted(tokens.items())[:written])
        if stops := [text.index(stop) for stop in asked.body.stop or () if stop in text]:
            text, ended = text[: min(stops)], True
        # The prompt is that of the last pass; what fills the canvas after the end is not counted.
        seen = rollout.steps[-2 if len(rollout.steps) > 1 else -1]
        found = {name: rollout.passages[name] for name in (*seen.passage_ids, *seen.dropped)}
        system = asked.question.system
        prompt = len(fit_passages(self.tokenizer, rollout.question, found, asked.room, system).prompt)
        usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        message, sources = build_message(rollout, text, self.link, self.note, asked.body.cite is not False)
        message["reasoning_content"] = message["reasoning_content"][len(sent) :]
        message = {name: value for name, value in message.items() if value or name == "content"}
        record = rollout.to_dict() | {"sources": sources}
        del record["id"], record["seconds"]
        if asked.unread:
            record["unread"] = asked.unread
        return message, "stop" if ended else "length", {"usage": usage, "dlm_rag": record}


async def play_trace(steps: Steps, end_ids: Collection[int]) -> AsyncGenerator[Event]:
    """Yields the steps of one question as the trace page takes them: `start`, a `step` each, `end`."""
    seen = set[str]()
    async for rollout, step in steps:
        if step.step == 0:
            start = render.build_start_record(rollout, ghosts=True)
            yield "start", {"id": rollout.id, "question": rollout.question} | start
        yield "step", {"step": step.step} | render.build_step_record(rollout, step, seen, end_ids)
    end = render.build_end_record(rollout, render.find_bridge_entities([rollout])[0])
    yield "end", end | {"record": rollout.to_dict()}
