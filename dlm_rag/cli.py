"""What the command lines share: reading the words, checking everything, then loading the model.

Bad input is found in the order of its cost: settings, output files, questions, checkpoint headers,
question lengths, corpus and index; the weights are read last.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dlm_rag.config import Config, as_tree, dump_config, known_keys, load_config
from dlm_rag.errors import ConfigError, UserError

if TYPE_CHECKING:
    import torch

    from dlm_rag.data.questions import Question
    from dlm_rag.decode.decoder import Decoder
    from dlm_rag.decode.rollout import Rollout

_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
FLAGS = {"--model": "model.path", "--corpus": "retrieval.corpus"} | {
    f"--{name}": name for name in ("questions", "out", "trace")
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists the flags")


def parse(description: str, argv: list[str], *, typed: bool = True) -> tuple[Config, list[str]]:
    """The resolved config and the questions typed on the command line.

    `--help` and `--print-config` print and exit. Raises `ConfigError`.
    """
    parser = _Parser(
        prog=Path(sys.argv[0]).name,
        description=description,
        epilog="KEY=VALUE sets any field of the config:\n" + _list_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = "a question, or KEY=VALUE" if typed else "KEY=VALUE"
    parser.add_argument("words", nargs="*", metavar="WORD", help=what)
    parser.add_argument("--config", metavar="NAME", help="YAML file, as given or in configs/")
    keys = known_keys()
    for flag, key in FLAGS.items():
        parser.add_argument(flag, metavar="PATH", help=f"{keys[key].metadata['help']} ({key})")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config")
    given = parser.parse_intermixed_args(argv)
    overrides = [word for word in given.words if _OVERRIDE.match(word)]
    questions = [word for word in given.words if not _OVERRIDE.match(word)]
    if questions and not typed:
        raise ConfigError(f"'{questions[0]}' is neither a flag nor KEY=VALUE")
    config = load_config(given.config, overrides)
    for flag, key in FLAGS.items():
        value = getattr(given, flag.strip("-"))
        if value is not None:
            section, _, name = key.rpartition(".")
            setattr(getattr(config, section) if section else config, name, value)
    if given.print_config:
        print(dump_config(config), end="")
        raise SystemExit(0)
    return config, questions


def _list_keys() -> str:
    lines = []
    for key, item in known_keys().items():
        rule = item.metadata
        choices = f" [{', '.join(rule['choices'])}]" if rule["choices"] else ""
        default = "unset" if item.default is None else repr(item.default)
        lines.append(f"  {key}={default}\n      {rule['help']}{choices}")
    return "\n".join(lines)


def run(main: Callable[[list[str]], None]) -> NoReturn:
    """Runs a program: user errors are one sentence and exit code 2, Ctrl-C is exit code 130."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("dlm_rag").setLevel(logging.INFO)
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader went away (`| head`); nothing more can be said on this stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    raise SystemExit(0)


@dataclass(frozen=True)
class Prepared:
    """Everything that was checked, and how to load the rest."""

    config: Config
    questions: list[Question]
    corpus_fingerprint: str
    load: Callable[[], Decoder]


def gather_questions(config: Config, typed: list[str]) -> list[Question]:
    """The questions of the file and of the command line; at least one. Raises `QuestionError`."""
    from dlm_rag.data.questions import read_questions, typed_questions

    questions = read_questions(config.questions) if config.questions else []
    questions += typed_questions(typed)
    if not questions:
        raise ConfigError('no question: type one, as in `sample.py "Who ...?"`, or give --questions')
    return questions


def prepare(config: Config, questions: list[Question]) -> Prepared:
    """Checks checkpoint, questions, corpus and index; `load` then reads the weights.

    Raises `UserError` for what is wrong, before any weight is read.
    """
    if config.model.path is None:
        raise ConfigError(
            "no model: give --model a checkpoint folder or hub id (a model of our own is not shipped yet)"
        )
    if config.retrieval.corpus is None:
        raise ConfigError("no corpus: give --corpus a file of JSON lines")
    # A corpus that is not there, or whose first lines are bad, is found before torch is imported.
    from dlm_rag.retrieval.corpus import open_corpus

    corpus = open_corpus(config.retrieval.corpus, config.retrieval.index_folder)
    from dlm_rag.model.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(config.model.path)
    device = choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, device)
    from dlm_rag.model.attention import choose_backend
    from dlm_rag.tokenizer import Tokenizer

    choose_backend(config.model.attention, device, dtype)
    layout = config.model.evidence_layout or checkpoint.config.evidence_layout
    tokenizer = Tokenizer.from_pretrained(checkpoint, layout)
    from dlm_rag.decode.evidence import fit
    from dlm_rag.errors import QuestionError

    for question in questions:
        try:
            fit(
                tokenizer.prompt(question.question, []), layout,
                checkpoint.config.max_position_embeddings, config.decode.canvas_length,
                checkpoint.config.passage_length,
            )  # fmt: skip
        except QuestionError as error:
            raise QuestionError(f"question '{question.id}': {error}") from None
    from dlm_rag.retrieval import load_retriever

    retriever = load_retriever(config.retrieval, corpus)

    def load() -> Decoder:
        from dlm_rag.decode.decoder import Decoder
        from dlm_rag.model.denoiser import Denoiser

        denoiser = Denoiser.from_pretrained(checkpoint, device, dtype, config.model.attention)
        return Decoder(denoiser, retriever, tokenizer, config.decode, layout)

    return Prepared(config, questions, corpus.fingerprint, load)


def decode_to_file(config: Config, questions: list[Question]) -> None:
    """Answers into the files `out` and `trace`; questions that are answered there are skipped.

    Raises `UserError` for bad input, for files that cannot be written, and for files that hold
    answers of another setting.
    """
    from dlm_rag.decode.answers import AnswersFile

    assert config.out is not None
    check_writable(config.out, "out")
    if config.trace is not None:
        check_writable(config.trace, "trace")
    file = AnswersFile(Path(config.out), Path(config.trace) if config.trace else None)
    remaining = file.remaining(questions)
    prepared = prepare(config, questions)
    file.check_settings(as_tree(config), prepared.corpus_fingerprint)
    if len(remaining) < len(questions):
        note(f"{len(questions) - len(remaining)} of {len(questions)} questions are answered already")
    if not remaining:
        return
    decoder = prepared.load()
    file.begin(stamp(prepared, decoder))
    rollouts: list[Rollout] = []
    start = time.perf_counter()
    for rollout in decoder.stream(remaining):
        file.append(rollout)
        rollouts.append(rollout)
        if sys.stderr.isatty():
            note(f"{len(rollouts)} of {len(remaining)}", end="\r")
    figures(rollouts, time.perf_counter() - start, decoder)


def figures(rollouts: list[Rollout], seconds: float, decoder: Decoder) -> None:
    """The one line of figures of a run."""
    from dlm_rag.decode.view import figures_line

    note(figures_line(rollouts, seconds, decoder.describe()))


def note(text: str, end: str = "\n") -> None:
    """For the person, not for the results: standard error."""
    print(text, end=end, file=sys.stderr, flush=True)


def choose_device(name: str) -> torch.device:
    """The torch device called `name`; "auto" is CUDA where there is one. Raises `ConfigError`."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(f"device={name} is not available here; set device=auto") from None
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype called `name`; "auto" is bfloat16 on CUDA and float32 elsewhere."""
    import torch

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def check_writable(path: str, key: str) -> None:
    """Raises `ConfigError` when the file `path` cannot be written; leaves no new file behind."""
    target = Path(path)
    existed = target.exists()
    try:
        with target.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be written: {error.strerror}") from None
    if not existed:
        target.unlink()


def stamp(prepared: Prepared, decoder: Decoder) -> dict[str, Any]:
    """What a result must carry to be understood later: code, settings, versions, machine."""
    import datetime
    import platform
    import subprocess
    from importlib.metadata import version

    import torch

    here = Path(__file__).resolve().parent
    git = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    device = decoder.denoiser.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    packages = ("dlm_rag", "torch", "transformers", "sentence-transformers", "bm25s", "numpy")
    return {
        "commit": commit or None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
        "device": f"{device.type} {name or platform.machine()}",
        "threads": torch.get_num_threads(),
        "dtype": str(decoder.denoiser.dtype).removeprefix("torch."),
        "attention": decoder.denoiser.backend,
        "evidence_layout": decoder.evidence_layout,
        "corpus_fingerprint": prepared.corpus_fingerprint,
        "seed": prepared.config.decode.seed,
        "config": as_tree(prepared.config),
    }
