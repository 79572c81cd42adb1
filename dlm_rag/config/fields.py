"""Fields that carry their help text, their bounds and what they need, and refuse what is outside them.

A setting that names an entry of a table (commit rules, query policies, retrievers, rewards, objectives)
also accepts `module:function`, one of the user's own.
"""

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, field, fields, replace
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

from dlm_rag.config.renamed import find_new_value
from dlm_rag.errors import ConfigError, suggest_nearest

MAX_SHOWN_CHARS = 60  # characters of a value
SET = object()  # in `only_with`: any value but null, 0, false and the empty one
Entry = TypeVar("Entry")
Need = dict[str, Any]  # the values of other settings, by dotted key: `SET`, or a tuple of values


def setting(
    default: Any,
    *,
    choices: tuple[str, ...] = (),
    table: str = "",
    low: float | None = None,
    high: float | None = None,
    only_with: Need | tuple[Need, ...] = (),
) -> Any:
    """A dataclass field with its allowed values (bounds are inclusive); the text below it is its help.

    table: `module:NAME` of a table whose names are the choices; a value may then also be `module:function`.
    only_with: without these values of other settings this one has no effect (dlm_rag/config/effects.py); of
    several such dicts one must hold.
    """
    needs = (only_with,) if isinstance(only_with, dict) else only_with
    metadata = {"choices": choices, "table": table, "low": low, "high": high, "only_with": needs}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@cache
def read_help(holder: type) -> dict[str, str]:
    """The help texts of a class of settings by field: the strings below the fields."""
    (tree,) = ast.parse(inspect.getsource(holder)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for item, after in pairwise(tree.body):
        if isinstance(item, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(item.target, ast.Name) and isinstance(after.value, ast.Constant)
            found[item.target.id] = " ".join(str(after.value.value).split())
    return found


def list_choices(item: Field[Any]) -> tuple[str, ...]:
    """The names that a field accepts; none where it accepts any value."""
    if table := item.metadata.get("table"):
        return tuple(import_object(table, item.name))
    return item.metadata.get("choices", ())


class CheckedSettings:
    """Refuses field values outside the declared choices and bounds, when constructed."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if value is not None and value is not item.default and item.metadata:
                _check_value(item, value)


def _check_value(item: "Field[Any]", value: Any) -> None:
    name, rule = item.name, item.metadata
    if item.type == str | None and not str(value).strip():  # an unset variable of a shell script
        raise ConfigError(f"{name} is empty: give it a value, or leave it out")
    for part in value.values() if isinstance(value, dict) else (value,):
        if isinstance(part, str):
            _check_text(name, part)
        elif isinstance(part, int | float) and not -(2**63) < part < 2**63:  # nor NaN
            raise ConfigError(f"{name}={shorten_repr(part)} is out of range: give a number below 2^63")
    own = rule["table"] and isinstance(value, str) and ":" in value
    if (choices := list_choices(item)) and value not in choices and not own:
        if new := find_new_value(name, value):
            raise ConfigError(f"{name}={value} is now {name}={new}: write that")
        names = ", ".join(choices) + " or module:function" * bool(rule["table"])
        hint = suggest_nearest(str(value), choices)
        raise ConfigError(f"{name}={shorten_repr(value)} is not one of {names}{hint}")
    low, high = rule["low"], rule["high"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{name}={value} is out of range: it must be {bounds}")


def _check_text(name: str, text: str) -> None:
    if "\0" in text:
        raise ConfigError(f"{name} contains a NUL character: remove it")
    if text != text.encode(errors="replace").decode():
        locale = sys.getfilesystemencoding()
        remedy = "rename it" if locale == "utf-8" else f"the locale is {locale}: set PYTHONUTF8=1"
        raise ConfigError(f"{name}={shorten_repr(text)} is not UTF-8: {remedy}")


Settings = TypeVar("Settings", bound=CheckedSettings)


def replace_settings(settings: Settings, **values: Any) -> Settings:
    """`settings` with these values, checked; itself where nothing changes, for checks take time.

    Raises `ConfigError`.
    """
    new = {name: value for name, value in values.items() if getattr(settings, name) != value}
    return replace(settings, **new) if new else settings  # type: ignore[type-var]


def shorten_repr(value: Any) -> str:
    """The beginning of a value, as errors show it."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


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
