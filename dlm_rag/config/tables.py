"""Tables of named entries (commit rules, query policies, retrievers, rewards, objectives, orders).

A setting that names an entry of a table also accepts `module:function`, one of the user's own.
"""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from dlm_rag.errors import ConfigError, suggest_nearest

Entry = TypeVar("Entry")


def import_object(path: str, key: str) -> Any:
    """The object at `module:name`; `ConfigError` names `key`."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"{key}={path} cannot be imported: {error}") from error


def load_object(path: str, key: str) -> Any:
    """The user's own object at `module:name`, with the working folder importable."""
    with _working_folder_first():
        return import_object(path, key)


def look_up(table: Mapping[str, Entry], value: str, key: str) -> Entry | Any:
    """The entry of `table` called `value`, or the user's own at `module:name`; else `ConfigError`."""
    if value in table:
        return table[value]
    if ":" in value:
        return load_object(value, key)
    raise ConfigError(
        f"{key}={value} is not one of {', '.join(table)} or module:function{suggest_nearest(value, table)}"
    )


@contextmanager
def _working_folder_first() -> Iterator[None]:
    folder = os.getcwd()  # noqa: PTH109
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
