"""Fields of settings: their choices, bounds, help texts, and what they need to have an effect.

pydantic checks a value against its field, when settings are constructed. A setting that names an entry of a
table (commit rules, retrievers, rewards) also accepts `module:function`, one of the user's own. The entries
say in `settings` what they read: a setting that only others of them read has no effect.

Each key of `only_with` is another setting, or "attention_blocks", a fact about the checkpoint, which is
known once that is open. What is unset, and thus the checkpoint's own, is not known before either.
"""

import dataclasses
import importlib
import inspect
import logging
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, TypeVar, cast, dataclass_transform

import pydantic
import yaml
from pydantic.dataclasses import dataclass as pydantic_dataclass

from dlm_rag.errors import ConfigError, suggest_nearest, summarize_error

log = logging.getLogger(__name__)
SET = object()  # in `only_with`: any value but null, 0, false and the empty one
Need = dict[str, Any]  # the values of other settings, by dotted key: `SET` or a tuple of values
_SETTINGS_RULES = pydantic.ConfigDict(
    extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, coerce_numbers_to_str=True
)


def suggest_setting(key: str, known: Iterable[str]) -> str:
    """As `suggest_nearest`, but first the setting of that name elsewhere, or meaning (`synonyms.yaml`)."""
    section, _, leaf = key.rpartition(".")
    texts = yaml.safe_load(Path(__file__).with_name("synonyms.yaml").read_text("utf-8"))
    ours = {other: own for own, others in texts.items() for other in others}
    leaf = ours.get(key, ours.get(leaf, leaf))
    same = [each for each in known if each.rpartition(".")[2] == leaf]
    same.sort(key=lambda each: not each.startswith(f"{section}."))
    return f" (nearest: '{same[0]}')" if same else suggest_nearest(key, known)


def setting(
    default: Any, *, choices: tuple[str, ...] = (), table: str = "", low: float | None = None,
    high: float | None = None, only_with: Need | tuple[()] = (),
) -> Any:  # fmt: skip
    """A dataclass field with its allowed values (bounds are inclusive); the text below it is its help.

    table: `module:NAME` of a table whose names are the choices; a value may then also be `module:function`.
    only_with: without these values of other settings this one has no effect (`check_effects`).
    """
    own = {"choices": choices, "table": table, "only_with": only_with}
    metadata = {"ge": low, "le": high, "json_schema_extra": own}
    return dataclasses.field(default=default, metadata=metadata)


def get_field_metadata(item: "dataclasses.Field[Any]", name: str) -> Any:
    """`choices`, `table`, `only_with` or `help` of a field; empty for one that holds a section."""
    return item.metadata.get("json_schema_extra", {}).get(name, ())


def list_choices(item: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """The names that a field accepts; none where it accepts any value."""
    table, choices = get_field_metadata(item, "table"), get_field_metadata(item, "choices")
    return tuple(import_object(table, item.name) if table else choices)


@pydantic_dataclass(config=_SETTINGS_RULES)
class CheckedSettings:
    """Settings that are checked by pydantic, and by what it has no types for."""

    given: ClassVar[frozenset[str]] = frozenset()  # the names of those that somebody has set

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _note_given(cls, values: Any, construct: Callable[[Any], Any]) -> Any:
        made = construct(values)
        if made is not values:  # a section that was constructed before
            from_tree = isinstance(values, dict)
            named = values if from_tree else values.kwargs or {}
            defaults = {item.name: item.default for item in dataclasses.fields(cls)}
            if not from_tree and named.keys() >= defaults.keys():  # a copy of `dataclasses.replace`
                named = {name for name in defaults if named[name] != defaults[name]}
            # None among names is no value of its own: it unsets what a file says.
            items = dataclasses.fields(cls)
            tabled = {i.name for i in items if any(get_field_metadata(i, n) for n in ("table", "choices"))}
            made.__dict__["given"] = frozenset(
                n for n in named if not (n in tabled and getattr(made, n) is None)
            )
        return made

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_value(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        kind = cls.__dataclass_fields__[str(info.field_name)].type
        if isinstance(value, bool) and {int, float} & {*getattr(kind, "__args__", (kind,))}:
            raise ValueError("must be a number: YAML reads yes, no, on and off as truth values")
        return value

    @pydantic.field_validator("*")
    @classmethod
    def _check_value(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        item = cls.__dataclass_fields__[str(info.field_name)]
        if isinstance(value, int | float) and abs(value) >= 2**63:
            raise ValueError("must be below 2^63")
        if isinstance(value, str) and ("\0" in value or value != value.encode(errors="replace").decode()):
            raise ValueError("is not UTF-8 or holds a NUL: rename it, or set PYTHONUTF8=1")
        if item.type == str | None and value is not None and not value.strip():
            raise ValueError("is empty: give it a value, or leave it out")  # an unset variable of a shell
        if value is None or value == item.default:
            return value
        own = get_field_metadata(item, "table") and isinstance(value, str) and ":" in value
        if (choices := list_choices(item)) and value not in choices and not own:
            names = ", ".join(choices) + " or module:function" * bool(get_field_metadata(item, "table"))
            raise ValueError(f"is not one of {names}{suggest_nearest(value, choices)}")
        return value


Settings = TypeVar("Settings", bound=CheckedSettings)


@dataclass_transform()
def settings_dataclass(holder: type[Settings]) -> type[Settings]:
    """A pydantic dataclass whose constructor raises `ConfigError` with the key and takes `Path` as text."""
    made: Any = pydantic_dataclass(config=_SETTINGS_RULES)(holder)
    construct = made.__init__
    for item in dataclasses.fields(made):
        if (rules := item.metadata.get("json_schema_extra")) is not None:
            rules["help"] = " ".join((made.__pydantic_fields__[item.name].description or "").split())

    @wraps(construct)
    def init(self: Settings, *args: Any, **values: Any) -> None:
        names = [item.name for item in dataclasses.fields(made)]
        if unknown := [name for name in values if name not in names]:
            nearest = suggest_setting(unknown[0], names)
            raise ConfigError(f"{made.__name__} has no setting '{unknown[0]}'{nearest}")
        paths = {name: str(value) for name, value in values.items() if isinstance(value, PurePath)}
        try:
            construct(self, *args, **values | paths)
        except pydantic.ValidationError as error:
            raise ConfigError(explain_validation_error(error)[1]) from None

    made.__init__ = init
    return made


def explain_validation_error(error: pydantic.ValidationError) -> tuple[str, str, str]:
    """The dotted key at fault, one sentence, and pydantic's name of the fault; unknown keys come first."""
    first = min(error.errors(), key=lambda each: each["type"] != "unexpected_keyword_argument")
    key, cause = ".".join(map(str, first["loc"])), first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # of several fields together
        return key, str(cause), first["type"]
    reason = str(cause or first["msg"]).replace("Input should", "must").replace("String should", "must")
    if first["type"] == "string_type" and isinstance(first["input"], bool):
        reason += ": YAML reads yes, no, on and off as truth values, so put the word in quotes"
    return key, f"{key}={shorten_value(first['input'])} {reason}", first["type"]


def replace_settings(settings: Settings, **values: Any) -> Settings:
    """`settings` with these values, checked; itself where nothing changes. Raises `ConfigError`."""
    new = {name: value for name, value in values.items() if getattr(settings, name, SET) != value}
    if not new and settings.given >= values.keys():
        return settings
    found = dataclasses.replace(settings, **new)
    found.__dict__["given"] = settings.given | values.keys()
    return found


def fill_unset(settings: Settings, own: Mapping[str, Any]) -> Settings:
    """`settings` with a checkpoint's `own` values for those that nobody has set, and they count as such."""
    found = replace_settings(settings, **{n: v for n, v in own.items() if n not in settings.given})
    found.__dict__["given"] = settings.given
    return found


def flatten_settings(settings: Any, prefix: str = "") -> dict[str, Any]:
    """The values of settings by their dotted keys."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(settings):
        value, key = getattr(settings, item.name), f"{prefix}{item.name}"
        is_section = dataclasses.is_dataclass(value)
        found |= flatten_settings(value, f"{key}.") if is_section else {key: value}
    return found


def shorten_value(value: Any) -> str:
    """The beginning of a value, as errors show it."""
    text = value if isinstance(value, str) else reprlib.repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def check_url(key: str, url: str, schemes: tuple[str, ...], token: str) -> None:
    """Raises `ConfigError` for what is not a URL of these schemes; token: the variable that holds one."""
    rules = pydantic.UrlConstraints(allowed_schemes=list(schemes), host_required=True)
    try:
        parts = pydantic.TypeAdapter(Annotated[pydantic.AnyUrl, rules]).validate_python(url)
    except pydantic.ValidationError as error:
        reason = error.errors()[0]["msg"].replace("Input should be", "must be")
        raise ConfigError(f"{key}={shorten_value(url)}: {reason}") from None
    if parts.username or parts.password or parts.fragment:  # not shown: it may be a password
        raise ConfigError(f"{key} has a user or a fragment, which are not sent: a token is ${token}")


def import_object(path: str, key: str) -> Any:
    """The object at `module:name`; `ConfigError` names `key`."""
    module, _, name = path.partition(":")
    try:
        if not module or module.startswith("."):
            raise ImportError("write module:function, the module by its full name")
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        reason = f"it calls {error!r}" if isinstance(error, SystemExit) else summarize_error(error)
        raise ConfigError(f"{key}={path} cannot be imported: {reason}") from error


def resolve_or_import(table: Mapping[str, Any], value: str, key: str, arguments: int = 0) -> Any:
    """The entry of `table` called `value`, or the user's own at `module:name`, which may be a file of the
    working folder; else `ConfigError`. arguments: that a function must take; 0: any."""
    if value in table:
        return table[value]
    sys.path.insert(0, "")
    try:
        found = import_object(value, key)
    finally:
        sys.path.remove("")
    if not (callable(found) or dataclasses.is_dataclass(found)):
        raise ConfigError(f"{key}={value} is {type(found).__name__}, not a function")
    if arguments and callable(found):
        try:
            inspect.signature(found).bind(*[None] * arguments)
        except TypeError as error:
            raise ConfigError(f"{key}={value} does not take {arguments} arguments: {error}") from None
        except ValueError:  # of what is written in C, some says nothing
            pass
    return found


def check_effects(variants: Iterable[tuple[Any, Iterable[str]]]) -> None:
    """Raises `ConfigError` for a given key of configs that is not its default and has no effect in any."""
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
    section: str, settings: CheckedSettings, known: Mapping[str, Any],
    values: Mapping[str, Any] | None = None,
) -> dict[str, str]:  # fmt: skip
    """Reasons, by name, for the settings (or those in `values`) that are no defaults and have no effect.

    known: values of other settings by dotted keys, and facts about the checkpoint.
    """
    found, holder = {}, cast(Any, type(settings))  # a class, which has a hash where its instances have none
    for name, value in (flatten_settings(settings) if values is None else values).items():
        if value == holder.__dataclass_fields__[name].default:
            continue
        for key, accepted in list_needs(section, holder, name).items():
            if key in known and (missing := _describe_missing(key, known[key], accepted)):
                found[name] = f"{_show(value)} has no effect {missing}"
                break
    return found


def check_section(section: str, settings: CheckedSettings, names: Iterable[str]) -> None:
    """Raises `ConfigError` for one of these settings that has no effect beside the others of its section;
    without names, a warning says so of each that somebody has given."""
    refused, known = {*names}, flatten_settings(settings, f"{section}.")
    for name, reason in find_idle_settings(section, settings, known).items():
        if name in refused:
            raise ConfigError(f"{section}.{name}={reason}: leave it out")
        if name in settings.given and not refused:
            log.warning("%s.%s=%s", section, name, reason)


@cache
def list_needs(section: str, holder: Any, name: str) -> Need:
    """What a setting needs: as its field declares, and as the tables of its section say."""
    need: Need = dict(get_field_metadata(holder.__dataclass_fields__[name], "only_with"))
    for item in dataclasses.fields(holder):
        table = get_field_metadata(item, "table")
        entries = import_object(table, item.name) if table else {}
        readers = [key for key, each in entries.items() if name in (getattr(each, "settings", None) or ())]
        if readers:
            need.setdefault(f"{section}.{item.name}", tuple(readers))
    return need


def _describe_missing(key: str, value: Any, accepted: Any) -> str:
    """How a value of another setting is not among the accepted ones, as an error says it; else empty."""
    if accepted is SET:
        return "" if value else f"without {key}: set it too, or leave this out"
    scheme, colon, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    is_code_of_user = colon and not rest.startswith("//")
    if is_code_of_user or value in accepted or value is None or (value and SET in accepted):
        return ""
    if f"{scheme}://" in accepted:  # which stands for every such URL
        return ""
    if key == "attention_blocks":
        return "on a model whose attention has no blocks"
    wanted = " or ".join("a value above 0" if each is SET else _show(each) for each in accepted)
    return f"with {key}={_show(value)}: it needs {key}={wanted}"


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
