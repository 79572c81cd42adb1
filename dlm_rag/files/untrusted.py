"""Checks of what is in files that others may have made."""

import json
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dlm_rag.errors import UserError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")


def resolve_path_inside(folder: Path, name: Any, place: str, error: type[UserError]) -> Path:
    """The file in `folder` that a file names, as in `rows-00000.parquet` or `held_out/rows-00000.parquet`.

    Raises `error`, its message beginning with `place`, for any name that leads elsewhere: an absolute path,
    `..`, a subfolder that is a link out of the folder, a value that is not a text. The file itself may be a
    link: the hub's cache consists of them.
    """
    plain = isinstance(name, str) and "\0" not in name and name == os.path.normpath(name)
    if plain and name.split("/")[0] not in ("", ".", ".."):
        path = folder / name
        if Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(folder)):
            return path
    raise error(f"{place} names {name!r:.60}, which is not the name of a file in {folder}")


def validate_json_value(kind: type[T], value: Any, place: str, error: type[UserError]) -> T:
    """A value that JSON has given as `kind`, a dataclass for example, by its annotations.

    A whole number may stand for a float and a list for a tuple; nothing else is converted. Keys that `kind`
    does not have are ignored. Raises `error`, its message beginning with `place` and the key, as in
    `steps.0.query`: for a value of another type, a missing key, a number that is not finite.
    """
    from pydantic import ValidationError

    try:
        # As JSON text: only in that are lists tuples where everything else is strict.
        found: T = _adapter(cast(Any, kind)).validate_json(json.dumps(value, allow_nan=False), strict=True)
        return found
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        key = "".join(f"{part}: " for part in [".".join(map(str, first["loc"]))] if part)
        said = f"{key}{first['msg'][0].lower()}{first['msg'][1:]}"
    except (ValueError, RecursionError):
        said = "it holds NaN, Infinity, or a nesting that is too deep"
    raise error(f"{place}: {said}")


@cache
def _adapter(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter  # takes a tenth of a second to import

    return TypeAdapter(kind)
