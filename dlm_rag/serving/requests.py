"""What a request asks for: OpenAI's form and our own, as pydantic models.

Nothing is ignored silently: a field that cannot be honoured is refused by name, unless its value asks for
what happens anyway.
"""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, BeforeValidator, Field, create_model

from dlm_rag.config import DecodeConfig
from dlm_rag.config.fields import get_field_metadata, replace_settings
from dlm_rag.config.ineffective_settings import reset_idle_settings
from dlm_rag.decode.decoder import Decoder
from dlm_rag.errors import UserError
from dlm_rag.serving.conversation import answer_chat_task, make_question_stand_alone
from dlm_rag.serving.middleware import ApiError, RequestBody, parse_body

ENGINE_SETTINGS = ("batch_size", "overlap")  # settings that hold for all rows of the engine
_SETTINGS = {item.name: item for item in fields(DecodeConfig) if item.name not in ENGINE_SETTINGS}
# Fields of OpenAI's that ask for nothing with these values, and for what is not there with others.
NEUTRAL_OPENAI_VALUES: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "top_p": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,), "logit_bias": ({},), "store": (False,), "modalities": (["text"],),
    "service_tier": ("auto", "default"), **dict.fromkeys(ENGINE_SETTINGS, ()),
}  # fmt: skip
# That change no answer: labels, and tools, of which "auto" lets a model use none.
OPENAI_LABEL_FIELDS = (
    "user", "metadata", "safety_identifier", "prompt_cache_key", "tools", "functions",
    "parallel_tool_calls",
)  # fmt: skip
COMPLETION_NEUTRAL_VALUES = NEUTRAL_OPENAI_VALUES | {
    "echo": (False,), "suffix": ("",), "best_of": (1,), "logprobs": (),
}  # fmt: skip
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_STRING = {"type": "string"}
# What an answer in JSON may hold, and the JSON schema of each.
JSON_ANSWER_FIELDS: dict[str, Any] = {
    "answer": _STRING, "reasoning": _STRING, "sources": {"type": "array", "items": _STRING},
}  # fmt: skip
JSON_ANSWER_ERROR = (
    "'response_format' can be an object with answer and reasoning (strings) and sources (an array of "
    "strings), or some of them, without further conditions"
)


class TextPart(RequestBody):
    """A part of a message."""

    type: Literal["text"]
    text: str


def _to_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _to_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _to_single(prompt: Any) -> Any:
    """The prompt of a list of one, as lm-eval sends it."""
    return prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt


Tokens = Annotated[int, Field(ge=1)] | None
Parts = Annotated[list[TextPart], BeforeValidator(_to_parts)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=4)] | None


class Message(RequestBody):
    """A message of a chat; of an answer that is sent back, what is not its text is not read."""

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


class _OpenAIFields(RequestBody):
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens = None
    max_completion_tokens: Tokens = None
    stop: Annotated[Stops, BeforeValidator(_to_list)] = None


class _ChatFields(_OpenAIFields):
    messages: list[Message]
    response_format: Any = None
    cite: bool | None = None
    search_calls: bool | None = None


class _CompletionFields(_OpenAIFields):
    prompt: Annotated[str, BeforeValidator(_to_single)]


class _QuestionField(RequestBody):
    question: str


_SETTING_FIELDS: dict[str, Any] = {
    name: (Union[item.type, None], None)  # noqa: UP007 - mypy takes the type for a text
    for name, item in _SETTINGS.items()
}
_IGNORED_FIELDS: dict[str, Any] = dict.fromkeys(
    (*COMPLETION_NEUTRAL_VALUES, *OPENAI_LABEL_FIELDS), (Any, None)
)
_CHAT_FIELDS = _IGNORED_FIELDS | _SETTING_FIELDS | {"logprobs": (bool | None, None)}
ChatBody = create_model("ChatBody", __base__=_ChatFields, **_CHAT_FIELDS)
_TEXT_FIELDS = {name: kind for name, kind in _SETTING_FIELDS.items() if name != "top_logprobs"}
CompletionBody = create_model(
    "CompletionBody", __base__=_CompletionFields, **_IGNORED_FIELDS, **_TEXT_FIELDS
)
AnswerBody = create_model("AnswerBody", __base__=_QuestionField, **_TEXT_FIELDS)  # which have none


@dataclass(frozen=True)
class ParsedRequest:
    """A request, read.

    question: as it stands on its own. include_usage: whether a stream ends with a chunk of usage alone.
    n: answers. plain: whether the text alone is sent, as the model writes it. system: the system prompt,
    where the model reads one. unread: what of the request it does not. json_fields: what the object that is
    asked for holds; none for text. cite: whether sources stand below the answer. search_calls: whether each
    search is a tool call of the stream. task: the reply to what is no question.
    """

    question: str
    settings: DecodeConfig
    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    n: int = 1
    plain: bool = False
    system: str = ""
    unread: tuple[str, ...] = ()
    json_fields: tuple[str, ...] = ()
    cite: bool = True
    search_calls: bool = False
    task: str | None = None


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
        turns = [(ROLES[message.role], message.text) for message in asked.messages]
        system = "\n\n".join(text for role, text in turns if role == "system" and text.strip())
        turns = [turn for turn in turns if turn[0] != "system"]
        if not turns or turns[-1][0] != "user":
            raise ApiError(400, "the last message must be a question, of the role 'user'", "messages")
        _require_not_blank(turns[-1][1], "messages")
        if asked.search_calls and not asked.stream:
            raise ApiError(400, "'search_calls' has no effect without stream=true", "search_calls")
        read = self.decoder.tokenizer.reads_system_prompts
        return replace(
            self._parse_common(asked, make_question_stand_alone(turns), NEUTRAL_OPENAI_VALUES),
            system=system if read else "",
            unread=("system",) if system and not read else (),
            json_fields=_read_json_fields(asked.response_format),
            cite=asked.cite is not False,
            search_calls=bool(asked.search_calls),
            task=None if asked.stream else answer_chat_task(turns[-1][1]),
        )

    def parse_completion(self, body: bytes) -> ParsedRequest:
        """A text completion in OpenAI's form: the prompt is the question."""
        asked = parse_body(CompletionBody, body)
        question = _require_not_blank(asked.prompt, "prompt")
        return replace(self._parse_common(asked, question, COMPLETION_NEUTRAL_VALUES), plain=True)

    def _parse_common(
        self, asked: _OpenAIFields, question: str, neutral: dict[str, tuple[Any, ...]]
    ) -> ParsedRequest:
        for name, values in neutral.items():
            value = getattr(asked, name)
            if value is not None and value not in values:
                raise ApiError(400, f"'{name}' cannot be honoured here: leave it out", name)
        options = asked.stream_options
        if options is not None and options.model_fields_set and not asked.stream:
            raise ApiError(400, "'stream_options' has no effect without stream=true", "stream_options")
        if getattr(asked, "top_logprobs", None) and not getattr(asked, "logprobs", None):
            raise ApiError(400, "'top_logprobs' needs logprobs=true", "top_logprobs")
        bounds = [most for most in (asked.max_tokens, asked.max_completion_tokens) if most is not None]
        settings = self._resolve_settings(asked, min(bounds, default=None))
        samples = (
            settings.temperature or settings.commit_rule == "sampled" or self.decoder.denoiser.config.noise
        )
        if (asked.n or 1) > 1 and not samples:
            raise ApiError(
                400, f"n={asked.n} answers would all be the same: set a temperature above 0", "n"
            )
        return ParsedRequest(
            question,
            settings,
            asked.model,
            bool(asked.stream),
            bool(options and options.include_usage),
            tuple(asked.stop or ()),
            bool(getattr(asked, "logprobs", None)),
            asked.n or 1,
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


def _read_json_fields(wanted: Any) -> tuple[str, ...]:
    """The fields of the object that a `response_format` asks for, none for text; raises `ApiError`."""
    match wanted:
        case None | {"type": "text"}:
            return ()
        case {"type": "json_object"}:
            return tuple(JSON_ANSWER_FIELDS)
        case {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "object", "properties": dict() as found, **rest}},
        }:
            words = {"required", "additionalProperties", "title", "description", "$schema"}
            plain = {name: _drop_titles(schema) for name, schema in found.items()}
            known = all(JSON_ANSWER_FIELDS.get(name) == schema for name, schema in plain.items())
            needed = rest.get("required", [])
            held = isinstance(needed, list) and all(str(name) in found for name in needed)
            if found and known and held and rest.keys() <= words:
                return tuple(found)
    raise ApiError(400, JSON_ANSWER_ERROR, "response_format")


def _drop_titles(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {key: value for key, value in schema.items() if key not in ("title", "description")}


def _require_not_blank(text: str, param: str) -> str:
    if not text.strip():
        raise ApiError(400, "the question is blank", param)
    return text
