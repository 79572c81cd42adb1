"""The configuration: one tree of dataclasses, the only home of every default, and its strict loader.

Settings arrive in this order, later ones winning: the dataclasses, a YAML file, `key=value` words. It
imports no other room of the package, but the tables that a setting names.
"""

import dataclasses  # whose `fields` has the name of a module here
import re
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import asdict, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import TypeAdapter, ValidationError
from yaml.constructor import ConstructorError

from dlm_rag.config import fields
from dlm_rag.config.sections import (
    DataConfig,
    DecodeConfig,
    EngineConfig,
    ModelConfig,
    PlanConfig,
    RemoteConfig,
    RetrievalConfig,
    ServingConfig,
    TrainConfig,
)
from dlm_rag.errors import ConfigError, suggest_nearest, summarize_error
from dlm_rag.files.paths import find_companion_folder

_WORKERS = re.compile(r"[1-9]\d{0,2}|auto|ray://[^\s/:]+:\d{1,5}/?|ray://\[[0-9a-fA-F:]+\]:\d{1,5}/?")
CONFIG_FOLDER = find_companion_folder("configs")


@fields.settings_dataclass
class Config(fields.CheckedSettings):
    """All settings of all programs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    questions: str | None = fields.setting(None)
    """file of questions (JSON lines, JSON, CSV, TSV, Parquet; or gzipped), a folder, or - for stdin"""
    prompt: str | None = fields.setting(None)
    """texts around question and passages: sardi, flashrag, search_r1, or a file (JSON or YAML) with head,
    fact, foot, tail, chat and answer; unset: the checkpoint's own, else sardi"""
    limit: int | None = fields.setting(None, low=1)
    """use only this many questions of the file, drawn evenly from all hops and labels; always the same
    ones, and a larger limit adds to them"""
    out: str | None = fields.setting(None)
    """where results are written: a file (sample) or a folder (evaluate, train)"""
    compare: str | None = fields.setting(None)
    """settings to compare in evaluate: all, or a list as
    interleaved,static,oracle+retrieval.method=dense"""
    trace: str | None = fields.setting(None)
    """file for decoding traces, one JSON line per question"""
    record_provisional: bool = fields.setting(False)
    """record in traces what is predicted at masked positions, which the page shows; always on with html"""
    workers: str | None = fields.setting(None)
    """number of worker processes that each load the model, from 1 to 999, auto (one per GPU, or per core,
    as memory allows), or a Ray cluster as ray://HOST:PORT; unset: this process"""
    energy: str = fields.setting("auto", choices=("auto", "none"))
    """measure energy with the machine's own sensors (auto) or not (none)"""
    html: str | None = fields.setting(None)
    """file for an HTML page that replays the decoding (sample)"""

    def __post_init__(self) -> None:
        if self.workers is not None and not _WORKERS.fullmatch(self.workers):
            raise ConfigError(f"workers={self.workers} must be from 1 to 999, auto or ray://HOST:PORT")


@cache
def list_setting_fields(node: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of the tree, in order, with its dataclass field."""
    keys: dict[str, Any] = {}
    for item in dataclasses.fields(node):
        name = f"{prefix}{item.name}"
        is_section = dataclasses.is_dataclass(item.type)
        keys |= list_setting_fields(cast(Any, item.type), f"{name}.") if is_section else {name: item}
    return keys


def find_config_file(name: str, shipped: Path = CONFIG_FOLDER) -> Path:
    """The YAML file called `name`: as given, with `.yaml`, or one that ships; else `ConfigError`."""
    with suppress(OSError, ValueError):  # what cannot be a path
        for folder in (Path(), shipped):
            for path in (folder / name, folder / f"{name}.yaml"):
                if path.is_file():
                    return path
    nearest = suggest_nearest(name, sorted(path.name for path in shipped.glob("*.yaml")))
    raise ConfigError(f"config '{name}' was not found as a file, here or among the shipped{nearest}")


def load_config(
    name: str | None = None, overrides: list[str] | None = None, effects: bool = False
) -> Config:
    """The resolved tree: defaults, then the YAML file `name`, then `key=value` words.

    effects: whether words without effect are refused (`check_effects`).
    Raises `ConfigError`, naming the key and the nearest valid one, for anything not in the tree.
    """
    path = None if name is None else find_config_file(name)
    tree, keys = read_config_file(path) if path else {}, list[str]()
    for key, _, value in (word.partition("=") for word in overrides or []):
        if key not in list_setting_fields():
            raise ConfigError(_explain_unknown_key(key, "the command line"))
        keys.append(key)
        section, _, leaf = key.rpartition(".")
        inner = tree.get(section, {}) if section else tree
        if isinstance(inner, dict):  # else it is refused below
            inner = inner | {leaf: None if value in ("null", "None") else value}
            tree = tree | {section: inner} if section else inner
    try:
        config = TypeAdapter(Config).validate_python(tree)
    except ValidationError as error:
        key, sentence, fault = fields.explain_validation_error(error)
        if fault in ("unexpected_keyword_argument", "invalid_key"):
            sentence = _explain_unknown_key(key, str(path))
        elif fault == "dataclass_type":
            sentence = f"{key} is a section, in {path}: write `{key}: {{KEY: VALUE}}`"
        raise ConfigError(sentence) from None
    if effects:
        fields.check_effects([(config, keys)])
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


def read_config_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises `ConfigError` for anything else."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {summarize_error(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not valid YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:  # a date that is none, thousands of digits
        raise ConfigError(f"{path} is not valid YAML: {summarize_error(error)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings: write `section: {{key: value}}`")
    return tree


def dump_config(config: Config) -> str:
    """The tree as YAML, for `load_config`; what a checkpoint may say, and nobody has, commented."""
    tree, unset = asdict(config), {}
    for name in ("decode", "retrieval"):
        given, section = getattr(config, name).given, tree[name]
        unset[name] = {key: section.pop(key) for key in [*section] if key not in given}
    said, defaults = (yaml.safe_dump(each, sort_keys=False, allow_unicode=True) for each in (tree, unset))
    comment = "".join(f"# {line}\n" for line in defaults.splitlines())
    return f"{said}# Unset: a checkpoint's own values, or else these defaults.\n{comment}"


def _explain_unknown_key(key: str, origin: str) -> str:
    keys, (section, _, leaf) = list(list_setting_fields()), key.rpartition(".")
    if key in keys:  # as a file cannot write it
        return f"unknown key '{key}' in {origin}: write `{section}: {{{leaf}: VALUE}}`"
    return f"unknown key '{fields.shorten_value(key)}' in {origin}{fields.suggest_setting(key, keys)}"
