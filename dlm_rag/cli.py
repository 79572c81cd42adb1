"""What the command lines share: reading the words, checking everything, then loading the model.

Bad input is found in the order of its cost: settings, output files, questions, checkpoint headers,
question lengths, corpus and index; the weights are read last.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dlm_rag import __version__
from dlm_rag.config import Config, dump_config, known_keys, load_config
from dlm_rag.errors import ConfigError, QuestionError, RunError, UserError

if TYPE_CHECKING:
    import torch

    from dlm_rag.data.questions import Question
    from dlm_rag.decode.answers import AnswersFile
    from dlm_rag.decode.decoder import Decoder
    from dlm_rag.model.checkpoint import Checkpoint
    from dlm_rag.model.denoiser import Denoiser
    from dlm_rag.retrieval.base import Retriever
    from dlm_rag.tokenizer import Tokenizer

SHIPPED = Path(__file__).parent / "shipped"
_SETTING = re.compile(r"([A-Za-z_][\w.-]*)=")
FLAGS = {"--model": "model.path", "--corpus": "retrieval.corpus"} | {
    f"--{name}": name for name in ("questions", "out", "trace", "compare")
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists the flags")


@dataclass(frozen=True)
class Words:
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
) -> Words:
    """Reads a command line.

    switches: flags without a value, with their help texts. options: flags with a value, with default
    and help text.

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
    return Words(config, questions, on, with_values, given.config, settings)


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


def run(main: Callable[[list[str]], None]) -> NoReturn:
    """Runs a program: user errors are one sentence and exit code 2, Ctrl-C is exit code 130."""
    shown = logging.StreamHandler(sys.stderr)
    shown.setLevel(logging.INFO)  # some libraries lower their own loggers to DEBUG
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[shown])
    logging.getLogger("dlm_rag").setLevel(logging.INFO)
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except RunError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader went away (`| head`); nothing more can be said on this stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    raise SystemExit(0)


@dataclass(frozen=True)
class Prepared:
    """Everything that was checked, and how to load the rest."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    retriever: Retriever
    device: torch.device
    dtype: torch.dtype
    attention: str
    evidence_layout: str
    config: Config

    def load(self, denoiser: Denoiser | None = None) -> Decoder:
        """Reads the weights, where they are not given."""
        from dlm_rag.decode.decoder import Decoder
        from dlm_rag.model.denoiser import Denoiser

        if denoiser is None:
            denoiser = Denoiser.from_pretrained(self.checkpoint, self.device, self.dtype, self.attention)
        config = self.config
        return Decoder(
            denoiser, self.retriever, self.tokenizer, config.decode, self.evidence_layout, config.engine
        )

    def answers_depend_on(self) -> dict[str, Any]:
        """All that can change an answer; batch size, device and file names cannot."""
        free = {"batch_size", "corpus", "index_folder", "dense_batch_size"}
        settings = {
            f"{section}.{key}": value
            for section in ("retrieval", "decode")
            for key, value in asdict(getattr(self.config, section)).items()
            if key not in free
        }
        if settings["decode.overlap"] == "pipeline":  # the same tokens
            settings["decode.overlap"] = "none"
        return settings | {
            "model": self.checkpoint.fingerprint,
            "corpus": self.retriever.corpus.fingerprint,
            "dtype": str(self.dtype).removeprefix("torch."),
            "evidence_layout": self.evidence_layout,
            "engine.compile": self.config.engine.compile,
        }

    def stamp(self) -> dict[str, Any]:
        """What a result must carry to be understood later: code, settings, versions, machine."""
        import torch

        packages = ("torch", "transformers", "sentence-transformers", "bm25s", "numpy")
        return {
            "commit": commit_of_code(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version(), "dlm_rag": __version__}
            | {package: version(package) for package in packages},
            "device": f"{self.device.type}: {machine_name(self.device)}",
            "threads": torch.get_num_threads(),
            "attention": self.attention,
            "seed": self.config.decode.seed,
            "answers_depend_on": self.answers_depend_on(),
            "config": asdict(self.config),
        }


def machine_name(device: torch.device) -> str:
    """What a computation on this device runs on, in words."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    listed = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", listed.read_text()) if listed.is_file() else None
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


def commit_of_code() -> str | None:
    """The commit of the code, with `-dirty` for local changes; None outside a git checkout."""
    here = str(Path(__file__).resolve().parent)
    command = ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def gather_questions(config: Config, typed: list[str]) -> list[Question]:
    """The questions of the file and of the command line; at least one, ids all different.

    Raises `QuestionError`.
    """
    from dlm_rag.data.questions import read_questions, typed_questions

    questions = read_questions(config.questions) if config.questions else []
    taken = {question.id for question in questions}
    for question in typed_questions(typed):
        if question.id in taken:
            raise QuestionError(
                f"the id '{question.id}' of a typed question is taken in {config.questions}: put the "
                "question into the file"
            )
        questions.append(question)
    if not questions:
        raise ConfigError('no question: type one, as in `sample.py "Who ...?"`, or give --questions')
    return questions


def with_shipped(config: Config, typed: list[str]) -> Config:
    """The config with what ships with the package where nothing is named.

    The model by itself, its world for no other model, the world's questions for no other corpus.
    """
    model, retrieval, questions = config.model, config.retrieval, config.questions
    if model.path is None and retrieval.corpus is None:
        retrieval = replace(retrieval, corpus=str(SHIPPED / "world" / "corpus.jsonl"))
        if questions is None and not typed:
            questions = str(SHIPPED / "world" / "questions.jsonl")
    if model.path is None:
        model = replace(model, path=str(SHIPPED / "model"))
    return replace(config, model=model, retrieval=retrieval, questions=questions)


def prepare(config: Config, questions: list[Question]) -> Prepared:
    """Checks checkpoint, questions, corpus and index, before any weight is read.

    Raises `UserError` for what is wrong.
    """
    assert config.model.path is not None, "see with_shipped"
    if config.retrieval.corpus is None:
        raise ConfigError("no corpus: give --corpus a file of JSON lines")
    # A corpus that is not there, or has a bad line, is found before torch is imported.
    from dlm_rag.retrieval.corpus import open_corpus

    corpus = open_corpus(config.retrieval.corpus, config.retrieval.index_folder)
    from dlm_rag.decode.decoder import with_checkpoints_own
    from dlm_rag.model.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(config.model.path)
    decode = with_checkpoints_own(config.decode, checkpoint.config)
    config = replace(config, decode=decode)
    assert decode.canvas_length is not None
    device = choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, device)
    from dlm_rag.model.attention import choose_backend
    from dlm_rag.tokenizer import Tokenizer

    attention = choose_backend(config.model.attention, device, dtype)
    layout = config.model.evidence_layout or checkpoint.config.evidence_layout
    if config.decode.prompt_reuse and layout != "joint":
        raise ConfigError(
            f"decode.prompt_reuse has no effect with evidence_layout={layout}: leave it out, the pool "
            "keeps what can be kept"
        )
    tokenizer = Tokenizer.from_pretrained(checkpoint, layout)
    from dlm_rag.decode.evidence import fit

    too_long = []
    for question in questions:
        try:
            fit(
                tokenizer.prompt(question.question, []), layout,
                checkpoint.config.max_position_embeddings, decode.canvas_length,
                checkpoint.config.passage_length,
            )  # fmt: skip
        except QuestionError as error:
            too_long.append(f"question '{question.id}': {error}")
    if len(too_long) == len(questions):  # others would be answered, and these recorded as failed
        raise QuestionError(too_long[0])
    from dlm_rag.retrieval import load_retriever

    retriever = load_retriever(config.retrieval, corpus)
    if config.retrieval.oracle:
        retriever = _oracle(retriever, questions, config.decode.query)
    return Prepared(checkpoint, tokenizer, retriever, device, dtype, attention, layout, config)


def _oracle(inner: Retriever, questions: list[Question], query: str) -> Retriever:
    from dlm_rag.retrieval.fixed import OracleRetriever
    from dlm_rag.retrieval.query import build_query

    if query != "question":
        raise ConfigError("retrieval.oracle=true needs decode.query=question: its evidence never changes")
    for question in questions:
        if not question.supporting_ids:
            raise ConfigError(f"retrieval.oracle=true: question '{question.id}' has no supporting_ids")
    support = {build_query(query, q.question).parts[0]: q.supporting_ids for q in questions}
    return OracleRetriever(inner, support)


@dataclass
class Job:
    """Questions to be answered into files; everything but the weights has been checked."""

    questions: list[Question]
    remaining: list[Question]  # without an answer yet
    file: AnswersFile
    prepared: Prepared
    failed: int = 0  # of those that were run; the answers file says why

    def run(self, denoiser: Denoiser | None = None) -> Denoiser | None:
        """Answers what remains; `denoiser`, here and returned, saves reading the same weights twice."""
        from dlm_rag.decode.view import Tally

        remaining, answered = self.remaining, len(self.questions) - len(self.remaining)
        if answered:
            note(f"{answered} of {len(self.questions)} questions are answered already")
        if not remaining:
            return denoiser
        stamp = self.prepared.stamp()
        decoder = self.prepared.load(denoiser)
        self.file.begin(stamp)
        tally, start = Tally(), time.perf_counter()
        try:
            for rollout in decoder.stream(remaining):
                self.file.append(rollout)
                tally.add(rollout)
                if sys.stderr.isatty():
                    note(f"{tally.answers} of {len(remaining)}", end="\r")
        except KeyboardInterrupt:
            note(f"{tally.answers} of {len(remaining)} answered; the same command goes on from here")
            raise
        finally:
            self.file.close()
        self.failed = tally.failed
        note(tally.line(time.perf_counter() - start, decoder.describe()))
        return decoder.denoiser


def plan(config: Config, questions: list[Question]) -> Job:
    """The job of answering into the files `out` and `trace`; questions answered there are skipped.

    Raises `UserError` for bad input, for files that cannot be written, and for files that hold
    answers of another setting.
    """
    from dlm_rag.decode.answers import AnswersFile

    assert config.out is not None
    check_files(config)
    file = AnswersFile(Path(config.out), Path(config.trace) if config.trace else None)
    remaining = file.remaining(questions)
    prepared = prepare(config, questions)
    file.check_same(prepared.answers_depend_on())
    return Job(questions, remaining, file, prepared)


def check_files(config: Config) -> None:
    """Raises `ConfigError` when a file cannot be written, or is named for two purposes."""
    named = {
        "out": config.out,
        "trace": config.trace,
        "questions": config.questions,
        "corpus": config.retrieval.corpus,
    }
    seen: dict[Path, str] = {}
    for key, path in named.items():
        if path is not None:
            other = seen.setdefault(Path(path).resolve(), key)
            if other != key:
                raise ConfigError(f"{other} and {key} are the same file, {path}: name another for {other}")
    for key in ("out", "trace"):
        if named[key] is not None:
            check_writable(str(named[key]), key)


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
        target.unlink(missing_ok=True)  # another process may have asked the same
