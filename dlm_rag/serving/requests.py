"""What a request asks for: OpenAI's form and our own, checked field by field.

Nothing is passed over: a field that cannot be honoured is refused by name, unless its value asks for what
happens anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, get_args

from dlm_rag.config import DecodeConfig
from dlm_rag.config.checked import with_values
from dlm_rag.decode.budget import check_bounded
from dlm_rag.decode.engine import check_heads, with_checkpoints_own
from dlm_rag.errors import UserError, nearest
from dlm_rag.files.jsonl import parse_json
from dlm_rag.model.shape import DenoiserConfig
from dlm_rag.serving.access import RefusedError

SHARED = ("batch_size", "overlap")  # settings that hold for all rows of the engine
OWN = tuple(item.name for item in fields(DecodeConfig) if item.name not in SHARED)
TYPES = {item.name: get_args(item.type) or (item.type,) for item in fields(DecodeConfig)}
SAID = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
# Fields of OpenAI's that ask for nothing with these values, and for what is not there with others.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},), "top_p": (1,), "frequency_penalty": (0,),
    "presence_penalty": (0,), "logit_bias": ({},), "store": (False,), "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}  # fmt: skip
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # that change no answer
CHAT = ("model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop")
MOST_STOPS, LONGEST_STOP = 4, 256
ONE_MESSAGE = (
    "each request is one question, found evidence for by itself: send a single message of the role 'user', "
    "without earlier turns and without a system message"
)


@dataclass(frozen=True)
class Asked:
    """A request, read."""

    question: str
    settings: DecodeConfig
    model: str | None = None
    stream: bool = False
    usage: bool = False  # whether a stream ends with a chunk of usage alone
    stops: tuple[str, ...] = ()


class Reader:
    """Reads requests for one model; settings: where a request names no others. All raise `RefusedError`."""

    def __init__(
        self, settings: DecodeConfig, shape: DenoiserConfig, most: int, heads: bool, bounded: bool
    ) -> None:
        """settings: as `with_checkpoints_own` leaves them. most: positions of a canvas. heads: whether
        there are any. bounded: whether a row may not grow beyond what was reckoned for it.
        """
        self._settings, self._shape, self._most = settings, shape, most
        self._heads, self._bounded = heads, bounded

    def chat(self, body: bytes) -> Asked:
        """A chat completion in OpenAI's form."""
        asked = _object(body)
        _refuse_unknown(asked, (*CHAT, *NEUTRAL, *LABELS, *OWN))
        for name, values in NEUTRAL.items():
            value = asked.get(name)
            if value is not None and value not in values:
                raise RefusedError(400, f"'{name}' cannot be honoured here: leave it out", name)
        stream = _typed(asked, "stream", bool) or False
        options = _typed(asked, "stream_options", dict) or {}
        _refuse_unknown(options, ("include_usage", "include_obfuscation"))
        if options and not stream:
            raise RefusedError(400, "'stream_options' has no effect without stream=true", "stream_options")
        return Asked(
            _question_of(asked.get("messages")),
            self._row(asked, _least(asked)),
            _typed(asked, "model", str),
            stream,
            _typed(options, "include_usage", bool) or False,
            _stops(asked.get("stop")),
        )

    def answer(self, body: bytes) -> Asked:
        """A request of our own form: a question, and settings."""
        asked = _object(body)
        _refuse_unknown(asked, ("question", *OWN))
        question = asked.get("question")
        if not isinstance(question, str):
            raise RefusedError(400, "'question' must be a text", "question")
        return Asked(_not_blank(question, "question"), self._row(asked))

    def _row(self, asked: Mapping[str, Any], most: int | None = None) -> DecodeConfig:
        """The settings of a request, on top of the server's; most: positions that the client allows."""
        given = {name: _setting(asked, name) for name in OWN if name in asked}
        try:
            settings = with_checkpoints_own(with_values(self._settings, **given), self._shape)
            check_heads(settings, self._heads)
            if self._bounded:
                check_bounded(settings)
            if given.get("finished_blocks") and not self._shape.attention_block:
                raise UserError("finished_blocks has no effect: the model's attention has no blocks")
            length = settings.canvas_length
            assert length is not None
            if length > self._most:
                raise RefusedError(
                    400, f"canvas_length={length} is more than the {self._most} of this server",
                    "canvas_length",
                )  # fmt: skip
            if most is not None and most < length:
                if self._shape.attention_block:
                    raise UserError(f"max_tokens={most} is under the {length} that this model fills")
                settings = with_values(settings, canvas_length=most)
        except UserError as error:
            raise RefusedError(400, str(error)) from None
        return settings


def _object(body: bytes) -> dict[str, Any]:
    try:
        asked = parse_json(body, "this is no request", UserError, "body")
    except UserError as error:
        raise RefusedError(400, str(error)) from None
    if not isinstance(asked, dict):
        raise RefusedError(400, "the body must be a JSON object")
    return asked


def _refuse_unknown(asked: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in asked:
        if name in SHARED:
            raise RefusedError(400, f"'{name}' is the server's own: leave it out", name)
        if name not in known:
            shown = ascii(name)[:60]
            raise RefusedError(400, f"the field {shown} is not known{nearest(name[:60], known)}", name[:60])


def _typed(asked: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field of that type, or None."""
    value = asked.get(name)
    if value is not None and not isinstance(value, kind):
        said = SAID.get(kind, "an object")
        raise RefusedError(400, f"'{name}' must be {said}", name)
    return value


def _setting(asked: Mapping[str, Any], name: str) -> Any:
    value, kinds = asked[name], TYPES[name]
    if value is None:  # as one who leaves it out: OpenAI's clients send null
        return None if NoneType in kinds else DecodeConfig.__dataclass_fields__[name].default
    kind = kinds[0]
    right = (int, float) if kind is float else kind
    if not isinstance(value, right) or (isinstance(value, bool) and kind is not bool):
        raise RefusedError(400, f"'{name}' must be {SAID[kind]}", name)
    return value


def _least(asked: Mapping[str, Any]) -> int | None:
    """The bound of the text in tokens, by the one name or the other."""
    bounds = []
    for name in ("max_tokens", "max_completion_tokens"):
        value = asked.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RefusedError(400, f"'{name}' must be a whole number above 0", name)
        bounds.append(value)
    return min(bounds, default=None)


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if stops is None:
        return ()
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops)
    ):
        raise RefusedError(
            400, f"'stop' must be a text or {MOST_STOPS} at most, each of 1 to {LONGEST_STOP} characters",
            "stop",
        )  # fmt: skip
    return tuple(stops)


def _question_of(messages: Any) -> str:
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise RefusedError(400, "'messages' must be a list of objects", "messages")
    if len(messages) != 1 or messages[0].get("role") != "user":
        raise RefusedError(400, ONE_MESSAGE, "messages")
    _refuse_unknown(messages[0], ("role", "content", "name"))
    content = messages[0].get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) < len(content) or not all(isinstance(part.get("text"), str) for part in parts):
            raise RefusedError(400, "a message has parts of the type 'text' only", "messages")
        content = "\n".join(part["text"] for part in parts)
    if not isinstance(content, str):
        raise RefusedError(400, "the content of a message must be a text", "messages")
    return _not_blank(content, "messages")


def _not_blank(text: str, param: str) -> str:
    if not text.strip():
        raise RefusedError(400, "the question is blank", param)
    return text
