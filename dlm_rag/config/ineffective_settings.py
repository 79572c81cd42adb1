"""Settings that have no effect under the others: declared by `setting(..., only_with=...)`, refused here.

    kl_coef: float = setting(0.0, "...", only_with={"train.objective": ("rl",)})

Each key of `only_with` is another setting, or a fact about the checkpoint ("attention_blocks"), which is
known once that is open. A value that is unset, and thus the checkpoint's own, is not known before either.
Where a setting names an entry of a table (`setting(..., table=...)`), the entries say in `settings` what
they read: a setting that only others of them read has no effect.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any, TypeVar

from dlm_rag.config.fields import (
    SET,
    SEVERAL,
    CheckedSettings,
    Need,
    flatten_settings,
    get_field_metadata,
    import_object,
)
from dlm_rag.errors import ConfigError

Settings = TypeVar("Settings", bound=CheckedSettings)
FACTS: dict[str, dict[Any, str]] = {  # about a checkpoint, as a sentence on it ends
    "attention_blocks": {False: "a model whose attention has no blocks"},
}  # fmt: skip


def check_effects(
    variants: Iterable[tuple[Any, Iterable[str]]], words: Iterable[str] | None = None
) -> None:
    """Raises `ConfigError` for a given setting that is not its default and has no effect.

    variants: configs, each with the dotted keys that were given for it. A key may be without effect in some
    of them, and in some phases of training.
    words: where the keys are those of a file, the ones that the command line replaces. A file is a recipe:
    what the command line makes idle in it is no mistake, nor what waits for another setting to be given.
    """
    replaced, reasons = {*(words or ())}, dict[str, list[str]]()
    for config, keys in variants:
        for phase, train in config.train.get_phase_configs().items():
            values = flatten_settings(config) | flatten_settings(train, "train.")
            known = {key: value for key, value in values.items() if key not in replaced}
            for key in {*keys} - replaced:
                own = key.replace(f"train.phases.{phase}.", "train.")
                if own in values:  # else of another phase
                    section, _, name = own.rpartition(".")
                    holder = type(getattr(config, section) if section else config)
                    reason = _explain_idle(section, holder, name, values[own], known, words is not None)
                    reasons.setdefault(key, []).append(reason)
    for key, found in sorted(reasons.items()):
        if all(found):
            raise ConfigError(f"{key}={found[0]}")


def check_checkpoint_effects(
    section: str, settings: CheckedSettings, facts: Mapping[str, Any], own: Mapping[str, Any] | None = None
) -> None:
    """Raises `ConfigError` for what has no effect on a checkpoint.

    facts: about it, by the keys of `FACTS`; also what settings that are unset come to, by dotted keys.
    own: the checkpoint's values of fields, which are no more refused than the defaults are.
    """
    for name, value in flatten_settings(settings).items():
        if own and name in own and value == own[name]:
            continue
        if reason := _explain_idle(section, type(settings), name, value, facts):
            raise ConfigError(f"{section}.{name}={reason}: leave it out")


def reset_idle_settings(section: str, settings: Settings, facts: Mapping[str, Any]) -> Settings:
    """`settings` with the defaults of those without effect; facts: as in `check_checkpoint_effects`."""
    idle = {
        name: type(settings).__dataclass_fields__[name].default
        for name, value in flatten_settings(settings).items()
        if _explain_idle(section, type(settings), name, value, facts)
    }
    return replace(settings, **idle)


def list_idle_settings(
    section: str, settings: CheckedSettings, facts: Mapping[str, Any], names: Iterable[str]
) -> list[str]:
    """Which of the settings `names` have no effect; facts: as in `check_checkpoint_effects`."""
    values = flatten_settings(settings)
    return [n for n in names if _explain_idle(section, type(settings), n, values[n], facts)]


def _explain_idle(
    section: str, holder: Any, name: str, value: Any, known: Mapping[str, Any], is_recipe: bool = False
) -> str:
    """`VALUE has no effect with ...`; empty where the setting has one, or is at its default.

    known: values of other settings and facts. is_recipe: whether what is not set may be set later.
    """
    if value in (holder.__dataclass_fields__[name].default, {}):
        return ""
    missing = [_describe_missing(need, known, is_recipe) for need in list_needs(section, holder, name)]
    return f"{_show(value)} has no effect {missing[0]}" if missing and all(missing) else ""


@cache
def list_needs(section: str, holder: Any, name: str) -> tuple[Need, ...]:
    """What a setting needs: as its field declares, and as the tables of its section say."""
    needs: tuple[Need, ...] = get_field_metadata(holder.__dataclass_fields__[name], "only_with")
    from_tables: Need = {}
    for item in fields(holder):
        table = get_field_metadata(item, "table")
        entries = import_object(table, item.name) if table else {}
        readers = [key for key, each in entries.items() if name in (getattr(each, "settings", None) or ())]
        if readers:
            from_tables[f"{section}.{item.name}"] = tuple(readers)
    if not needs:
        return (from_tables,) if from_tables else ()
    # Training has rules of its own for its rollouts, whatever the table's setting says.
    return tuple(need if "train.objective" in need else need | from_tables for need in needs)


def _describe_missing(need: Need, known: Mapping[str, Any], is_recipe: bool) -> str:
    """Which of the needed values is another one, as an error says it; empty where none is."""
    for key in [key for key in need if key in known]:
        value, accepted = known[key], need[key]
        if accepted is SET or accepted is SEVERAL:
            if not is_recipe and not (value and (accepted is SET or value > 1)):
                least = "" if accepted is SET else "=2 or more"
                return f"without {key}{least}: set it too, or leave this out"
            continue
        is_code_of_user = isinstance(value, str) and ":" in value and "://" not in value
        if is_code_of_user or (value is None and None not in accepted) or _is_accepted(value, accepted):
            continue
        if key in FACTS:
            return f"on {FACTS[key][value]}"
        wanted = " or ".join("a value above 0" if each is SET else _show(each) for each in accepted)
        return f"with {key}={_show(value)}: it needs {key}={wanted}"
    return ""


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_accepted(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Whether a value is among the accepted ones, where `scheme://` stands for every such URL."""
    scheme = "".join(value.partition("://")[:2]) if isinstance(value, str) else ""
    return value in accepted or scheme in accepted or bool(value and SET in accepted)
