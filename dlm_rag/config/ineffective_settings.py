"""Settings that have no effect under the others: declared by `setting(..., only_with=...)`, refused here.

    kl_coef: float = setting(0.0, "...", only_with={"train.objective": ("rl",)})

Each key of `only_with` is another setting, or a fact about the checkpoint ("noise": mask or uniform;
"attention_blocks"), which is known once that is open. A value that is unset, and thus the checkpoint's own,
is not known before either. Where a setting names an entry of a table (`setting(..., table=...)`), the
entries say in `settings` what they read: a setting that only others of them read has no effect.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from operator import attrgetter
from typing import Any

from dlm_rag.config.fields import SET, CheckedSettings, Need, get_rule, import_object
from dlm_rag.errors import ConfigError

FACTS: dict[str, dict[Any, str]] = {  # about a checkpoint, as a sentence on it ends
    "noise": {
        "mask": "a model that denoises from masks", "uniform": "a model that denoises from uniform noise",
    },
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
    reasons: dict[str, list[str]] = {}
    for config, keys in variants:
        phases = config.train.get_phase_configs()
        for key in {*keys} - {*(words or ())}:
            among, own = list(phases), key
            if key.startswith("train.phases."):
                phase, _, name = key.removeprefix("train.phases.").rpartition(".")
                among, own = [phase], f"train.{name}"
            for phase in among:
                reason = _why_idle(replace(config, train=phases[phase]), own, words)
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
    holder: Any = type(settings)
    for item in fields(holder):
        value = getattr(settings, item.name)
        if value == item.default or (own and value == own.get(item.name)):
            continue
        missing = [_missing(need, facts) for need in _list_needs(section, holder, item.name)]
        if missing and all(missing):
            raise ConfigError(
                f"{section}.{item.name}={_show(value)} has no effect {missing[0]}: leave it out"
            )


def _why_idle(config: Any, key: str, words: Iterable[str] | None) -> str:
    """`VALUE has no effect with ...`; empty where the setting has one, or is at its default."""
    section, _, name = key.rpartition(".")
    holder = getattr(config, section) if section else config
    item = next(item for item in fields(holder) if item.name == name)
    if (value := getattr(holder, name)) in (item.default, {}):
        return ""
    needs = _list_needs(section, holder.__class__, name)
    if words is not None:
        held = [{k: v for k, v in need.items() if v is not SET and k not in words} for need in needs]
        needs = tuple(held)
    values = {key: attrgetter(key)(config) for need in needs for key in need if key not in FACTS}
    missing = [_missing(need, values) for need in needs]
    return f"{_show(value)} has no effect {missing[0]}" if missing and all(missing) else ""


@cache
def _list_needs(section: str, holder: Any, name: str) -> tuple[Need, ...]:
    """What a setting needs: as its field declares, and as the tables of its section say."""
    needs: tuple[Need, ...] = ()
    from_tables: Need = {}
    for item in fields(holder):
        if item.name == name:
            needs = get_rule(item, "only_with")
        if not get_rule(item, "table"):
            continue
        read_by = {
            entry: getattr(value, "settings", None)
            for entry, value in import_object(get_rule(item, "table"), item.name).items()
        }
        if any(name in (settings or ()) for settings in read_by.values()):
            readers = tuple(entry for entry, settings in read_by.items() if settings and name in settings)
            from_tables[f"{section}.{item.name}"] = readers
    if not needs:
        return (from_tables,) if from_tables else ()
    # Training has rules of its own for its rollouts, whatever the table's setting says.
    return tuple(need if "train.objective" in need else need | from_tables for need in needs)


def _missing(need: Need, values: Mapping[str, Any]) -> str:
    """Which of the needed values is another one, as an error says it; empty where none is.

    values: of other settings and facts, as far as they are known.
    """
    for key, accepted in need.items():
        if key not in values:
            continue
        value = values[key]
        if accepted is SET:
            if not value:
                return f"without {key}: set it too, or leave this out"
            continue
        own = isinstance(value, str) and ":" in value and "://" not in value  # module:function
        if own or (value is None and None not in accepted) or _is_accepted(value, accepted):
            continue
        if key in FACTS:
            return f"on {FACTS[key][value]}"
        wanted = ["a value above 0" if each is SET else _show(each) for each in accepted]
        return f"with {key}={_show(value)}: it needs {key}={' or '.join(wanted)}"
    return ""


def _show(value: Any) -> str:
    """A value as one writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_accepted(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Whether a value is among the accepted ones, where `scheme://` stands for every such URL."""
    starts = tuple(each for each in accepted if isinstance(each, str) and each.endswith("://"))
    started = isinstance(value, str) and value.startswith(starts)
    return value in accepted or started or bool(value and SET in accepted)
