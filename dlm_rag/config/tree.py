"""The tree of all settings, and its strict loader."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_origin

from dlm_rag.config.checked import LONGEST_SHOWN, Checked, brief, setting
from dlm_rag.config.decoding import DecodeConfig, EngineConfig, ModelConfig, RetrievalConfig
from dlm_rag.config.serving import ServingConfig
from dlm_rag.config.synthesis import SynthesisConfig
from dlm_rag.config.training import DataConfig, PlanConfig, TrainConfig
from dlm_rag.errors import ConfigError, fold_message, nearest

# An interpolation that calls something, as ${oc.env:HOME} does; \${ stands for the characters.
_RESOLVER = re.compile(r"(?<!\\)(?:\\\\)*\$\{[^}]*(?::|\$\{)")
_WORKERS = re.compile(r"[1-9]\d{0,2}|auto|ray://[^\s/:]+:\d{1,5}/?|ray://\[[0-9a-fA-F:]+\]:\d{1,5}/?")
_PACKAGE = Path(__file__).resolve().parents[1]
# A wheel has them inside the package, a checkout beside it (setup.py).
_INSTALLED = _PACKAGE / "configs"
CONFIG_FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"

LARGEST_FILE = 2**20  # bytes of a config file


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
    synthesis: SynthesisConfig = field(default_factory=SynthesisConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    questions: str | None = setting(
        None,
        "file of questions: JSON lines, JSON, CSV, TSV or Parquet, also gzipped; a folder of such files; "
        "-: standard input",
    )
    limit: int | None = setting(
        None,
        "only so many questions of the file, drawn from all hops and labels alike; always the same ones, "
        "to which a larger limit adds others",
        low=1,
    )
    quick: bool = setting(False, "as limit=200")
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
    guesses: bool = setting(
        False,
        "traces hold what is guessed at positions that stay masked, which the page shows; on with html",
    )
    workers: str | None = setting(
        None,
        "processes that answer, each with a model of its own: a number, auto (one for each GPU, or else "
        "core, as far as the memory goes), or a Ray cluster, ray://HOST:PORT; unset: this process",
    )
    energy: str = setting(
        "auto",
        "joules by the machine's own sensors, where it has any: auto measures all that is drawn; idle "
        "measures for 10 s before what is drawn with nothing to do, and tells both; none measures nothing",
        choices=("auto", "idle", "none"),
    )
    html: str | None = setting(None, "file for a page that plays the decoding, of sample")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quick and self.limit is not None:
            raise ConfigError("quick and limit are two ways to choose questions: leave one out")
        if self.workers is not None and not _WORKERS.fullmatch(self.workers):
            raise ConfigError(
                f"workers={brief(self.workers)} is neither a number from 1 to 999 nor auto nor a Ray "
                "cluster, as ray://HOST:10001"
            )


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
            if is_there(path):
                return path
    if is_there(name, of_any_kind=True):
        raise ConfigError(f"config '{name}' is a folder or a pipe: name a file of YAML")
    there = sorted(path.name for path in CONFIG_FOLDER.glob("*.yaml"))
    raise ConfigError(
        f"config '{name}' was not found, neither here nor among those that ship{nearest(name, there)}"
    )


def is_there(path: str | Path, of_any_kind: bool = False) -> bool:
    """Whether a path is that of a file, or of anything; False too for what can be no path."""
    try:
        return Path(path).exists() if of_any_kind else Path(path).is_file()
    except (OSError, ValueError):
        return False


def load_config(name: str | None = None, overrides: list[str] | None = None) -> Config:
    """The resolved tree: defaults, then the YAML file `name`, then `key=value` words.

    Raises `ConfigError`, naming the key and the nearest valid one, for anything not in the tree.
    """
    from omegaconf import OmegaConf

    tree = OmegaConf.structured(Config)
    sources = []
    if name is not None:
        path = find_config(name)
        if path.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"{path} is too large for a config: {path.stat().st_size >> 20} MiB")
        with _told(f"{path} is not valid YAML"):
            sources.append((str(path), OmegaConf.load(path)))
    for word in overrides or []:
        key, _, value = word.partition("=")
        item = _known(key)
        if item is None:
            raise _unknown_key(key, "the command line")
        with _told(f"the value of {key}={brief(value)[1:-1]} cannot be read"):
            if item.type in (str, str | None) and value not in ("null", "None"):
                # Texts are taken as they are typed: no YAML, no interpolation.
                parsed = OmegaConf.create()
                OmegaConf.update(parsed, key, _literal(value))
            else:
                parsed = OmegaConf.from_dotlist([word])
        sources.append((word, parsed))
    for origin, source in sources:
        if not OmegaConf.is_dict(source):
            raise ConfigError(f"{origin} holds no settings: write `section: {{key: value}}`")
        _refuse_unknown(OmegaConf.to_container(source, resolve=False), "", origin)
        with _told(f"{origin} has the wrong type"):
            tree = OmegaConf.merge(tree, source)
    with _told("the settings cannot be resolved"):
        config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    return config


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Raises what YAML and OmegaConf raise as `ConfigError`: the key where they know it, else `what`."""
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
        raise ConfigError(f"{what if not key or key in what else key}: {fold_message(error)}") from None
    except RecursionError:
        raise ConfigError(f"{what}: a nesting beyond all measure") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what}: it is not UTF-8: save it as that") from None
    except (YAMLError, OSError, TypeError, ValueError) as error:
        digits = type(error) is ValueError  # thousands of them
        reason = "a number beyond all measure" if digits else fold_message(error)
        raise ConfigError(f"{what}: {reason}") from None


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
    """The resolved tree as YAML, which `load_config` reads back as it is."""
    from omegaconf import OmegaConf

    def escaped(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: escaped(value) for key, value in node.items()}
        return _literal(node) if isinstance(node, str) else node

    return OmegaConf.to_yaml(OmegaConf.create(escaped(asdict(config))))


def _literal(text: str) -> str:
    """The text as OmegaConf reads back to it: `${` escaped, and backslashes before it doubled."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def _refuse_unknown(node: Any, prefix: str, origin: str) -> None:
    keys = known_keys()
    for name, value in node.items():
        key = f"{prefix}{name}"
        if any(known.startswith(f"{key}.") for known in keys):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{key} is a section, in {origin}: set one of its keys, as in `{key}: {{KEY: VALUE}}`"
                )
            _refuse_unknown(value, f"{key}.", origin)
        elif key not in keys or "." in str(name):
            raise _unknown_key(key, origin)
        elif get_origin(keys[key].type) is dict and not isinstance(value, dict):
            raise ConfigError(f"{key} is a mapping: write `{key.rpartition('.')[2]}: {{name: value}}`")
        elif value == "???":  # would silently leave the default
            raise ConfigError(f"{key}=??? is no value: leave it out, or give one")
        elif any(_RESOLVER.search(text) for text in _texts(value)):
            raise ConfigError(f"{key} in {origin} reads the environment, or more: write out its value")


def _texts(value: Any) -> Iterator[str]:
    """Every text in nested settings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _known(key: str) -> Any:
    """The field of a dotted key, or the mapping that the key is an entry of; None where there is none."""
    keys = known_keys()
    if key in keys:
        return keys[key]
    mappings = (name for name, item in keys.items() if get_origin(item.type) is dict)
    return next((keys[name] for name in mappings if key.startswith(f"{name}.")), None)


def _unknown_key(key: str, origin: str) -> ConfigError:
    if len(key) > LONGEST_SHOWN:  # as of a file that holds something else, which is not to be shown
        return ConfigError(f"{origin} holds what is no setting: write `section: {{key: value}}`")
    keys = list(known_keys())
    leaf = key.rpartition(".")[2]
    same_leaf = [known for known in keys if known.rpartition(".")[2] == leaf]
    hint = f" (nearest: '{same_leaf[0]}')" if same_leaf else nearest(key, keys)
    if key in keys:  # as a file cannot write it
        hint = f": write `{key.removesuffix(leaf)[:-1]}: {{{leaf}: VALUE}}`"
    return ConfigError(f"unknown key '{key}' in {origin}{hint}")
