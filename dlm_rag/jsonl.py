"""JSON lines as people write them: blank lines are skipped, a bad line is named."""

import json
from typing import Any

from dlm_rag.errors import UserError


def parse_object(line: bytes, place: str, error: type[UserError]) -> dict[str, Any]:
    """The JSON object in a line of UTF-8 (a byte order mark is skipped).

    Raises `error`, its message beginning with `place`, for anything else.
    """
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise error(f"{place}: the line is not UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as problem:
        reason = getattr(problem, "msg", "nested too deeply")
        raise error(f"{place}: the line is not JSON ({reason})") from None
    if not isinstance(value, dict):
        raise error(f"{place}: the line is not a JSON object")
    return value
