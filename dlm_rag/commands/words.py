"""The words of a command line: flags, questions, KEY=VALUE."""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dlm_rag.config import Config, dump_config, known_keys, load_config
from dlm_rag.errors import ConfigError

_SETTING = re.compile(r"([A-Za-z_][\w.-]*)=")

FLAGS = {"--model": "model.path", "--corpus": "retrieval.corpus"} | {
    f"--{name}": name for name in ("questions", "out", "trace", "compare")
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists the flags")


@dataclass(frozen=True)
class CommandLine:
    """A command line, read: the resolved config, the questions typed, the switches that are on."""

    config: Config
    questions: list[str]
    switches: set[str]
    options: dict[str, str]
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
    switches: dict[str, str] | None = None,
    options: dict[str, tuple[str, str]] | None = None,
) -> CommandLine:
    """Reads a command line.

    switches: flags without a value, with their help texts. options: flags with a value, with default
    and help text.

    `--help` and `--print-config` print and exit. Raises `ConfigError`.
    """
    before = sys.argv[1 : max(1, len(sys.argv) - len(argv))]  # `dlm-rag sample` is two words
    parser = _Parser(
        prog=" ".join([Path(sys.argv[0]).name, *before]),
        description=description,
        epilog="KEY=VALUE sets any field of the config:\n" + _list_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = "a question, or KEY=VALUE" if typed else "KEY=VALUE"
    parser.add_argument("words", nargs="*", metavar="WORD", help=what)
    parser.add_argument("--config", metavar="NAME", help="YAML file, as given or one that ships")
    keys = known_keys()
    for flag, key in FLAGS.items():
        metavar = "SETTINGS" if key == "compare" else "PATH"
        parser.add_argument(flag, metavar=metavar, help=f"{keys[key].metadata['help']} ({key})")
    offered = {"print-config": "print the resolved config"} | (switches or {})
    for name, help_text in offered.items():
        parser.add_argument(f"--{name}", action="store_true", dest=name, help=help_text)
    for name, (default, help_text) in (options or {}).items():
        shown = f"{help_text} ({default})" if default else help_text
        parser.add_argument(f"--{name}", metavar=name.upper(), default=default, help=shown)
    given = parser.parse_intermixed_args(argv)
    settings = [word for word in given.words if is_setting(word)]
    questions = [word for word in given.words if not is_setting(word)]
    if questions and not typed:
        raise ConfigError(f"'{questions[0]}' is neither a flag nor KEY=VALUE")
    for flag, key in FLAGS.items():
        value = getattr(given, flag.strip("-"))
        if value is not None:
            settings.append(f"{key}={value}")
    config = load_config(given.config, settings)
    on = {name for name in offered if getattr(given, name)}
    if "print-config" in on:
        print(dump_config(config), end="")
        raise SystemExit(0)
    with_values = {name: getattr(given, name) for name in options or {}}
    return CommandLine(config, questions, on, with_values, given.config, settings)


def is_setting(word: str) -> bool:
    """Whether a word of the command line is KEY=VALUE and not a question that holds an equals sign."""
    found = _SETTING.match(word)
    key = found[1] if found else ""
    return bool(key) and ("." in key or key in known_keys() or not re.search(r"\s", word))


def _list_keys() -> str:
    lines = []
    for key, item in known_keys().items():
        rule = item.metadata
        choices = f" [{', '.join(rule['choices'])}]" if rule["choices"] else ""
        default = "unset" if item.default is None else repr(item.default)
        lines.append(f"  {key}={default}\n      {rule['help']}{choices}")
    return "\n".join(lines)
