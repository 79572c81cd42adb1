"""A job of answering questions: everything is checked in the order of its cost, then weights are read.

Settings, output files, questions, checkpoint headers, question lengths, corpus and index; the weights last.
"""

from __future__ import annotations

import datetime
import os
import platform
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_rag import __version__
from dlm_rag.config import Config
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.machine import choose_device, choose_dtype, commit_of_code, describe_machine, machine_name
from dlm_rag.program import check_writable, note
from dlm_rag.progress import progress, status

if TYPE_CHECKING:
    import torch

    from dlm_rag.decode.answers import AnswersFile
    from dlm_rag.decode.decoder import Decoder
    from dlm_rag.decode.trace import Header
    from dlm_rag.model.checkpoint import Checkpoint
    from dlm_rag.model.denoiser import Denoiser
    from dlm_rag.questions import Question
    from dlm_rag.retrieval.base import CorpusRetriever, Retriever
    from dlm_rag.tokenizer import Tokenizer

SHIPPED = Path(__file__).resolve().parents[1] / "shipped"


def gather_questions(config: Config, typed: list[str]) -> list[Question]:
    """The questions chosen of the file, and those of the command line; at least one, ids all different.

    Raises `QuestionError`.
    """
    from dlm_rag.questions import choose, read_questions, typed_questions

    if (config.limit or config.quick) and not config.questions:
        raise ConfigError("limit and quick choose among the questions of a file: name one with --questions")
    questions = choose(read_questions(config.questions), config) if config.questions else []
    taken = {question.id for question in questions}
    for question in typed_questions(typed):
        if question.id in taken:
            raise QuestionError(
                f"the id '{question.id}' of a typed question is taken in {config.questions}: put the "
                "question into the file"
            )
        questions.append(question)
    if not questions:
        raise ConfigError('no question: type one, as in "Who wrote Emma?", or give --questions')
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
        status("reading weights")
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
        free = {"batch_size", "corpus", "index_folder", "dense_batch_size", "search_memory_gib"}
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
            "corpus": self.retriever.fingerprint,
            "dtype": str(self.dtype).removeprefix("torch."),
            "evidence_layout": self.evidence_layout,
            "attention_block": self.checkpoint.config.attention_block,
            "engine.compile": self.config.engine.compile,
        }

    def trace_header(self) -> Header:
        """What the questions of a trace of this job have in common."""
        from dlm_rag.decode.trace import header_of

        return header_of(
            self.checkpoint.config,
            self.tokenizer,
            self.evidence_layout,
            self.config.decode,
            top_k=self.config.retrieval.top_k,
            model=self.checkpoint.fingerprint,
            corpus=self.retriever.fingerprint,
        )

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
            "machines": [describe_machine(self.device, self.attention)],  # that have answered, in order
            "seed": self.config.decode.seed,
            "answers_depend_on": self.answers_depend_on(),
            "config": asdict(self.config),
        }


def prepare(config: Config, questions: list[Question]) -> Prepared:
    """Checks checkpoint, questions, corpus and index, before any weight is read.

    Raises `UserError` for what is wrong.
    """
    assert config.model.path is not None, "see with_shipped"
    if config.retrieval.corpus is None:
        raise ConfigError("no corpus: give --corpus a file of JSON lines")
    # A corpus that is not there, or has a bad line, is found before torch is imported.
    from dlm_rag.retrieval.corpus import open_corpus

    status("reading the corpus")
    corpus = open_corpus(config.retrieval.corpus, config.retrieval.index_folder)
    status("checking the model")
    from dlm_rag.decode.engine import check_heads, with_checkpoints_own
    from dlm_rag.evidence.layout import check_order
    from dlm_rag.model.checkpoint import open_checkpoint
    from dlm_rag.model.heads import read_heads

    checkpoint = open_checkpoint(config.model.path, config.model.attention_block)
    if config.decode.finished_blocks and not checkpoint.config.attention_block:
        raise ConfigError(
            f"finished_blocks={config.decode.finished_blocks} has no effect: the attention of "
            f"{checkpoint.folder} has no blocks"
        )
    decode = with_checkpoints_own(config.decode, checkpoint.config)
    config = replace(config, decode=decode)
    check_heads(decode, read_heads(checkpoint.folder) is not None)
    assert decode.canvas_length is not None
    device = choose_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, device)
    from dlm_rag.model.kernels import choose_backend
    from dlm_rag.tokenizer import Tokenizer

    attention = choose_backend(config.model.attention, device, dtype)
    status("reading the tokenizer")
    layout = config.model.evidence_layout or checkpoint.config.evidence_layout
    assert decode.finished_blocks is not None
    check_order(checkpoint.config, decode.finished_blocks, layout)
    tokenizer = Tokenizer.from_pretrained(checkpoint, layout)
    from dlm_rag.evidence.fitting import Room, fit

    room = Room.of(checkpoint.config, layout, decode.canvas_length)
    too_long = []
    for question in questions:
        try:
            fit(tokenizer.prompt(question.question, []), room)
        except QuestionError as error:
            too_long.append(f"question '{question.id}': {error}")
    if len(too_long) == len(questions):  # others would be answered, and these recorded as failed
        raise QuestionError(too_long[0])
    from dlm_rag.retrieval import load_retriever

    status("opening the index")
    found = load_retriever(config.retrieval, corpus)
    retriever = _oracle(found, questions, config.decode.query) if config.retrieval.oracle else found
    return Prepared(checkpoint, tokenizer, retriever, device, dtype, attention, layout, config)


def _oracle(inner: CorpusRetriever, questions: list[Question], query: str) -> Retriever:
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
    file: AnswersFile
    prepared: Prepared
    failed: int = 0  # of those that were run; the answers file says why

    def run(self, denoiser: Denoiser | None = None) -> Denoiser | None:
        """Answers what remains; `denoiser`, here and returned, saves reading the same weights twice."""
        from dlm_rag.decode.view import Tally

        tally, remaining = Tally(), self.file.remaining(self.questions)
        try:
            if remaining:
                self.file.begin(self.prepared.stamp(), self.prepared.trace_header())
                remaining = self.file.remaining(self.questions)  # another process may have answered some
            if answered := len(self.questions) - len(remaining):
                note(f"{answered} of {len(self.questions)} questions are answered already")
            if not remaining:
                return denoiser
            decoder = self.prepared.load(denoiser)
            start = time.perf_counter()
            with progress("answering", len(remaining)) as advance:
                for rollout in decoder.stream(remaining):
                    self.file.append(rollout)
                    tally.add(rollout)
                    advance(1)
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
    file.remaining(questions)
    prepared = prepare(config, questions)
    file.check_same(prepared.answers_depend_on())
    return Job(questions, file, prepared)


def check_files(config: Config) -> None:
    """Raises `ConfigError` when a file cannot be written, or is named for two purposes."""
    written = {"out": config.out, "trace": config.trace}
    suffixes = {"the stamp of out": "run.json", "the lock of out": "lock"} if config.out else {}
    beside = {name: f"{config.out}.{suffix}" for name, suffix in suffixes.items()}
    read = {"questions": config.questions, "corpus": config.retrieval.corpus}
    seen: dict[object, str] = {}
    for key, path in (written | beside | read).items():
        if path is not None and path != "-":
            other = seen.setdefault(_file(path), key)
            if other != key:
                raise ConfigError(f"{other} and {key} are the same file, {path}: name another for {other}")
    for key, path in written.items():
        if path is not None:
            check_writable(path, key)
    for path in beside.values():
        if os.path.lexists(path) and not Path(path).is_file():
            raise ConfigError(f"{path} is there and is no file: take it away, or choose another --out")


def _file(path: str) -> object:
    """What is equal for two names of one file, be they links, hard ones or in another case."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return os.path.realpath(path)
    return found.st_dev, found.st_ino
