"""The tree of all settings, and its strict loader."""

from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_origin

from dlm_rag.config.checked import Checked, setting
from dlm_rag.config.decoding import DecodeConfig, EngineConfig, ModelConfig, RetrievalConfig
from dlm_rag.config.training import DataConfig, PlanConfig, TrainConfig
from dlm_rag.errors import ConfigError, fold_message, nearest

_PACKAGE = Path(__file__).resolve().parents[1]
# A wheel has them inside the package, a checkout beside it (setup.py).
_INSTALLED = _PACKAGE / "configs"
CONFIG_FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"


@dataclass
class Config(Checked):
    """Everything a program of this project can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    questions: str | None = setting(None, "file of questions: JSON lines or parquet")
    out: str | None = setting(None, "where the results go: a file (sample) or a folder (evaluate, train)")
    compare: str | None = setting(
        None, "settings for evaluate: all, or a list such as interleaved,static,oracle+retrieval.kind=dense"
    )
    f1: str = setting(
        "auto",
        "rule by which evaluate scores F1: hotpotqa gives 0 where one side is yes, no or noanswer and the "
        "other is not; auto takes it where the file or folder of the questions says hotpotqa or "
        "2wikimultihopqa",
        choices=("auto", "squad", "hotpotqa"),
    )
    trace: str | None = setting(None, "file for the decoding traces, one JSON line per question")


def known_keys(node: type = Config, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of the tree, in order, with its dataclass field."""
    keys: dict[str, Any] = {}
    for item in fields(node):
        if is_dataclass(item.type):
            keys |= known_keys(item.type, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            keys[prefix + item.name] = item
    return keys


def find_config(name: str) -> Path:
    """The YAML file called `name`: as given, with `.yaml`, or one that ships; else `ConfigError`."""
    for folder in (Path(), CONFIG_FOLDER):
        for path in (folder / name, folder / f"{name}.yaml"):
            if path.is_file():
                return path
    there = sorted(path.name for path in CONFIG_FOLDER.glob("*.yaml"))
    raise ConfigError(
        f"config '{name}' was not found, neither here nor among those that ship{nearest(name, there)}"
    )


def load_config(name: str | None = None, overrides: list[str] | None = None) -> Config:
    """The resolved tree: defaults, then the YAML file `name`, then `key=value` words.

    Raises `ConfigError`, naming the key and the nearest valid one, for anything not in the tree.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    tree = OmegaConf.structured(Config)
    sources = []
    if name is not None:
        path = find_config(name)
        try:
            sources.append((str(path), OmegaConf.load(path)))
        except (YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid YAML: {fold_message(error)}") from None
    for word in overrides or []:
        key, _, value = word.partition("=")
        item = _known(key)
        if item is None:
            raise _unknown_key(key, "the command line")
        try:
            if item.type in (str, str | None) and value not in ("null", "None"):
                # Texts are taken as they are typed: no YAML, no interpolation.
                parsed = OmegaConf.create()
                OmegaConf.update(parsed, key, value.replace("${", "\\${"))
            else:
                parsed = OmegaConf.from_dotlist([word])
        except (YAMLError, OmegaConfBaseException):
            raise ConfigError(f"the value of {key}={value} cannot be read") from None
        sources.append((word, parsed))
    for origin, source in sources:
        if not OmegaConf.is_dict(source):
            raise ConfigError(f"{origin} holds no settings: write `section: {{key: value}}`")
        _refuse_unknown(OmegaConf.to_container(source, resolve=False), "", origin)
        try:
            tree = OmegaConf.merge(tree, source)
        except OmegaConfBaseException as error:
            key = getattr(error, "full_key", None) or origin
            raise ConfigError(f"{key} has the wrong type: {fold_message(error)}") from None
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{getattr(error, 'full_key', '')}: {fold_message(error)}") from None
    assert isinstance(config, Config)
    return config


def differing_keys(config: Config) -> dict[str, Any]:
    """The dotted keys whose values are not the defaults, with the values."""

    def value_of(tree: Any, key: str) -> Any:
        for name in key.split("."):
            tree = getattr(tree, name)
        return tree

    plain = Config()
    return {
        key: value_of(config, key) for key in known_keys() if value_of(config, key) != value_of(plain, key)
    }


def dump_config(config: Config) -> str:
    """The resolved tree as YAML."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _refuse_unknown(node: Any, prefix: str, origin: str) -> None:
    keys = known_keys()
    for name, value in node.items():
        key = f"{prefix}{name}"
        if any(known.startswith(f"{key}.") for known in keys):
            if not isinstance(value, dict):
                raise ConfigError(f"{key} is a section: set one of its keys, as in {key}.KEY=VALUE")
            _refuse_unknown(value, f"{key}.", origin)
        elif key not in keys:
            raise _unknown_key(key, origin)


def _known(key: str) -> Any:
    """The field of a dotted key, or the mapping that the key is an entry of; None where there is none."""
    keys = known_keys()
    if key in keys:
        return keys[key]
    mappings = (name for name, item in keys.items() if get_origin(item.type) is dict)
    return next((keys[name] for name in mappings if key.startswith(f"{name}.")), None)


def _unknown_key(key: str, origin: str) -> ConfigError:
    keys = list(known_keys())
    leaf = key.rpartition(".")[2]
    same_leaf = [known for known in keys if known.rpartition(".")[2] == leaf]
    hint = f" (nearest: '{same_leaf[0]}')" if same_leaf else nearest(key, keys)
    return ConfigError(f"unknown key '{key}' in {origin}{hint}")
