"""JSON from files that others may have written, checked: errors name the file, the line and the key."""

import json
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from dlm_rag.errors import UserError

T = TypeVar("T")
_make_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
MAX_LINE_BYTES = 2**28  # bytes
MAX_BLANK_LINES = 10**6  # one after another
MAX_SIDECAR_BYTES = 2**26  # bytes of this program's own notes on its files


def validate_json_value(kind: type[T], value: Any, place: str, error: type[UserError]) -> T:
    """A value that JSON has given as `kind`, a dataclass for example, by its annotations.

    A whole number may stand for a float and a list for a tuple; nothing else is converted. Keys that `kind`
    does not have are ignored. Raises `error`, its message beginning with `place` and the key, as in
    `steps.0.query`: for a value of another type, a missing key, a number that is not finite.
    """
    try:
        # As JSON text: only in that are lists tuples where everything else is strict.
        return _make_adapter(kind).validate_json(json.dumps(value, allow_nan=False), strict=True)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        key = "".join(f"{part}: " for part in [".".join(map(str, first["loc"]))] if part)
        said = f"{key}{first['msg'][0].lower()}{first['msg'][1:]}"
    except (ValueError, RecursionError):
        said = "it holds NaN, Infinity, or a nesting that is too deep"
    raise error(f"{place}: {said}")


def iter_lines(
    file: IO[bytes], path: str, error: type[UserError], blank: bool = False
) -> Iterator[tuple[str, int, bytes]]:
    """Place, offset and bytes of each line; raises `error` for one that would not fit into memory.

    blank: also of lines that hold nothing but what JSON takes for white space.
    """
    offset, filled = 0, 0
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), start=1):
        place = f"{path}, line {number}"
        if len(line) == MAX_LINE_BYTES:
            raise error(f"{place}: the line has more than {MAX_LINE_BYTES >> 20} MiB")
        if blank or line.strip(b" \t\r\n"):
            filled = number
            yield place, offset, line
        elif number - filled > MAX_BLANK_LINES:
            raise error(f"{place}: there are {MAX_BLANK_LINES:,} blank lines one after another")
        offset += len(line)


def decode_utf8(data: bytes, place: str, error: type[UserError], what: str = "line") -> str:
    """UTF-8 as text (a byte order mark is skipped); raises `error` that begins with `place`."""
    try:
        return data.removeprefix(BOM_UTF8).decode()  # the codec utf-8-sig takes twice as long
    except UnicodeDecodeError:
        coding = "utf-16" if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "cp1252"
        said = f"{place}: the {what} is not UTF-8"
        remedy = f": save the file as UTF-8 (`iconv -f {coding} -t utf-8`, for example)"
        raise error(said + remedy * (what in ("line", "text", "file"))) from None


def parse_json_object(line: bytes, place: str, error: type[UserError]) -> dict[str, Any]:
    """The JSON object in a line; raises `error` for anything else, and as `parse_json` does."""
    value = parse_json(line, place, error)
    if not isinstance(value, dict):
        raise error(f"{place}: the line is not a JSON object")
    return value


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """The object in a JSON file that this program has written; empty if it cannot be read."""
    with suppress(OSError, UserError):
        if path.is_file() and path.stat().st_size <= MAX_SIDECAR_BYTES:  # no pipe, which would wait
            return parse_json_object(path.read_bytes(), str(path), UserError)
    return {}


def parse_json(text: bytes, place: str, error: type[UserError], what: str = "line") -> Any:
    """The JSON value in UTF-8 (a byte order mark is skipped).

    Raises `error`, its message beginning with `place`, for anything else, for a key that occurs twice in
    one object, and for texts that no UTF-8 can hold (half of a surrogate pair, written as an escape).
    """
    decoded = decode_utf8(text, place, error, what)
    try:
        value = _DECODER.decode(decoded)
        if b"\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise error(f"{place}: a text holds half of a character (a lone surrogate)") from None
    except (ValueError, RecursionError) as problem:
        reason = getattr(problem, "msg", "a number or a nesting that is too large")
        at = f" in its line {problem.lineno}" if what != "line" and hasattr(problem, "lineno") else ""
        raise error(f"{place}: the {what} is not JSON ({reason}{at})") from None
    return value


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise json.JSONDecodeError(f"the key '{twice}' occurs a second time", "", 0)
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_reject_duplicate_keys)
