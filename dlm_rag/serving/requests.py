"""What a request asks for: OpenAI's form and our own, checked field by field.

Nothing is passed over: a field that cannot be honoured is refused by name, unless its value asks for what
happens anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, get_args

from dlm_rag.config import DecodeConfig
from dlm_rag.config.checked import replace_settings
from dlm_rag.decode.engine import check_policy_heads, with_checkpoint_defaults
from dlm_rag.decode.memory_budget import check_memory_bounded
from dlm_rag.errors import UserError, suggest_nearest
from dlm_rag.files.jsonl import parse_json
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.serving.middleware import ApiError

ENGINE_SETTINGS = ("batch_size", "overlap")  # settings that hold for all rows of the engine
REQUEST_SETTINGS = tuple(item.name for item in fields(DecodeConfig) if item.name not in ENGINE_SETTINGS)
SETTING_TYPES = {item.name: get_args(item.type) or (item.type,) for item in fields(DecodeConfig)}
TYPE_DESCRIPTIONS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
# Fields of OpenAI's that ask for nothing with these values, and for what is not there with others.
NEUTRAL_OPENAI_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},), "top_p": (1,), "frequency_penalty": (0,),
    "presence_penalty": (0,), "logit_bias": ({},), "store": (False,), "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}  # fmt: skip
OPENAI_LABEL_FIELDS = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # that change no answer
CHAT_FIELDS = (
    "model",
    "messages",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "stop",
)
MAX_STOPS, MAX_STOP_CHARS = 4, 256
SINGLE_MESSAGE_ERROR = (
    "each request is one question, found evidence for by itself: send a single message of the role 'user', "
    "without earlier turns and without a system message"
)


@dataclass(frozen=True)
class ParsedRequest:
    """A request, read."""

    question: str
    settings: DecodeConfig
    model: str | None = None
    stream: bool = False
    include_usage: bool = False  # whether a stream ends with a chunk of usage alone
    stops: tuple[str, ...] = ()


class RequestParser:
    """Reads requests for one model; settings: where a request names no others. All raise `ApiError`."""

    def __init__(
        self, settings: DecodeConfig, shape: DenoiserConfig, most: int, heads: bool, bounded: bool
    ) -> None:
        """settings: as `with_checkpoint_defaults` leaves them. most: positions of a canvas. heads: whether
        there are any. bounded: whether a row may not grow beyond what was reckoned for it.
        """
        self._settings, self._shape, self._most = settings, shape, most
        self._heads, self._bounded = heads, bounded

    def parse_chat(self, body: bytes) -> ParsedRequest:
        """A chat completion in OpenAI's form."""
        asked = _parse_body(body)
        _refuse_unknown(
            asked, (*CHAT_FIELDS, *NEUTRAL_OPENAI_VALUES, *OPENAI_LABEL_FIELDS, *REQUEST_SETTINGS)
        )
        for name, values in NEUTRAL_OPENAI_VALUES.items():
            value = asked.get(name)
            if value is not None and value not in values:
                raise ApiError(400, f"'{name}' cannot be honoured here: leave it out", name)
        stream = _get_typed_field(asked, "stream", bool) or False
        options = _get_typed_field(asked, "stream_options", dict) or {}
        _refuse_unknown(options, ("include_usage", "include_obfuscation"))
        if options and not stream:
            raise ApiError(400, "'stream_options' has no effect without stream=true", "stream_options")
        return ParsedRequest(
            _parse_messages(asked.get("messages")),
            self._resolve_settings(asked, _parse_max_tokens(asked)),
            _get_typed_field(asked, "model", str),
            stream,
            _get_typed_field(options, "include_usage", bool) or False,
            _parse_stops(asked.get("stop")),
        )

    def parse_answer(self, body: bytes) -> ParsedRequest:
        """A request of our own form: a question, and settings."""
        asked = _parse_body(body)
        _refuse_unknown(asked, ("question", *REQUEST_SETTINGS))
        question = asked.get("question")
        if not isinstance(question, str):
            raise ApiError(400, "'question' must be a text", "question")
        return ParsedRequest(_require_not_blank(question, "question"), self._resolve_settings(asked))

    def _resolve_settings(self, asked: Mapping[str, Any], most: int | None = None) -> DecodeConfig:
        """The settings of a request, on top of the server's; most: positions that the client allows."""
        given = {name: _parse_setting(asked, name) for name in REQUEST_SETTINGS if name in asked}
        try:
            settings = with_checkpoint_defaults(replace_settings(self._settings, **given), self._shape)
            check_policy_heads(settings, self._heads)
            if self._bounded:
                check_memory_bounded(settings)
            length = settings.max_new_tokens
            assert length is not None
            if length > self._most:
                raise ApiError(
                    400, f"max_new_tokens={length} is more than the {self._most} of this server",
                    "max_new_tokens",
                )  # fmt: skip
            if most is not None and most < length:
                if self._shape.block_size:
                    raise UserError(f"max_tokens={most} is under the {length} that this model fills")
                settings = replace_settings(settings, max_new_tokens=most)
        except UserError as error:
            raise ApiError(400, str(error)) from None
        return settings


def _parse_body(body: bytes) -> dict[str, Any]:
    try:
        asked = parse_json(body, "this is no request", UserError, "body")
    except UserError as error:
        raise ApiError(400, str(error)) from None
    if not isinstance(asked, dict):
        raise ApiError(400, "the body must be a JSON object")
    return asked


def _refuse_unknown(asked: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in asked:
        if name in ENGINE_SETTINGS:
            raise ApiError(400, f"'{name}' is the server's own: leave it out", name)
        if name not in known:
            shown = ascii(name)[:60]
            raise ApiError(
                400, f"the field {shown} is not known{suggest_nearest(name[:60], known)}", name[:60]
            )


def _get_typed_field(asked: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field of that type, or None."""
    value = asked.get(name)
    if value is not None and not isinstance(value, kind):
        said = TYPE_DESCRIPTIONS.get(kind, "an object")
        raise ApiError(400, f"'{name}' must be {said}", name)
    return value


def _parse_setting(asked: Mapping[str, Any], name: str) -> Any:
    value, kinds = asked[name], SETTING_TYPES[name]
    if value is None:  # as one who leaves it out: OpenAI's clients send null
        return None if NoneType in kinds else DecodeConfig.__dataclass_fields__[name].default
    kind = kinds[0]
    right = (int, float) if kind is float else kind
    if not isinstance(value, right) or (isinstance(value, bool) and kind is not bool):
        raise ApiError(400, f"'{name}' must be {TYPE_DESCRIPTIONS[kind]}", name)
    return value


def _parse_max_tokens(asked: Mapping[str, Any]) -> int | None:
    """The bound of the text in tokens, by the one name or the other."""
    bounds = []
    for name in ("max_tokens", "max_completion_tokens"):
        value = asked.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ApiError(400, f"'{name}' must be a whole number above 0", name)
        bounds.append(value)
    return min(bounds, default=None)


def _parse_stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if stops is None:
        return ()
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in stops)
    ):
        raise ApiError(
            400, f"'stop' must be a text or {MAX_STOPS} at most, each of 1 to {MAX_STOP_CHARS} characters",
            "stop",
        )  # fmt: skip
    return tuple(stops)


def _parse_messages(messages: Any) -> str:
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise ApiError(400, "'messages' must be a list of objects", "messages")
    if len(messages) != 1 or messages[0].get("role") != "user":
        raise ApiError(400, SINGLE_MESSAGE_ERROR, "messages")
    _refuse_unknown(messages[0], ("role", "content", "name"))
    content = messages[0].get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) < len(content) or not all(isinstance(part.get("text"), str) for part in parts):
            raise ApiError(400, "a message has parts of the type 'text' only", "messages")
        content = "\n".join(part["text"] for part in parts)
    if not isinstance(content, str):
        raise ApiError(400, "the content of a message must be a text", "messages")
    return _require_not_blank(content, "messages")


def _require_not_blank(text: str, param: str) -> str:
    if not text.strip():
        raise ApiError(400, "the question is blank", param)
    return text
