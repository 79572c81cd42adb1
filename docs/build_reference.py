"""Writes docs/reference/settings.md and commands.md from the code.

    python docs/build_reference.py            # writes both pages
    python docs/build_reference.py --check    # exit status 1 if a page is out of date

Settings come from dlm_rag/config, commands from their docstrings and parsers. Edit those, not the pages.
"""

import contextlib
import dataclasses
import inspect
import io
import os
import re
import sys
from collections.abc import Hashable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args
from unittest import mock

from dlm_rag import config
from dlm_rag.__main__ import PROGRAMS, load_program
from dlm_rag.config.fields import SET, get_field_metadata, list_choices, list_needs
from dlm_rag.config.sections import LikelihoodConfig

PAGES = Path(__file__).parent / "reference"
TYPE_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false"}
FACTS = {
    ("attention_blocks", True): "a checkpoint with block attention",
}
# Flags, settings, files, and names with an underscore.
SECTIONS = "|".join(item.name for item in dataclasses.fields(config.Config) if item.metadata == {})
CODE = (
    rf"(?<![\w-])--[a-z][\w-]*|(?<![\w./])(?:{SECTIONS})\.[a-z]\w*(?:=\w+)?"
    r"|[\w/]+\.(?:json|jsonl|md|html|yaml|py)\b"
    r"|(?<!\w)[$~]?[A-Za-z0-9./]*[A-Za-z0-9]_[\w.:=/]*[\w/](?:\[[\w-]+\])?"
)
HARNESS = "lm-eval"  # its words are those of lm-evaluation-harness
KEYS_IN_HELP = "KEY=VALUE sets"  # where the list of settings begins in `--help`
SETTINGS_HEAD = """\
---
hide: [toc]
---

# Settings

Every setting of every program, with its default. Set one on the command line as `section.key=value`, or in
a YAML file that you name with `--config`:

```yaml
decode: {commit_threshold: 0.8}
retrieval: {top_k: 5}
```

A word on the command line wins over the file, and the file wins over the checkpoint's own value
(`generation_config.json`: SmolLM2 has many), and that over the default. A program refuses a
setting that has no effect, and suggests the nearest name for one that does not exist.

*Unset* means that the setting has no value of its own. Write `null` to unset one that a file sets. Where a
setting also takes `module:function`, you can name code of your own in the working folder.

*This page is generated: `python docs/build_reference.py`.*
"""
COMMANDS_HEAD = """\
# Commands

`dlm-rag COMMAND` works from any folder; `python -m dlm_rag COMMAND` is the same. In a checkout
`python sample.py`, `python evaluate.py` and `python train.py` run the first of them.

A command takes flags (`--out FILE`) and [settings](settings.md) (`decode.batch_size=16`). `--print-config`
prints the resolved settings and exits.

| exit status | meaning |
|---|---|
| 0 | all went well; a training that SIGTERM ended has saved a checkpoint |
| 1 | something failed on the way: a question, a disk, a server |
| 2 | bad input; nothing was lost, and the message names the remedy |
| 130 | interrupted by Ctrl-C; the same command resumes |

*This page is generated: `python docs/build_reference.py`.*
"""


def escape(text: str) -> str:
    """Prose as Markdown that shows the same: names are `code`, other marks of Markdown and HTML escaped."""
    pieces = re.split(rf"(`[^`]+`|{CODE})", text)
    return "".join(
        (piece if piece[0] == "`" else f"`{piece}`")
        if n % 2
        else re.sub(r"([\\*_<>\[\]|#])", r"\\\1", piece)
        for n, piece in enumerate(pieces)
    )


def describe_type(item: Any) -> str:
    """The type of a setting in words."""
    kinds = [kind for kind in get_args(item.type) or (item.type,) if kind is not NoneType]
    return " or ".join(TYPE_NAMES[kind] for kind in kinds)


def describe_default(item: Any) -> str:
    value = item.default
    if value is None:
        return "unset"
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{shown}`" if shown else "empty"


def describe_bounds(item: Any) -> str:
    low, high = item.metadata.get("ge"), item.metadata.get("le")
    least = "" if low is None else f"at least {low:g}" if low == 0 or low > 1e-5 else "above 0"
    most = "" if high is None else f"at most {high:,.10g}"
    return "".join(f", {bound}" for bound in (least, most) if bound)


def describe_condition(key: str, wanted: Any) -> str:
    """A key of `only_with` and what it must be."""
    values = wanted if isinstance(wanted, tuple) else (wanted,)
    if isinstance(values[0], Hashable) and (key, values[0]) in FACTS:
        return FACTS[key, values[0]]
    if SET in values and None in values:  # any value but 0
        return f"`{key}` other than 0"
    named = [
        f"`{value}{'...' * str(value).endswith('://')}`"
        for value in values
        if isinstance(value, str | bool)
    ]
    parts = [f"`{key}` {join_words(named, 'or')}"] if named else []
    parts += [f"`{key}` set"] * (SET in values)
    parts += [f"`{key}` unset"] * (None in values)
    return " or ".join(parts)


def join_words(words: list[str], last: str) -> str:
    """`a, b or c`."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def describe_needs(need: Mapping[str, Any]) -> str:
    """The line on `only_with`; empty where the setting always has an effect."""
    conditions = "; ".join(filter(None, (describe_condition(*each) for each in need.items())))
    return f"Has an effect only with {conditions}." if conditions else ""


def capitalize(text: str) -> str:
    """With a capital, unless the text begins with the name of an objective, as in `rl: ...`."""
    objectives = list_choices(config.list_setting_fields()["train.objective"])
    return text if re.match(rf"({'|'.join(objectives)})\b", text) else text[:1].upper() + text[1:]


def render_setting(key: str, item: Any, holder: Any) -> str:
    section, _, name = key.rpartition(".")
    own = " or `module:function`" if get_field_metadata(item, "table") else ""
    choices = ", ".join(f"`{name}`" for name in list_choices(item))
    kind = f"one of {choices}{own}" if choices else describe_type(item) + describe_bounds(item)
    text = escape(get_field_metadata(item, "help"))
    parts = [
        f"### `{key}` {{ #{key} }}",
        f"Type: {kind}. Default: {describe_default(item)}.",
        f"{capitalize(text)}.",
    ]
    needs = describe_needs(list_needs(section, holder, name))
    return "\n\n".join([*parts, needs] if needs else parts)


def render_settings() -> str:
    """The page of all settings, by section."""
    holders: dict[str, Any] = {item.name: item.type for item in dataclasses.fields(config.Config)}
    sections: dict[str, list[str]] = {}
    for key, item in config.list_setting_fields().items():
        section = key.rpartition(".")[0]
        holder = holders.get(section, config.Config)
        sections.setdefault(section, []).append(render_setting(key, item, holder))
    intro, body = [], []
    for name, rendered in sections.items():
        title = f"`{name}`" if name else "Settings of a run"
        anchor = name or "run"
        doc = (
            (inspect.getdoc(holders[name]) or "").split("\n\n")[0]
            if name
            else "What a program reads and writes."
        )
        intro.append(f"- [{title}](#{anchor}): {escape(' '.join(doc.split()))}")
        body += [f"## {title} {{ #{anchor} }}", escape(" ".join(doc.split())), *rendered]
    return "\n\n".join([SETTINGS_HEAD + "\n" + "\n".join(intro), *body]) + "\n"


def capture_help(name: str) -> str:
    """What `dlm-rag NAME --help` prints."""
    printed = io.StringIO()
    program = load_program(name)
    words = ["dlm-rag", name, "--help"]
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.dict(os.environ, COLUMNS="100"),  # the width of argparse's lines
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        program(words[2:])
    return printed.getvalue()


def render_doc(text: str) -> list[str]:
    """A docstring as Markdown: its paragraphs, and what is indented as blocks of text."""
    found: list[str] = []
    for block in re.split(r"\n\n+", text.strip()):
        lines = block.splitlines()
        while lines:
            is_code = lines[0].startswith((" ", "dlm-rag "))
            end = next(
                (n for n, line in enumerate(lines) if line.startswith((" ", "dlm-rag ")) != is_code),
                len(lines),
            )
            part, lines = lines[:end], lines[end:]
            joined = inspect.cleandoc("\n" + "\n".join(part)) if is_code else escape(" ".join(part))
            found.append(f"```text\n{joined}\n```" if is_code else joined)
    return found


def render_command(name: str) -> str:
    program = load_program(name)
    doc = program.__doc__ or sys.modules[program.__module__].__doc__ or ""
    parts = [f"## {name}", *render_doc(inspect.cleandoc(doc))]
    if name == "profile":
        return "\n\n".join(parts)
    if name == HARNESS:
        fields = dataclasses.fields(LikelihoodConfig)
        rows = [
            f"| `{item.name}` | {describe_default(item)} | {escape(get_field_metadata(item, 'help'))} |"
            for item in fields
        ]
        return "\n\n".join(
            [*parts, "\n".join(["| of `--model_args` | default | meaning |", "|---|---|---|", *rows])]
        )
    shown, _, keys = capture_help(name).partition(KEYS_IN_HELP)
    usage, rest = shown.split("\n\n", maxsplit=1)
    flags = re.search(r"^(positional arguments|options):.*", rest, re.MULTILINE | re.DOTALL)
    parts.append(f"```text\n{usage}\n\n{flags[0].strip() if flags else ''}\n```")
    read = re.findall(r"^  ([a-z0-9_.]+)=", keys, re.MULTILINE)
    return "\n\n".join([*parts, describe_reads(read)] if read else parts)


def describe_reads(read: list[str]) -> str:
    """The sentence on the settings that a command reads: whole sections, and single keys of others."""
    every: dict[str, list[str]] = {}
    for key in config.list_setting_fields():
        every.setdefault(key.rpartition(".")[0] or key, []).append(key)
    named, left_out = [], []
    for name, keys in every.items():
        own, other = [key for key in keys if key in read], [key for key in keys if key not in read]
        whole = len(own) > len(other)
        named += [name] if whole else own
        left_out += other if whole else []
    text = f"Reads the settings {join_words([f'[`{name}`](settings.md#{name})' for name in named], 'and')}"
    return text + f" (not {join_words([f'`{key}`' for key in left_out], 'or')})" * bool(left_out) + "."


def render_commands() -> str:
    """The page of all commands."""
    return "\n\n".join([COMMANDS_HEAD.strip(), *map(render_command, PROGRAMS)]) + "\n"


def render_pages() -> dict[Path, str]:
    """Each generated page with its text."""
    return {PAGES / "settings.md": render_settings(), PAGES / "commands.md": render_commands()}


def main() -> None:
    stale = [
        path for path, text in render_pages().items() if not path.is_file() or path.read_text() != text
    ]
    if "--check" in sys.argv[1:]:
        sys.exit("".join(f"{path} is out of date: python {__file__}\n" for path in stale) or None)
    for path, text in render_pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
