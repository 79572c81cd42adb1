"""The words of a command line: flags, questions, KEY=VALUE."""

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, NoReturn

from dlm_rag.config import Config, dump_config, is_there, known_keys, load_config
from dlm_rag.errors import ConfigError

_SETTING = re.compile(r"([A-Za-z_][\w.-]*)=")

FLAGS = {"--model": "model.path", "--corpus": "retrieval.corpus"} | {
    f"--{name}": name for name in ("questions", "out", "trace", "compare")
}


class Parser(argparse.ArgumentParser):
    """The parser of all programs: what is wrong with a word is a `ConfigError`, a flag counts once."""

    def __init__(self, description: str, **more: Any) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **more,
        )
        self.register("action", None, _Once)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists the flags")


class _Once(argparse.Action):
    """A flag with a value; of two values it would not be known which one is meant."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        given: argparse.Namespace,
        value: Any,
        flag: str | None = None,
    ) -> None:
        if flag is not None and flag in (seen := vars(given).setdefault("seen", [])):
            raise ConfigError(f"{flag} is given twice: leave one out")
        if flag is not None:
            seen.append(flag)
        setattr(given, self.dest, value)


def whole(text: str, low: int = 1) -> int:
    """A whole number of at least `low` as a word has it. Raises `ConfigError`."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < low:
        raise ConfigError(f"{text!r} is not a whole number{f' above {low - 1}' if low else ''}")
    return int(text)


def numbers(description: str, argv: list[str], what: str, default: list[int]) -> list[int]:
    """The words of a program that is told whole numbers above 0 only; `--help` prints and exits."""
    parser = Parser(description)
    parser.add_argument("numbers", nargs="*", metavar="NUMBER", help=f"{what} ({default})")
    return [whole(word) for word in parser.parse_args(argv).numbers] or default


@dataclass(frozen=True)
class CommandLine:
    """A command line, read: the resolved config, the questions typed, the switches that are on."""

    config: Config
    questions: list[str]
    switches: set[str]
    options: dict[str, Any]
    file: str | None  # of --config
    settings: list[str]  # KEY=VALUE, of words and flags

    def config_with(self, more: list[str]) -> Config:
        """The config with more settings on top; raises `ConfigError`."""
        return load_config(self.file, self.settings + more)


def parse(
    description: str,
    argv: list[str],
    *,
    typed: bool = True,
    chosen: bool = False,
    switches: dict[str, str] | None = None,
    options: Mapping[str, tuple[str | int, str]] | None = None,
) -> CommandLine:
    """Reads a command line.

    typed: whether questions may be typed. chosen: whether --limit and --quick choose among those of a file.
    switches: flags without a value, with their help texts. options: flags with a value, with default and
    help text; where the default is a whole number, so is the value, and above 0 unless the default is 0.

    `--help` and `--print-config` print and exit. Raises `ConfigError`.
    """
    before = sys.argv[1 : max(1, len(sys.argv) - len(argv))]  # `dlm-rag sample` is two words
    parser = Parser(
        description,
        prog=" ".join([Path(sys.argv[0]).name, *before]),
        epilog="KEY=VALUE sets any field of the config:\n" + _list_keys(),
    )
    what = "a question, or KEY=VALUE" if typed else "KEY=VALUE"
    parser.add_argument("words", nargs="*", metavar="WORD", help=what)
    parser.add_argument("--config", metavar="NAME", help="YAML file, as given or one that ships")
    keys = known_keys()
    flags = FLAGS | ({"--limit": "limit"} if chosen else {})
    for flag, key in flags.items():
        metavar = {"compare": "SETTINGS", "limit": "N"}.get(key, "PATH")
        parser.add_argument(flag, metavar=metavar, help=f"{keys[key].metadata['help']} ({key})")
    offered = {"print-config": "print the resolved config"} | (switches or {})
    if chosen:
        offered["quick"] = f"{keys['quick'].metadata['help']} (quick)"
    for name, help_text in offered.items():
        parser.add_argument(f"--{name}", action="store_true", dest=name, help=help_text)
    for name, (default, help_text) in (options or {}).items():
        shown = help_text if default == "" else f"{help_text} ({default})"
        parser.add_argument(f"--{name}", metavar=name.upper(), default=default, help=shown)
    given = parser.parse_intermixed_args(argv)
    settings = [word for word in given.words if is_setting(word)]
    questions = [word for word in given.words if not is_setting(word)]
    for word in questions:
        _refuse_mistaken(word)
        if not typed:
            raise ConfigError(f"'{word}' is neither a flag nor KEY=VALUE")
    for flag, key in flags.items():
        value = getattr(given, flag.strip("-"))
        if value is not None:
            settings.append(f"{key}={value}")
    if getattr(given, "quick", False):
        settings.append("quick=true")
    config = load_config(given.config, settings)
    on = {name for name in offered if getattr(given, name)}
    if "print-config" in on:
        print(dump_config(config), end="")
        raise SystemExit(0)
    with_values = {name: getattr(given, name) for name in options or {}}
    for name, (default, _) in (options or {}).items():
        if isinstance(default, int):
            try:
                with_values[name] = whole(str(with_values[name]), low=min(default, 1))
            except ConfigError as error:
                raise ConfigError(f"--{name} {error}") from None
    return CommandLine(config, questions, on, with_values, given.config, settings)


def is_setting(word: str) -> bool:
    """Whether a word of the command line is KEY=VALUE and not a question that holds an equals sign."""
    found = _SETTING.match(word)
    key = found[1] if found else ""
    return bool(key) and ("." in key or key in known_keys() or not re.search(r"\s", word))


def _refuse_mistaken(word: str) -> None:
    """Raises `ConfigError` for a setting without its equals sign, and for a file without its flag."""
    key = re.match(r"([a-z_]+\.)[^\s=]+(=|$)", word)
    if word in known_keys() or (key and any(known.startswith(key[1]) for known in known_keys())):
        key_alone = re.split(r"[^\w.]", word)[0]
        raise ConfigError(f"'{word}' is no question: write settings as {key_alone}=VALUE, in one word")
    if is_there(word):
        raise ConfigError(f"'{word}' is a file and no question: name it behind its flag, as --questions")


def _list_keys() -> str:
    lines = []
    for key, item in known_keys().items():
        rule = item.metadata
        choices = f" [{', '.join(rule['choices'])}]" if rule["choices"] else ""
        default = "unset" if item.default is None else repr(item.default)
        if item.default is MISSING:
            default = repr(item.default_factory())
        lines.append(f"  {key}={default}\n      {rule['help']}{choices}")
    return "\n".join(lines)
