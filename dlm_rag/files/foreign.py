"""What files say that others may have made: checked here before it is believed."""

import os
from pathlib import Path
from typing import Any

from dlm_rag.errors import UserError


def resolve_name(folder: Path, name: Any, place: str, error: type[UserError]) -> Path:
    """The file in `folder` that a file names, as in `rows-00000.parquet` or `held_out/rows-00000.parquet`.

    Raises `error`, its message beginning with `place`, for any name that leads elsewhere: an absolute path,
    `..`, a subfolder that is a link out of the folder, no text at all. The file itself may be a link, since
    the hub's cache consists of them.
    """
    plain = isinstance(name, str) and "\0" not in name and name == os.path.normpath(name)
    if plain and name.split("/")[0] not in ("", ".", ".."):
        path = folder / name
        if Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(folder)):
            return path
    raise error(f"{place} names {name!r:.60}, which is not the name of a file in {folder}")
