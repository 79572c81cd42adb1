"""JSON lines as people write them: blank lines are skipped, a bad line is named."""

import json
from typing import Any

from dlm_rag.errors import UserError


def is_blank(line: bytes) -> bool:
    """Whether a line holds nothing but what JSON takes for white space."""
    return not line.strip(b" \t\r\n")


def parse_object(line: bytes, place: str, error: type[UserError]) -> dict[str, Any]:
    """The JSON object in a line of UTF-8 (a byte order mark is skipped).

    Raises `error`, its message beginning with `place`, for anything else, and for texts that no
    UTF-8 can hold (half of a surrogate pair, written as an escape).
    """
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise error(f"{place}: the line is not UTF-8") from None
    except (ValueError, RecursionError) as problem:
        reason = getattr(problem, "msg", "a number or a nesting beyond all measure")
        raise error(f"{place}: the line is not JSON ({reason})") from None
    if not isinstance(value, dict):
        raise error(f"{place}: the line is not a JSON object")
    if b"\\ud" in line.lower() and not is_text(json.dumps(value, ensure_ascii=False)):
        raise error(f"{place}: a text holds half of a character (a lone surrogate)")
    return value


def is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
