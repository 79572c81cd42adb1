"""Fields that carry their help text and their bounds, and refuse what is outside them."""

import sys
from dataclasses import field, fields, replace
from typing import Any, TypeVar

from dlm_rag.config.renamed import find_new_value
from dlm_rag.errors import ConfigError, suggest_nearest

MAX_SHOWN_CHARS = 60  # characters of a value


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A dataclass field with its help text and its allowed values (bounds are inclusive)."""
    metadata = {"help": help, "choices": choices, "low": low, "high": high}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


class CheckedSettings:
    """Refuses field values outside the declared choices and bounds, when constructed."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value, rule = getattr(self, item.name), item.metadata
            if value is None or not rule:
                continue
            if item.type == str | None and not str(value).strip():  # the variable of a script that is unset
                raise ConfigError(f"{item.name} is empty: give it a value, or leave it out")
            for part in value.values() if isinstance(value, dict) else (value,):
                if isinstance(part, str) and "\0" in part:
                    raise ConfigError(f"{item.name} holds a NUL character: take it out")
                if isinstance(part, str) and part != part.encode(errors="replace").decode():
                    locale = sys.getfilesystemencoding()
                    remedy = f"set PYTHONUTF8=1, for the locale is {locale}"
                    if locale == "utf-8":
                        remedy = "write it in that, or rename"
                    raise ConfigError(f"{item.name}={shorten_repr(part)} is not UTF-8: {remedy}")
                if isinstance(part, int | float) and not -(2**63) < part < 2**63:  # nor NaN
                    raise ConfigError(
                        f"{item.name}={shorten_repr(part)} is out of range: it must be a number below 2^63"
                    )
            if (new := find_new_value(item.name, value)) and value not in rule["choices"]:
                raise ConfigError(f"{item.name}={value} is now {item.name}={new}: write that")
            if rule["choices"] and value not in rule["choices"]:
                raise ConfigError(
                    f"{item.name}={shorten_repr(value)} is not one of {', '.join(rule['choices'])}"
                    f"{suggest_nearest(str(value), rule['choices'])}"
                )
            low, high = rule["low"], rule["high"]
            if (low is not None and not value >= low) or (high is not None and not value <= high):
                bounds = f"at least {low}" if high is None else f"between {low} and {high}"
                raise ConfigError(f"{item.name}={value} is out of range: it must be {bounds}")


Settings = TypeVar("Settings", bound=CheckedSettings)


def replace_settings(settings: Settings, **values: Any) -> Settings:
    """`settings` with these values, checked; itself where it has them already, for checks take time.

    Raises `ConfigError`.
    """
    new = {name: value for name, value in values.items() if getattr(settings, name) != value}
    return replace(settings, **new) if new else settings  # type: ignore[type-var]


def shorten_repr(value: Any) -> str:
    """The beginning of a value, as errors show it."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
