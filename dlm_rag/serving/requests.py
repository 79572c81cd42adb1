"""Request bodies, as pydantic models: OpenAI's chat form and our own.

Nothing is ignored silently: a field that cannot be honoured is refused by name, unless its value asks for
what happens anyway.
"""

import copy
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, BeforeValidator, Field, create_model

from dlm_rag.config import DecodeConfig
from dlm_rag.config.fields import find_idle_settings, get_field_metadata, replace_settings
from dlm_rag.engine.engine import Decoder
from dlm_rag.errors import QuestionError, UserError
from dlm_rag.evidence.prompt_segments import ContextBudget, truncate_evidence
from dlm_rag.serving.conversation import make_question_stand_alone
from dlm_rag.serving.http_server import ApiError, RequestBody, parse_body

# OpenAI's fields that ask for nothing with these values, and for what is not there with others.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "top_p": (1,),
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "store": (False,),
    "modalities": (["text"],), "service_tier": ("auto", "default"),
    "batch_size": (), "overlap": (),  # settings that hold for all rows of the engine
}  # fmt: skip
# Fields that change no answer: labels, and tools, of which "auto" lets a model use none.
LABEL_FIELDS = (
    "user", "metadata", "safety_identifier", "prompt_cache_key", "tools", "functions",
    "parallel_tool_calls",
)  # fmt: skip
_SETTINGS = {item.name: item for item in fields(DecodeConfig) if item.name not in NEUTRAL_VALUES}
MAX_MESSAGES, MAX_PARTS = 1024, 64
# Characters of a question for each token of the context: tokenizing 1 MiB takes seconds.
MAX_QUESTION_CHARS_PER_TOKEN = 16


class TextPart(RequestBody):
    """A part of a message."""

    type: Literal["text"]
    text: str


def _to_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _to_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


Tokens = Annotated[int, Field(ge=1)] | None
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=4)]
# The length first: the faults of 250,000 parts take seconds to describe.
Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS), BeforeValidator(_to_parts)]


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


class StreamOptions(RequestBody):
    """What a stream has besides its text."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class _Chat(RequestBody):
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)]


class _OpenAIChat(_Chat):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens = None
    max_completion_tokens: Tokens = None
    stop: Annotated[Stops | None, BeforeValidator(_to_list)] = None
    cite: bool | None = None


_SETTING_FIELDS: dict[str, Any] = {
    name: (Union[item.type, None], None)  # noqa: UP007 - mypy takes the type for a text
    for name, item in _SETTINGS.items()
}
_IGNORED_FIELDS: dict[str, Any] = dict.fromkeys((*NEUTRAL_VALUES, *LABEL_FIELDS), (Any, None))
ChatBody = create_model("ChatBody", __base__=_OpenAIChat, **_IGNORED_FIELDS, **_SETTING_FIELDS)
AnswerBody = create_model("AnswerBody", __base__=_Chat, **_SETTING_FIELDS)


@dataclass(frozen=True)
class ParsedRequest:
    """A request, read.

    question: as it stands on its own. asked: as it was typed. room: of its prompt. system: the system
    prompt, where the model reads one; unread: the fields of the request that it does not read.
    include_usage: whether a stream ends with a chunk of usage alone. cite: whether sources stand below the
    answer. max_tokens: of the response, which is cut there; the canvas stays, for another one has another
    answer.
    """

    question: str
    asked: str
    settings: DecodeConfig
    room: ContextBudget
    system: str = ""
    unread: tuple[str, ...] = ()
    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    cite: bool = True


class RequestParser:
    """Reads requests for one decoder, of whose settings a request changes some; raises `ApiError`."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._own = decoder, decoder.config
        self._tokenizer = copy.deepcopy(decoder.tokenizer)  # for the thread that reads requests
        self._max_chars = MAX_QUESTION_CHARS_PER_TOKEN * decoder.denoiser.config.max_position_embeddings

    def parse_chat(self, body: bytes) -> ParsedRequest:
        """Reads a chat completion in OpenAI's form."""
        asked = parse_body(ChatBody, body)
        for name, values in NEUTRAL_VALUES.items():
            value = getattr(asked, name)
            if value is not None and value not in values:
                raise ApiError(400, f"'{name}' cannot be honoured here: leave it out", name)
        options = asked.stream_options
        if options is not None and options.model_fields_set and not asked.stream:
            raise ApiError(400, "'stream_options' has no effect without stream=true", "stream_options")
        bounds = [most for most in (asked.max_tokens, asked.max_completion_tokens) if most is not None]
        return replace(
            self._read(asked),
            model=asked.model,
            stream=bool(asked.stream),
            include_usage=bool(options and options.include_usage),
            stops=tuple(asked.stop or ()),
            max_tokens=min(bounds, default=None),
            cite=asked.cite is not False,
        )

    def parse_answer(self, body: bytes) -> ParsedRequest:
        """Reads a request of our own form: messages, and settings."""
        return self._read(parse_body(AnswerBody, body))

    def _read(self, body: _Chat) -> ParsedRequest:
        """Returns the question with its settings and the room of its prompt."""
        turns = [(each.role, each.text) for each in body.messages if each.role in ("user", "assistant")]
        rules = (each.text for each in body.messages if each.role in ("system", "developer"))
        system = "\n\n".join(text for text in rules if text.strip())
        if not turns or turns[-1][0] != "user":
            raise ApiError(400, "the last message must be a question, of the role 'user'", "messages")
        asked = turns[-1][1]
        if not asked.strip():
            raise ApiError(400, "the question is blank", "messages")
        if len(asked) + len(system) > self._max_chars:
            reason = f"the question has more than the {self._max_chars} characters that are read here"
            raise ApiError(400, reason, None, "context_length_exceeded")
        unread = ("system",) if system and not self._tokenizer.reads_system_prompts else ()
        question, system = make_question_stand_alone(turns), "" if unread else system
        settings, shape = self._resolve_settings(body), self._decoder.denoiser.config
        room = ContextBudget.from_config(shape, self._decoder.evidence_layout, settings.max_new_tokens)
        try:
            truncate_evidence(self._tokenizer.build_prompt(question, [], system), room)
        except QuestionError as error:
            raise ApiError(400, str(error), None, "context_length_exceeded") from None
        return ParsedRequest(question, asked, settings, room, system, unread)

    def _resolve_settings(self, asked: BaseModel) -> DecodeConfig:
        """Returns the settings of a request, on top of the server's."""
        own = self._own
        given = {name: getattr(asked, name) for name in asked.model_fields_set if name in _SETTINGS}
        for name, value in given.items():  # a client must not choose what code the server imports
            table = get_field_metadata(_SETTINGS[name], "table")
            if table and ":" in str(value) and value != getattr(own, name):
                raise ApiError(400, f"{name}={value!s:.60} is not one of this server's choices", name)
            if value is None:  # which OpenAI's clients send for the default
                given[name] = _SETTINGS[name].default
        if (mode := given.get("mode") or own.mode) != own.mode:
            idle = find_idle_settings("decode", own, {"decode.mode": mode})
            own = replace(own, **{name: DecodeConfig.__dataclass_fields__[name].default for name in idle})
        try:
            settings = self._decoder.resolve_settings(replace_settings(own, **given))
            length, limit = settings.max_new_tokens or 0, self._own.max_new_tokens or 0
            if length > limit:
                reason = f"max_new_tokens={length} is more than the {limit} of this server"
                raise ApiError(400, reason, "max_new_tokens")
        except UserError as error:
            raise ApiError(400, str(error)) from None
        return settings
