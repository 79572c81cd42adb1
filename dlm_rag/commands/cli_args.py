"""The words of a command line: flags, questions, KEY=VALUE."""

import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from dlm_rag.cli import CommandParser, parse_int, print_note
from dlm_rag.config import (
    CONFIG_FOLDER,
    Config,
    dump_config,
    is_existing_file,
    list_setting_fields,
    load_config,
)
from dlm_rag.errors import ConfigError
from dlm_rag.files.hub import SHIPPED_FOLDER
from dlm_rag.files.record_readers import expand_path

READER_CONFIG = str(CONFIG_FOLDER / "reader.yaml")
_SETTING = re.compile(r"([A-Za-z_][\w.-]*)=")
_FILE_NAME = re.compile(r"\S+\.(jsonl?|csv|tsv|parquet|ya?ml|txt|md|gz|safetensors)")

SETTING_BY_FLAG = {"--model": "model.path", "--corpus": "retrieval.corpus"} | {
    f"--{name}": name for name in ("questions", "out", "trace", "html", "compare")
}


def parse_int_args(description: str, argv: list[str], what: str, default: list[int]) -> list[int]:
    """The words of a program that is told whole numbers above 0 only; `--help` prints and exits."""
    parser = CommandParser(description)
    parser.add_argument("numbers", nargs="*", metavar="NUMBER", help=f"{what} ({default})")
    return [parse_int(word) for word in parser.parse_args(argv).numbers] or default


@dataclass(frozen=True)
class CommandLine:
    """A command line, read: the resolved config, the questions typed, the switches that are on."""

    config: Config
    questions: list[str]
    switches: set[str]
    options: dict[str, Any]
    file: str | None  # of --config, or READER where the reader that ships stands in
    settings: list[str]  # KEY=VALUE, of words and flags

    def config_with(self, more: list[str]) -> Config:
        """The config with more settings on top; raises `ConfigError`."""
        return load_config(self.file, self.settings + more)

    def announce_reader(self) -> None:
        """Says that the reader answers, where nobody has named it."""
        if self.file == READER_CONFIG:
            print_note(
                "the shipped reader answers, as configs/reader.yaml says: it is small, and knows three\n"
                "ways to ask, as 'What is Emma?' (docs/synthesis.md); for any question give --model\n"
                "DIR_OR_HUB_ID (GSAI-ML/LLaDA-8B-Instruct)"
            )


def parse_command_line(
    description: str,
    argv: list[str],
    *,
    typed: bool = True,
    chosen: bool = False,
    answers: bool = False,
    switches: dict[str, str] | None = None,
    options: Mapping[str, tuple[str | int | tuple[()], str]] | None = None,
) -> CommandLine:
    """Reads a command line.

    typed: whether questions may be typed. chosen: whether --limit and --quick choose among those of a file.
    answers: whether the reader that ships answers where a corpus of one's own is named, and neither model
    nor --config.
    switches: flags without a value, with their help texts. options: flags with a value, with default and
    help text; where the default is a whole number, so is the value, and above 0 unless the default is 0.
    Where it is (), the flag takes several words; those without a comma are settings as elsewhere.

    `--help` and `--print-config` print and exit. Raises `ConfigError`.
    """
    before = sys.argv[1 : max(1, len(sys.argv) - len(argv))]  # `dlm-rag sample` is two words
    parser = CommandParser(
        description,
        prog=" ".join([Path(sys.argv[0]).name, *before]),
        epilog="KEY=VALUE sets any field of the config:\n" + _list_keys(),
    )
    what = "a question, or KEY=VALUE" if typed else "KEY=VALUE"
    parser.add_argument("words", nargs="*", metavar="WORD", help=what)
    parser.add_argument("--config", metavar="NAME", help="YAML file, as given or one that ships")
    keys = list_setting_fields()
    flags = SETTING_BY_FLAG | ({"--limit": "limit"} if chosen else {})
    for flag, key in flags.items():
        metavar = {"compare": "SETTINGS", "limit": "N"}.get(key, "PATH")
        parser.add_argument(flag, metavar=metavar, help=f"{keys[key].metadata['help']} ({key})")
    offered = {"print-config": "print the resolved config"} | (switches or {})
    if chosen:
        offered["quick"] = f"{keys['quick'].metadata['help']} (quick)"
    for name, help_text in offered.items():
        parser.add_argument(f"--{name}", action="store_true", dest=name, help=help_text)
    for name, (default, help_text) in (options or {}).items():
        shown = help_text if default in ("", ()) else f"{help_text} ({default})"
        several: dict[str, Any] = {"nargs": "+", "metavar": "WORD"} if default == () else {}
        parser.add_argument(
            f"--{name}", **{"metavar": name.upper(), "default": default, "help": shown} | several
        )
    given = parser.parse_intermixed_args(argv)
    for name in options or {}:
        if isinstance(words := getattr(given, name), list):
            given.words += [word for word in words if "," not in word]
            setattr(given, name, [word for word in words if "," in word])
    settings = [word for word in given.words if is_setting(word)]
    questions = [word for word in given.words if not is_setting(word)]
    for word in questions:
        _reject_mistaken_word(word)
        if not typed:
            raise ConfigError(f"'{word}' is neither a flag nor KEY=VALUE")
    for flag, key in flags.items():
        value = getattr(given, flag.strip("-"))
        if value is not None:
            if any(word.startswith(f"{key}=") for word in settings):
                raise ConfigError(f"{flag} and {key}= name the same setting: leave one out")
            settings.append(f"{key}={value}")
    if getattr(given, "quick", False):
        settings.append("quick=true")
    config = load_config(given.config, settings)
    if answers and given.config is None and _uses_shipped_reader(config, settings):
        given.config = READER_CONFIG
        config = load_config(READER_CONFIG, settings)
    for key in ("out", "trace", "html"):  # what is read is expanded where it is opened
        if (path := getattr(config, key) or "").startswith("~"):
            setattr(config, key, str(expand_path(path, ConfigError)))
    on = {name for name in offered if getattr(given, name)}
    if "print-config" in on:
        print(dump_config(config), end="")
        raise SystemExit(0)
    with_values = {name: getattr(given, name) for name in options or {}}
    for name, (default, _) in (options or {}).items():
        if isinstance(default, int):
            with_values[name] = parse_int(str(with_values[name]), min(default, 1), f"--{name} ")
    return CommandLine(config, questions, on, with_values, given.config, settings)


def _uses_shipped_reader(config: Config, settings: list[str]) -> bool:
    """Whether a corpus is named, another than the passages of the shipped world, and no model."""
    corpus, named = config.retrieval.corpus, any(word.startswith("model.path=") for word in settings)
    if named or corpus is None or config.synthesis.method != "traces":  # other rows need no denoiser
        return False
    try:
        return not expand_path(corpus, ConfigError).samefile(SHIPPED_FOLDER / "world" / "corpus.jsonl")
    except (OSError, ValueError):  # what is wrong with it is said where it is read
        return True


def is_setting(word: str) -> bool:
    """Whether a word of the command line is KEY=VALUE and not a question that holds an equals sign."""
    found = _SETTING.match(word)
    key = found[1] if found else ""
    return bool(key) and ("." in key or key in list_setting_fields() or not re.search(r"\s", word))


def _reject_mistaken_word(word: str) -> None:
    """Raises `ConfigError` for a setting without its equals sign, a file without its flag, odd dashes."""
    if re.match(r"[‐-―−]|-\W*$", word):  # a text editor makes one dash of two
        raise ConfigError(f"'{word}' is no question: flags begin with two hyphens, as --out; `-` is none")
    word = word.strip("“”‘’„«»")
    key = re.match(r"([a-z_]+)[.,:]\s*[^\s=]+\s*(=|$)", word)
    if word in list_setting_fields() or (
        key and any(known.startswith(f"{key[1]}.") for known in list_setting_fields())
    ):
        key_alone = re.split(r"[^\w.]", word.replace(",", "."))[0]
        raise ConfigError(f"'{word}' is no question: write settings as {key_alone}=VALUE, in one word")
    if (there := is_existing_file(word)) or _FILE_NAME.fullmatch(word):
        kind = "a file" if there else "the name of a file"
        raise ConfigError(f"'{word}' is {kind} and no question: name it behind its flag, as --questions")


def _list_keys() -> str:
    lines = []
    for key, item in list_setting_fields().items():
        rule = item.metadata
        choices = f" [{', '.join(rule['choices'])}]" if rule["choices"] else ""
        default = "unset" if item.default is None else repr(item.default)
        if item.default is MISSING:
            default = repr(item.default_factory())
        lines.append(f"  {key}={default}\n      {rule['help']}{choices}")
    return "\n".join(lines)
