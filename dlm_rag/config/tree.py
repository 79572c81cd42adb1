"""The tree of all settings, and its strict loader."""

import re
from collections.abc import Hashable
from dataclasses import asdict, field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError
from yaml.constructor import ConstructorError

from dlm_rag.config.fields import (
    MAX_SHOWN_CHARS,
    SET,
    CheckedSettings,
    explain_validation_error,
    get_rule,
    merge_settings,
    setting,
    settings_dataclass,
    shorten_value,
)
from dlm_rag.config.ineffective_settings import check_effects
from dlm_rag.config.inference import DecodeConfig, EngineConfig, ModelConfig, RetrievalConfig, ServingConfig
from dlm_rag.config.renamed import explain_removed_key, find_new_key, upgrade_tree
from dlm_rag.config.training import DataConfig, PlanConfig, SynthesisConfig, TrainConfig
from dlm_rag.errors import ConfigError, suggest_nearest, summarize_error

_WORKERS = re.compile(r"[1-9]\d{0,2}|auto|ray://[^\s/:]+:\d{1,5}/?|ray://\[[0-9a-fA-F:]+\]:\d{1,5}/?")
_PACKAGE = Path(__file__).resolve().parents[1]
# A wheel has them inside the package, a checkout beside it (setup.py).
_INSTALLED = _PACKAGE / "configs"
CONFIG_FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"
MAX_CONFIG_BYTES = 2**20


@settings_dataclass
class Config(CheckedSettings):
    """All settings of all programs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    synthesis: SynthesisConfig = field(default_factory=SynthesisConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    questions: str | None = setting(None)
    """file of questions (JSON lines, JSON, CSV, TSV or Parquet, also gzipped), a folder of such files,
    or - for standard input"""
    limit: int | None = setting(None, low=1)
    """use only this many questions of the file, drawn evenly from all hops and labels; always the same
    ones, and a larger limit adds to them"""
    quick: bool = setting(False)
    """short for limit=200"""
    out: str | None = setting(None)
    """where results are written: a file (sample) or a folder (evaluate, train)"""
    compare: str | None = setting(None)
    """settings to compare in evaluate: all, or a list such as
    interleaved,static,oracle+retrieval.method=dense"""
    f1_rule: str = setting("auto", choices=("auto", "squad", "hotpotqa"))
    """how evaluate computes F1: hotpotqa gives 0 if exactly one side is yes, no or noanswer; auto takes
    it if the file or folder of the questions says hotpotqa or 2wikimultihopqa"""
    trace: str | None = setting(None)
    """file for decoding traces, one JSON line per question"""
    record_provisional: bool = setting(False, only_with=({"trace": SET}, {"html": SET}))
    """record in traces what is predicted at masked positions, which the page shows; always on with html"""
    workers: str | None = setting(None)
    """number of worker processes that each load the model, from 1 to 999, auto (one per GPU, or else per
    core, as memory allows), or a Ray cluster as ray://HOST:PORT; unset: this process"""
    energy: str = setting("auto", choices=("auto", "idle", "none"))
    """measure energy with the machine's own sensors: auto (all that is drawn), idle (also the idle
    power, for 10 s beforehand) or none"""
    html: str | None = setting(None)
    """file for an HTML page that replays the decoding (sample)"""

    def __post_init__(self) -> None:
        if self.quick and self.limit is not None:
            raise ConfigError("quick and limit both choose questions: leave one out")
        if self.workers is not None and not _WORKERS.fullmatch(self.workers):
            raise ConfigError(f"workers={self.workers} must be from 1 to 999, auto or ray://HOST:PORT")


@cache
def list_setting_fields(node: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of the tree, in order, with its dataclass field."""
    keys: dict[str, Any] = {}
    for item in fields(node):
        kind = item.type
        if is_dataclass(kind):
            keys |= list_setting_fields(kind, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            keys[prefix + item.name] = item
    return keys


@cache
def list_setting_help(node: Any = Config, prefix: str = "") -> dict[str, str]:
    """The help text of every dotted key."""
    found: dict[str, str] = {}
    for name, item in node.__pydantic_fields__.items():
        kind = item.annotation
        if is_dataclass(kind):
            found |= list_setting_help(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            found[prefix + name] = " ".join((item.description or "").split())
    return found


def find_config_file(name: str) -> Path:
    """The YAML file called `name`: as given, with `.yaml`, or one that ships; else `ConfigError`."""
    for folder in (Path(), CONFIG_FOLDER):
        for path in (folder / name, folder / f"{name}.yaml"):
            if is_existing_file(path):
                return path
    if is_existing_file(name, of_any_kind=True):
        raise ConfigError(f"config '{name}' is a folder or a pipe: name a file of YAML")
    there = sorted(path.name for path in CONFIG_FOLDER.glob("*.yaml"))
    raise ConfigError(
        f"config '{name}' was not found, here or among the shipped{suggest_nearest(name, there)}"
    )


def is_existing_file(path: str | Path, of_any_kind: bool = False) -> bool:
    """Whether there is a file (or anything) at a path; False also for what cannot be a path."""
    try:
        return Path(path).exists() if of_any_kind else Path(path).is_file()
    except (OSError, ValueError):
        return False


def load_config(
    name: str | None = None, overrides: list[str] | None = None, stored: bool = False, effects: bool = False
) -> Config:
    """The resolved tree: defaults, then the YAML file `name`, then `key=value` words.

    stored: the file is one that a run has left, perhaps under the names of an older version.
    effects: whether settings without effect are refused, as `check_effects` says: for command lines.
    Raises `ConfigError`, naming the key and the nearest valid one, for anything not in the tree.
    """
    of_file: dict[str, Any] = {}
    if name is not None:
        of_file = _read_config_file(find_config_file(name))
        of_file = upgrade_tree(of_file) if stored else of_file
    of_words: dict[str, Any] = {}
    for word in overrides or []:
        of_words = merge_settings(of_words, _parse_word(word))
    keys_of_file, keys_of_words = _list_given_keys(of_file), _list_given_keys(of_words)
    try:
        config = TypeAdapter(Config).validate_python(merge_settings(of_file, of_words))
    except ValidationError as error:
        key, sentence, fault = explain_validation_error(error)
        origin = "the command line" if key in keys_of_words or not name else str(find_config_file(name))
        if fault in ("unexpected_keyword_argument", "invalid_key"):
            sentence = _explain_unknown_key(key, origin)
        elif fault == "dataclass_type":
            sentence = (
                f"{key} is a section, in {origin}: set one of its keys, as in `{key}: {{KEY: VALUE}}`"
            )
        raise ConfigError(sentence) from None
    if stored:
        for key, item in list_setting_fields().items():
            value = str(attrgetter(key)(config))
            if get_rule(item, "table") and ":" in value and key not in keys_of_words:
                raise ConfigError(
                    f"{key}={value} is code that a stored result names: give it as a word too"
                )
    if effects:
        check_effects([(config, keys_of_words)])
        check_effects([(config, keys_of_file)], keys_of_words)
    return config


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if (name := str(key.value)) in seen:
                raise ConstructorError(None, None, f"the key {name} is there twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str | bytes, what: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except RecursionError:
        raise ConfigError(f"{what}: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:  # a date that is none, thousands of digits
        raise ConfigError(f"{what}: {summarize_error(error)}") from None


def _read_config_file(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is too large for a config: {path.stat().st_size >> 20} MiB")
    try:
        tree = _parse_yaml(path.read_text(encoding="utf-8"), f"{path} is not valid YAML")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {summarize_error(error)}") from None
    if not isinstance(tree or {}, dict):
        raise ConfigError(f"{path} holds no settings: write `section: {{key: value}}`")
    return tree or {}


def _parse_word(word: str) -> dict[str, Any]:
    """The tree of a word KEY=VALUE. What is not a mapping is taken as it is typed."""
    key, _, value = word.partition("=")
    mappings = [name for name, item in list_setting_fields().items() if get_origin(item.type) is dict]
    parsed: Any = None if value in ("null", "None") else value
    if any(f"{key}.".startswith(f"{name}.") for name in mappings):
        parsed = _parse_yaml(value, f"the value of {key}={shorten_value(value)} cannot be read")
    elif key not in list_setting_fields():
        raise ConfigError(_explain_unknown_key(key, "the command line"))
    for name in reversed(key.split(".")):
        parsed = {name: parsed}
    return parsed


def _list_given_keys(node: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys that nested settings give; those of a phase as `train.phases.NAME.KEY`."""
    found = []
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and prefix == "train.phases.":
            found += [f"{key}.{each}" for each in value]
        elif isinstance(value, dict) and (key not in list_setting_fields() or key == "train.phases"):
            found += _list_given_keys(value, f"{key}.")
        else:
            found.append(key)
    return found


def list_changed_settings(config: Config) -> dict[str, Any]:
    """The dotted keys whose values are not the defaults, with the values."""
    plain, values = Config(), {key: attrgetter(key)(config) for key in list_setting_fields()}
    return {key: value for key, value in values.items() if value != attrgetter(key)(plain)}


def dump_config(config: Config) -> str:
    """The resolved tree as YAML, which `load_config` reads back as it is."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def _explain_unknown_key(key: str, origin: str) -> str:
    if len(key) > MAX_SHOWN_CHARS:  # as of a file that holds something else, which is not to be shown
        return f"{origin} holds something else than settings: write `section: {{key: value}}`"
    if new := find_new_key(key):
        return f"{key} in {origin} is now called {new}: write that"
    if reason := explain_removed_key(key):
        return f"{key} in {origin} was removed: {reason}"
    keys = list(list_setting_fields())
    leaf = key.rpartition(".")[2]
    same_leaf = [known for known in keys if known.rpartition(".")[2] == leaf]
    hint = f" (nearest: '{same_leaf[0]}')" if same_leaf else suggest_nearest(key, keys)
    if key in keys:  # as a file cannot write it
        hint = f": write `{key.removesuffix(leaf)[:-1]}: {{{leaf}: VALUE}}`"
    return f"unknown key '{key}' in {origin}{hint}"
