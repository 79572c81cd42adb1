"""The commands of dlm_rag, from any folder.

    dlm-rag sample             answer questions, retrieving while denoising
    dlm-rag chat               ask one question after another in a terminal
    dlm-rag evaluate           score a denoiser on questions with known answers
    dlm-rag benchmark          evaluate models x data sets x seeds in one table
    dlm-rag lm-eval            run lm-evaluation-harness: multiple choice and perplexity
    dlm-rag train              train a denoiser
    dlm-rag synthesize         make training rows
    dlm-rag page               make a web page that plays a decoding
    dlm-rag serve              answer questions over HTTP (OpenAI's API) and in a browser
    dlm-rag data               download the field's data sets by name
    dlm-rag index              build the index of a corpus, on this machine or in Milvus
    dlm-rag retrieve-server    offer a corpus for search over HTTP
    dlm-rag profile            profile a run: where the time went
    dlm-rag doctor             check this machine, and how to fix what does not work

`dlm-rag COMMAND --help` lists flags and settings; `python -m dlm_rag COMMAND` is the same.
"""

import importlib
import sys
from collections.abc import Callable
from typing import NoReturn

from dlm_rag import __version__
from dlm_rag.cli import run_program
from dlm_rag.errors import ConfigError, suggest_nearest

PROGRAMS = (
    "sample", "chat", "evaluate", "benchmark", "lm-eval", "train", "synthesize", "page", "serve", "data",
    "index", "retrieve-server", "profile", "doctor",
)  # fmt: skip
OTHER_HOMES = {
    "chat": "serve:chat", "page": "sample:page", "retrieve-server": "serve:retrieve_server",
}  # fmt: skip


def load_program(name: str) -> Callable[[list[str]], None]:
    """The function of a program: `main` of the module of its name, or another of another module."""
    module, _, function = OTHER_HOMES.get(name, f"{name.replace('-', '_')}:main").partition(":")
    found: Callable[[list[str]], None] = getattr(
        importlib.import_module(f"dlm_rag.commands.{module}"), function
    )
    return found


def dispatch(argv: list[str]) -> None:
    """Runs the program that the first word names; raises `ConfigError` where it names none."""
    name = argv[0] if argv else "--help"
    if name in PROGRAMS:
        load_program(name)(argv[1:])
    elif name in ("-h", "--help"):
        print(__doc__, end="")
    elif name == "--version":
        print(__version__)
    else:
        raise ConfigError(f"'{name}' is none of {', '.join(PROGRAMS)}{suggest_nearest(name, PROGRAMS)}")


def main() -> NoReturn:
    run_program(dispatch)


if __name__ == "__main__":
    sys.argv[0] = "dlm-rag"  # for usage texts and cards; else the path of this file
    main()
