"""Settings that have no effect under the others: declared by `setting(..., only_with=...)`, refused here.

    forward_cost: float = setting(0.0, only_with={"train.objective": ("rl",)})

Each key of `only_with` is another setting, or "attention_blocks", a fact about the checkpoint, which is
known once that is open. What is unset, and thus the checkpoint's own, is not known before either. Where a
setting names an entry of a table (`setting(..., table=...)`), the entries say in `settings` what they read:
a setting that only others of them read has no effect.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, cast

from dlm_rag.config.fields import (
    SET,
    CheckedSettings,
    Need,
    flatten_settings,
    get_field_metadata,
    import_object,
)
from dlm_rag.errors import ConfigError


def check_effects(variants: Iterable[tuple[Any, Iterable[str]]]) -> None:
    """Raises `ConfigError` for a setting of the command line that is not its default and has no effect.

    variants: configs, each with the dotted keys that were given for it. A key may be without effect in some
    of them.
    """
    reasons: dict[str, list[str]] = {}
    for config, keys in variants:
        known = flatten_settings(config)
        for key in keys:
            section, _, name = key.rpartition(".")
            holder = getattr(config, section) if section else config
            found = find_idle_settings(section, holder, known, {name: known[key]})
            reasons.setdefault(key, []).append(found.get(name, ""))
    for key, why in sorted(reasons.items()):
        if all(why):
            raise ConfigError(f"{key}={why[0]}")


def find_idle_settings(
    section: str,
    settings: CheckedSettings,
    known: Mapping[str, Any],
    values: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Reasons, by name, for the settings that are not at their defaults and have no effect.

    known: values of other settings by dotted keys, and facts about the checkpoint. values: those that are
    asked about, in place of all.
    """
    found, holder = {}, cast(Any, type(settings))  # a class, which has a hash where its instances have none
    for name, value in (flatten_settings(settings) if values is None else values).items():
        if value in (settings.__dataclass_fields__[name].default, {}):
            continue
        if reason := _describe_missing(list_needs(section, holder, name), known):
            found[name] = f"{_show(value)} has no effect {reason}"
    return found


@cache
def list_needs(section: str, holder: Any, name: str) -> Need:
    """What a setting needs: as its field declares, and as the tables of its section say."""
    need: Need = dict(get_field_metadata(holder.__dataclass_fields__[name], "only_with"))
    for item in fields(holder):
        table = get_field_metadata(item, "table")
        entries = import_object(table, item.name) if table else {}
        readers = [key for key, each in entries.items() if name in (getattr(each, "settings", None) or ())]
        if readers:
            need.setdefault(f"{section}.{item.name}", tuple(readers))
    return need


def _describe_missing(need: Need, known: Mapping[str, Any]) -> str:
    """Which of the needed values is another one, as an error says it; empty where none is."""
    for key in [key for key in need if key in known]:
        value, accepted = known[key], need[key]
        if accepted is SET:
            if not value:
                return f"without {key}: set it too, or leave this out"
            continue
        is_code_of_user = isinstance(value, str) and ":" in value and "://" not in value
        if is_code_of_user or (value is None and None not in accepted) or _is_accepted(value, accepted):
            continue
        if key == "attention_blocks":
            return "on a model whose attention has no blocks"
        wanted = " or ".join("a value above 0" if each is SET else _show(each) for each in accepted)
        return f"with {key}={_show(value)}: it needs {key}={wanted}"
    return ""


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_accepted(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Whether a value is among the accepted ones, where `scheme://` stands for every such URL."""
    scheme = "".join(value.partition("://")[:2]) if isinstance(value, str) else ""
    return value in accepted or scheme in accepted or bool(value and SET in accepted)
