"""What a request asks for: OpenAI's form and our own, as pydantic models.

Nothing is ignored silently: a field that cannot be honoured is refused by name, unless its value asks for
what happens anyway.
"""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, BeforeValidator, Field, create_model

from dlm_rag.config import DecodeConfig
from dlm_rag.config.fields import get_field_metadata, replace_settings
from dlm_rag.config.ineffective_settings import reset_idle_settings
from dlm_rag.decode.decoder import Decoder
from dlm_rag.errors import UserError
from dlm_rag.serving.middleware import ApiError, RequestBody, parse_body

ENGINE_SETTINGS = ("batch_size", "overlap")  # settings that hold for all rows of the engine
_SETTINGS = {item.name: item for item in fields(DecodeConfig) if item.name not in ENGINE_SETTINGS}
# Fields of OpenAI's that ask for nothing with these values, and for what is not there with others.
NEUTRAL_OPENAI_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},), "top_p": (1,), "frequency_penalty": (0,),
    "presence_penalty": (0,), "logit_bias": ({},), "store": (False,), "modalities": (["text"],),
    "service_tier": ("auto", "default"), **dict.fromkeys(ENGINE_SETTINGS, ()),
}  # fmt: skip
OPENAI_LABEL_FIELDS = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # that change no answer
SINGLE_MESSAGE_ERROR = (
    "each request is one question, found evidence for by itself: send a single message of the role 'user', "
    "without earlier turns and without a system message"
)


class TextPart(RequestBody):
    """A part of a message."""

    type: Literal["text"]
    text: str


def _to_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _to_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


Tokens = Annotated[int, Field(ge=1)] | None
Parts = Annotated[list[TextPart], BeforeValidator(_to_parts)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=4)] | None


class Message(RequestBody):
    """A message of a chat."""

    role: str
    content: Parts
    name: str | None = None


class StreamOptions(RequestBody):
    """What a stream has besides its text."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class _OpenAIFields(RequestBody):
    messages: list[Message]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens = None
    max_completion_tokens: Tokens = None
    stop: Annotated[Stops, BeforeValidator(_to_list)] = None
    logprobs: bool | None = None


class _QuestionField(RequestBody):
    question: str


_SETTING_FIELDS: dict[str, Any] = {
    name: (Union[item.type, None], None)  # noqa: UP007 - mypy takes the type for a text
    for name, item in _SETTINGS.items()
}
_IGNORED_FIELDS: dict[str, Any] = dict.fromkeys((*NEUTRAL_OPENAI_VALUES, *OPENAI_LABEL_FIELDS), (Any, None))
ChatBody = create_model("ChatBody", __base__=_OpenAIFields, **_IGNORED_FIELDS, **_SETTING_FIELDS)
_EVENT_FIELDS = {name: kind for name, kind in _SETTING_FIELDS.items() if name != "top_logprobs"}
AnswerBody = create_model("AnswerBody", __base__=_QuestionField, **_EVENT_FIELDS)  # which have none


@dataclass(frozen=True)
class ParsedRequest:
    """A request, read. include_usage: whether a stream ends with a chunk of usage alone."""

    question: str
    settings: DecodeConfig
    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    stops: tuple[str, ...] = ()
    logprobs: bool = False


@dataclass(frozen=True)
class RequestParser:
    """Reads requests for one decoder, of whose settings a request changes some; raises `ApiError`.

    most: maximum canvas length.
    """

    decoder: Decoder
    most: int

    def parse_chat(self, body: bytes) -> ParsedRequest:
        """A chat completion in OpenAI's form."""
        asked = parse_body(ChatBody, body)
        for name, values in NEUTRAL_OPENAI_VALUES.items():
            value = getattr(asked, name)
            if value is not None and value not in values:
                raise ApiError(400, f"'{name}' cannot be honoured here: leave it out", name)
        options = asked.stream_options
        if options is not None and options.model_fields_set and not asked.stream:
            raise ApiError(400, "'stream_options' has no effect without stream=true", "stream_options")
        if getattr(asked, "top_logprobs", None) and not asked.logprobs:
            raise ApiError(400, "'top_logprobs' needs logprobs=true", "top_logprobs")
        if len(asked.messages) != 1 or asked.messages[0].role != "user":
            raise ApiError(400, SINGLE_MESSAGE_ERROR, "messages")
        question = "\n".join(part.text for part in asked.messages[0].content)
        bounds = [most for most in (asked.max_tokens, asked.max_completion_tokens) if most is not None]
        return ParsedRequest(
            _require_not_blank(question, "messages"),
            self._resolve_settings(asked, min(bounds, default=None)),
            asked.model,
            bool(asked.stream),
            bool(options and options.include_usage),
            tuple(asked.stop or ()),
            bool(asked.logprobs),
        )

    def parse_answer(self, body: bytes) -> ParsedRequest:
        """A request of our own form: a question, and settings."""
        asked = parse_body(AnswerBody, body)
        return ParsedRequest(_require_not_blank(asked.question, "question"), self._resolve_settings(asked))

    def _resolve_settings(self, asked: BaseModel, most: int | None = None) -> DecodeConfig:
        """The settings of a request, on top of the server's; most: positions that the client allows."""
        own, shape = self.decoder.config, self.decoder.denoiser.config
        given = {name: getattr(asked, name) for name in asked.model_fields_set if name in _SETTINGS}
        if getattr(asked, "logprobs", None) and not given.get("top_logprobs"):
            given["top_logprobs"] = 0  # the tokens' own
        for name, value in given.items():  # a client must not choose what code the server imports
            if (
                get_field_metadata(_SETTINGS[name], "table")
                and ":" in str(value)
                and value != getattr(own, name)
            ):
                raise ApiError(400, f"{name}={value!s:.60} is not one of this server's choices", name)
            if value is None:  # which OpenAI's clients send for the default
                given[name] = _SETTINGS[name].default
        if (mode := given.get("mode") or own.mode) != own.mode:
            own = reset_idle_settings("decode", own, {"decode.mode": mode})
        try:
            settings = self.decoder.resolve_settings(replace_settings(own, **given))
            length = settings.max_new_tokens or 0
            if length > self.most:
                reason = f"max_new_tokens={length} is more than the {self.most} of this server"
                raise ApiError(400, reason, "max_new_tokens")
            if most is not None and most < length:
                if shape.block_size and settings.mode == "diffusion":
                    raise UserError(f"max_tokens={most} is under the {length} that this model fills")
                settings = replace_settings(settings, max_new_tokens=most)
        except UserError as error:
            raise ApiError(400, str(error)) from None
        return settings


def _require_not_blank(text: str, param: str) -> str:
    if not text.strip():
        raise ApiError(400, "the question is blank", param)
    return text
