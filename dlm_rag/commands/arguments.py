"""The words of a command line: flags, questions, KEY=VALUE."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dlm_rag.cli import CommandParser, parse_int, print_note
from dlm_rag.config import Config, RetrievalConfig, dump_config, list_setting_fields, load_config
from dlm_rag.config.fields import fill_unset, get_field_metadata, list_choices
from dlm_rag.data.hub_datasets import find_named_corpus
from dlm_rag.errors import ConfigError
from dlm_rag.files.hub import READER, SHIPPED_FOLDER, SHIPPED_PREFIX
from dlm_rag.files.paths import expand_path
from dlm_rag.retrieval import read_retrieval_settings

# What programs that answer questions read; sections stand for all of their keys.
ANSWER_SETTINGS = (
    "model", "prompt", "retrieval", "decode", "engine", "questions", "limit", "out",
    "record_provisional", "workers", "energy",
)  # fmt: skip
SEARCH_SETTINGS = ("model.path", "retrieval", "-retrieval.url", "-retrieval.timeout", "-retrieval.oracle")
Options = Mapping[str, tuple[str | int | tuple[()], str]]
QUICK_LIMIT = 200  # questions of --quick
_SETTING = re.compile(r"([A-Za-z_][\w.-]*)=")

SETTING_BY_FLAG = {"--model": "model.path", "--corpus": "retrieval.corpus"} | {
    f"--{name}": name for name in ("questions", "limit", "out", "trace", "html", "compare")
}


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line."""

    config: Config
    questions: list[str]
    options: dict[str, Any]
    file: str | None  # of --config
    settings: list[str]  # KEY=VALUE, of words and flags
    reader_is_default: bool = False  # then the first of `settings` is the model that nobody has named

    def with_settings(self, settings: list[str]) -> "CommandLine":
        """The command line with these settings in place of its own; raises `ConfigError`."""
        return replace(self, settings=settings, config=load_config(self.file, settings))

    def fill_retrieval(self) -> RetrievalConfig:
        """The settings of retrieval, those of the model among them unless a file names it on the hub."""
        path = self.config.model.path
        named = any(word.startswith("model.path=") for word in self.settings)
        read = path and (named or SHIPPED_PREFIX in path or expand_path(path, ConfigError).is_dir())
        return fill_unset(self.config.retrieval, read_retrieval_settings(path) if path and read else {})

    def announce_reader(self) -> None:
        """Says that the shipped reader answers, where nobody has named it."""
        if self.reader_is_default:
            print_note(
                f"{READER} answers: SmolLM2-135M, small and trained to answer short questions from\n"
                "passages (docs/tutorials/own-documents.md); --model DIR_OR_HUB_ID names another"
            )


def parse_command_line(
    description: str, argv: list[str], reads: Sequence[str] = (), *, typed: bool = False,
    options: Options = MappingProxyType({}),
) -> CommandLine:  # fmt: skip
    """Parses a command line. `--help` and `--print-config` print and exit. Raises `ConfigError`.

    reads: sections and keys that the program reads, with `-KEY` for those of a section that it does not;
    other settings are refused; empty: all are read. Where `decode` and `out` are read, the shipped reader
    answers if a corpus is given, but neither a model nor --config. Settings without effect are refused
    (`check_effects`), unless `compare` is read. typed: whether questions may be typed.
    options: the program's own flags, by name: default and help text. Where the default is False, the flag
    has no value; where it is a whole number, so is the value; where it is (), the flag takes several words,
    of which those without a comma are settings.
    """
    given = vars(_build_parser(description, options, typed, reads).parse_intermixed_args(argv))
    values = {name: given[name] for name in options}
    for name, (default, _) in options.items():
        if isinstance(default, int) and default is not False:
            values[name] = parse_int(str(values[name]), min(default, 1), f"--{name} ")
        elif isinstance(words := values[name], list):
            given["words"] += [word for word in words if "," not in word]
            values[name] = [word for word in words if "," in word]
    questions = [word for word in given["words"] if not is_setting(word)]
    for word in questions:
        if not typed:
            raise ConfigError(f"'{word}' is neither a flag nor KEY=VALUE")
        _reject_mistaken_word(word)
    settings, effects = [*filter(is_setting, given["words"]), *given["set"]], "compare" not in reads
    check_read(settings, reads)
    keys = [word.partition("=")[0] for word in given["set"]]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(f"{twice[0]} is given twice by flags, and one counts: leave the others out")
    file, config = given["config"], load_config(given["config"], settings, effects=effects)
    answers = is_read("decode", reads) and not is_read("train", reads)
    if file is not None and answers and config.train != Config().train:
        made = f"{config.out or 'runs/train'}/model"
        raise ConfigError(
            f"{file} says how to train: `dlm-rag train --config {file}` makes {made}, which answers as "
            f"--model {made}, without --config"
        )
    reader = {"decode", "out"} <= {*reads} and file is None and _uses_shipped_reader(config, settings)
    if reader:
        settings = [f"model.path={READER}", *settings]
        config = load_config(None, settings, effects=effects)
    for key in ("out", "trace", "html"):  # what is read is expanded where it is opened
        if (path := getattr(config, key) or "").startswith("~"):
            setattr(config, key, str(expand_path(path, ConfigError)))
    if given["print_config"]:
        print(dump_config(config), end="")
        raise SystemExit(0)
    config.retrieval.corpus = find_named_corpus(config.retrieval.corpus)
    return CommandLine(config, questions, values, file, settings, reader)


def _build_parser(description: str, options: Options, typed: bool, reads: Sequence[str]) -> CommandParser:
    """The parser of a program, whose help lists the settings it reads; what flags set is in `set`."""
    name = Path(sys.argv[0]).name
    prog = " ".join([name, *sys.argv[1:2]]) if name == "dlm-rag" else name  # `dlm-rag sample`: two words
    epilog = "KEY=VALUE sets a field of the config:\n" + _list_keys(reads)
    parser = CommandParser(description, prog=prog, epilog=epilog)
    parser.set_defaults(set=[])
    what = "a question, or KEY=VALUE" if typed else "KEY=VALUE"
    parser.add_argument("words", nargs="*", metavar="WORD", help=what)
    parser.add_argument("--config", metavar="NAME", help="YAML file, as given or one that ships")
    for name, (default, help_text) in options.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true", dest=name, help=help_text)
            continue
        shown = help_text if default in ("", ()) else f"{help_text} ({default})"
        count, metavar = ("+", "WORD") if default == () else (None, name.upper())
        parser.add_argument(f"--{name}", default=default, help=shown, nargs=count, metavar=metavar)
    parser.add_argument("--print-config", action="store_true", help="print the resolved config")
    for flag, key in SETTING_BY_FLAG.items():
        if flag.strip("-") not in options:
            metavar = {"compare": "SETTINGS", "limit": "N"}.get(key, "PATH")
            help_text = f"{get_field_metadata(list_setting_fields()[key], 'help')} ({key})"
            shown = help_text if is_read(key, reads) else argparse.SUPPRESS
            word = f"{key}={{}}".format
            parser.add_argument(flag, action="append", dest="set", type=word, metavar=metavar, help=shown)
    add_setting = partial(parser.add_argument, action="append_const", dest="set")
    if is_read("limit", reads):
        add_setting("--quick", const=f"limit={QUICK_LIMIT}", help=f"short for --limit {QUICK_LIMIT}")
    if is_read("decode", reads) and not is_read("train", reads):
        anyway = "give every answer, also an unsupported one (decode.abstain=never)"
        add_setting("--answer-anyway", const="decode.abstain=never", help=anyway)
    return parser


def is_read(key: str, reads: Sequence[str]) -> bool:
    """Whether a program that reads these sections and keys (`parse_command_line`) reads a setting."""
    section = key.partition(".")[0]
    left_out = f"-{key}" in reads or f"-{section}" in reads
    return not reads or (not left_out and (key in reads or section in reads))


def check_read(settings: Sequence[str], reads: Sequence[str]) -> None:
    """Raises `ConfigError` for a setting that a program does not read, of words KEY=VALUE."""
    keys = list_setting_fields()
    for key in (word.partition("=")[0] for word in settings):
        if key in keys and not is_read(key, reads):
            leaf = key.rpartition(".")[2]
            others = [each for each in keys if each.endswith(f".{leaf}") and is_read(each, reads)]
            remedy = f"set {others[0]}" if others else "leave it out"
            raise ConfigError(f"{key} has no effect here, for this program does not read it: {remedy}")


def _uses_shipped_reader(config: Config, settings: list[str]) -> bool:
    """Whether a corpus is named, another than the passages of the shipped world, and no model."""
    corpus = config.retrieval.corpus
    if corpus is None or any(word.startswith("model.path=") for word in settings):
        return False
    paths = expand_path(corpus, ConfigError), SHIPPED_FOLDER / "world" / "corpus.jsonl"
    return len({*map(os.path.realpath, paths)}) > 1


def is_setting(word: str) -> bool:
    """Whether a word of the command line is KEY=VALUE and not a question that holds an equals sign."""
    found = _SETTING.match(word)
    key = found[1] if found else ""
    return bool(key) and ("." in key or key in list_setting_fields() or not re.search(r"\s", word))


def _reject_mistaken_word(word: str) -> None:
    """Raises `ConfigError` for what is rather a setting, a file or a flag than a question."""
    with suppress(OSError):  # too long for a path
        if Path(word).is_file():
            raise ConfigError(f"'{word}' is not a question but a file: write --questions FILE")
    bare = word.strip("“”‘’„«»")
    is_one_word = bare.isascii() and not re.search(r"[\s?]", bare)
    if is_one_word or re.match(r"[‐-―−]|\w+\.[\w.]+\s*=", bare):  # a text editor makes one dash of two
        raise ConfigError(
            f"'{word}' is not a question, which has several words or a question mark: write settings as "
            "KEY=VALUE in one word, files after their flag, as in --questions FILE, flags with two hyphens"
        )


def _list_keys(reads: Sequence[str]) -> str:
    lines = []
    for key, item in list_setting_fields().items():
        if not is_read(key, reads):
            continue
        own = ", module:function" * bool(get_field_metadata(item, "table"))
        choices = f" [{', '.join(found)}{own}]" if (found := list_choices(item)) else ""
        shown = "unset" if item.default is None else repr(item.default)
        lines.append(f"  {key}={shown}\n      {get_field_metadata(item, 'help')}{choices}")
    return "\n".join(lines)
