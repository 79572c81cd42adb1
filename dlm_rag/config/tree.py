"""The tree of all settings, and its strict loader."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_origin

from dlm_rag.config.effects import check_effects
from dlm_rag.config.fields import MAX_SHOWN_CHARS, SET, CheckedSettings, read_help, setting
from dlm_rag.config.fields import shorten_repr as shorten
from dlm_rag.config.inference import DecodeConfig, EngineConfig, ModelConfig, RetrievalConfig, ServingConfig
from dlm_rag.config.renamed import explain_removed_key, find_new_key, upgrade_tree
from dlm_rag.config.training import DataConfig, PlanConfig, SynthesisConfig, TrainConfig
from dlm_rag.errors import ConfigError, suggest_nearest, summarize_error

# An interpolation that calls something, as ${oc.env:HOME} does; \${ stands for the characters.
_RESOLVER = re.compile(r"(?<!\\)(?:\\\\)*\$\{[^}]*(?::|\$\{)")
_WORKERS = re.compile(r"[1-9]\d{0,2}|auto|ray://[^\s/:]+:\d{1,5}/?|ray://\[[0-9a-fA-F:]+\]:\d{1,5}/?")
_PACKAGE = Path(__file__).resolve().parents[1]
# A wheel has them inside the package, a checkout beside it (setup.py).
_INSTALLED = _PACKAGE / "configs"
CONFIG_FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"

MAX_CONFIG_BYTES = 2**20  # bytes of a config file


@dataclass
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
    """number of worker processes that each load the model, auto (one per GPU, or else per core, as
    memory allows), or a Ray cluster as ray://HOST:PORT; unset: this process"""
    energy: str = setting("auto", choices=("auto", "idle", "none"))
    """measure energy with the machine's own sensors: auto (all that is drawn), idle (also the idle
    power, for 10 s beforehand) or none"""
    html: str | None = setting(None)
    """file for an HTML page that replays the decoding (sample)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quick and self.limit is not None:
            raise ConfigError("quick and limit both choose questions: leave one out")
        if self.workers is not None and not _WORKERS.fullmatch(self.workers):
            raise ConfigError(
                f"workers={shorten(self.workers)} must be a number from 1 to 999, auto or ray://HOST:PORT"
            )


def list_setting_fields(node: type = Config, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of the tree, in order, with its dataclass field."""
    keys: dict[str, Any] = {}
    for item in fields(node):
        if is_dataclass(item.type):
            keys |= list_setting_fields(item.type, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            keys[prefix + item.name] = item
    return keys


def list_setting_help(node: type = Config, prefix: str = "") -> dict[str, str]:
    """The help text of every dotted key."""
    found = {f"{prefix}{name}": text for name, text in read_help(node).items()}
    for item in fields(node):
        if is_dataclass(item.type):
            found |= list_setting_help(item.type, f"{prefix}{item.name}.")  # type: ignore[arg-type]
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
    from omegaconf import OmegaConf

    tree, tree_of_file = OmegaConf.structured(Config), None
    sources, given = [], {True: list[str](), False: list[str]()}
    if name is not None:
        path = find_config_file(name)
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is too large for a config: {path.stat().st_size >> 20} MiB")
        with _as_config_error(f"{path} is not valid YAML"):
            tree_of_file = OmegaConf.load(path)
            if stored and OmegaConf.is_dict(tree_of_file):
                plain = OmegaConf.to_container(tree_of_file, resolve=False)
                tree_of_file = OmegaConf.create(upgrade_tree(plain))  # type: ignore[arg-type]
            sources.append((str(path), tree_of_file))
    for word in overrides or []:
        key, _, value = word.partition("=")
        item = _find_setting_field(key)
        if item is None:
            raise _unknown_key(key, "the command line")
        with _as_config_error(f"the value of {key}={shorten(value)[1:-1]} cannot be read"):
            if item.type in (str, str | None) and value not in ("null", "None"):
                # Texts are taken as they are typed: no YAML, no interpolation.
                parsed = OmegaConf.create()
                OmegaConf.update(parsed, key, _escape_interpolation(value))
            else:
                parsed = OmegaConf.from_dotlist([word])
        sources.append((word, parsed))
    for origin, source in sources:
        if not OmegaConf.is_dict(source):
            raise ConfigError(f"{origin} holds no settings: write `section: {{key: value}}`")
        plain = OmegaConf.to_container(source, resolve=False)
        _reject_unknown(plain, "", origin)
        given[source is not tree_of_file] += _list_given_keys(plain)
        with _as_config_error(f"{origin} has the wrong type"):
            tree = OmegaConf.merge(tree, source)
    with _as_config_error("the settings cannot be resolved"):
        config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    if stored:
        _reject_stored_code(config, given[True])
    if effects:
        check_effects([(config, given[True])])
        check_effects([(config, given[False])], given[True])
    return config


def _reject_stored_code(config: Config, named: list[str]) -> None:
    """Raises `ConfigError` for a module:function that only a stored file names."""
    for key, value in list_changed_settings(config).items():
        own = _find_setting_field(key).metadata.get("table") and ":" in str(value)
        if own and key not in named:
            raise ConfigError(f"{key}={value} is code that a stored result names: give it as a word too")


def _list_given_keys(node: Any, prefix: str = "") -> list[str]:
    """The dotted keys that nested settings give; those of a phase as `train.phases.NAME.KEY`."""
    keys = list_setting_fields()
    found = []
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and prefix == "train.phases.":
            found += [f"{key}.{each}" for each in value]
        elif isinstance(value, dict) and (key not in keys or key == "train.phases"):
            found += _list_given_keys(value, f"{key}.")
        else:
            found.append(key)
    return found


@contextmanager
def _as_config_error(what: str) -> Iterator[None]:
    """Turns errors of YAML and OmegaConf into `ConfigError`s that name the key, or else `what`."""
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except ConfigError:
        raise
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        if key and what.endswith("has the wrong type"):
            what = f"{key} has the wrong type"
        raise ConfigError(f"{what if not key or key in what else key}: {summarize_error(error)}") from None
    except RecursionError:
        raise ConfigError(f"{what}: it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what}: it is not UTF-8") from None
    except (YAMLError, OSError, TypeError, ValueError) as error:
        digits = type(error) is ValueError  # thousands of them
        reason = "a number has too many digits" if digits else summarize_error(error)
        raise ConfigError(f"{what}: {reason}") from None


def list_changed_settings(config: Config) -> dict[str, Any]:
    """The dotted keys whose values are not the defaults, with the values."""

    def value_of(tree: Any, key: str) -> Any:
        for name in key.split("."):
            tree = getattr(tree, name)
        return tree

    plain = Config()
    return {
        key: value_of(config, key)
        for key in list_setting_fields()
        if value_of(config, key) != value_of(plain, key)
    }


def dump_config(config: Config) -> str:
    """The resolved tree as YAML, which `load_config` reads back as it is."""
    from omegaconf import OmegaConf

    def escaped(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: escaped(value) for key, value in node.items()}
        return _escape_interpolation(node) if isinstance(node, str) else node

    return OmegaConf.to_yaml(OmegaConf.create(escaped(asdict(config))))


def _escape_interpolation(text: str) -> str:
    """The text as OmegaConf reads back to it: `${` escaped, and backslashes before it doubled."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def _reject_unknown(node: Any, prefix: str, origin: str) -> None:
    keys = list_setting_fields()
    for name, value in node.items():
        key = f"{prefix}{name}"
        if any(known.startswith(f"{key}.") for known in keys):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{key} is a section, in {origin}: set one of its keys, as in `{key}: {{KEY: VALUE}}`"
                )
            _reject_unknown(value, f"{key}.", origin)
        elif key not in keys or "." in str(name):
            raise _unknown_key(key, origin)
        elif get_origin(keys[key].type) is dict and not isinstance(value, dict):
            raise ConfigError(f"{key} is a mapping: write `{key.rpartition('.')[2]}: {{name: value}}`")
        elif value == "???":  # would silently leave the default
            raise ConfigError(f"{key}=??? is not a value: give one, or leave it out")
        elif any(_RESOLVER.search(text) for text in _texts(value)):
            raise ConfigError(f"{key} in {origin} calls a resolver (such as oc.env): write out its value")


def _texts(value: Any) -> Iterator[str]:
    """Every text in nested settings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _find_setting_field(key: str) -> Any:
    """The field of a dotted key, or the mapping that it is an entry of; None if there is neither."""
    keys = list_setting_fields()
    if key in keys:
        return keys[key]
    mappings = (name for name, item in keys.items() if get_origin(item.type) is dict)
    return next((keys[name] for name in mappings if key.startswith(f"{name}.")), None)


def _unknown_key(key: str, origin: str) -> ConfigError:
    if len(key) > MAX_SHOWN_CHARS:  # as of a file that holds something else, which is not to be shown
        return ConfigError(f"{origin} holds something else than settings: write `section: {{key: value}}`")
    if new := find_new_key(key):
        return ConfigError(f"{key} in {origin} is now called {new}: write that")
    if reason := explain_removed_key(key):
        return ConfigError(f"{key} in {origin} was removed: {reason}")
    keys = list(list_setting_fields())
    leaf = key.rpartition(".")[2]
    same_leaf = [known for known in keys if known.rpartition(".")[2] == leaf]
    hint = f" (nearest: '{same_leaf[0]}')" if same_leaf else suggest_nearest(key, keys)
    if key in keys:  # as a file cannot write it
        hint = f": write `{key.removesuffix(leaf)[:-1]}: {{{leaf}: VALUE}}`"
    return ConfigError(f"unknown key '{key}' in {origin}{hint}")
