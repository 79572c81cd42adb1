"""A job of answering questions into files: checked, then run; the weights are read last."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dlm_rag.cli import check_writable, print_note
from dlm_rag.commands.prepare_decoder import (
    PreparedDecoder,
    ResourceCache,
    open_search_source,
    prepare_decoder,
)
from dlm_rag.config import Config
from dlm_rag.energy.meter import EnergyReading
from dlm_rag.errors import ConfigError
from dlm_rag.page.render import check_page_target
from dlm_rag.progress import report_progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlm_rag.decode.results_file import AnswersFile
    from dlm_rag.decode.rollout import Rollout
    from dlm_rag.questions import Question


class AnswerEngine(Protocol):
    """What answers the questions of a job: a `Decoder`, or many."""

    def stream(self, questions: Sequence[Question]) -> Iterator[Rollout]: ...

    def describe(self) -> str: ...


class EnergyGauge(Protocol):
    """A context with the energy that was used in it, once it has ended."""

    reading: EnergyReading

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> None: ...


class EngineSource(Protocol):
    """Opens an engine for each of several jobs."""

    def open(
        self, asked: PreparedQuestions, on_machine: Callable[[dict[str, str | int]], None] | None = None
    ) -> AnswerEngine:
        """Reads the weights, unless they are loaded; on_machine gets every other machine that answers."""
        ...

    def energy_gauge(self, asked: PreparedQuestions) -> EnergyGauge:
        """Of the energy of what was opened."""
        ...


@dataclass
class PreparedQuestions:
    """Questions to be answered; everything but the weights has been checked."""

    config: Config  # as it was given; `prepared` has what the checkpoint adds
    questions: list[Question]
    prepared: PreparedDecoder


@dataclass
class AnswerJob(PreparedQuestions):
    """Questions to be answered into files."""

    file: AnswersFile
    failed: int = 0  # of those that were run; the answers file says why

    def run(self, engines: EngineSource, advance: Callable[[float], None] | None = None) -> None:
        """Answers what remains; advance: called for every answer, instead of a progress bar."""
        from dlm_rag.decode.terminal import RunTotals

        tally, remaining = RunTotals(self.prepared.tokenizer.end_ids), self.file.remaining(self.questions)
        gauge = engines.energy_gauge(self)
        try:
            if remaining:
                self.file.open_run(self.prepared.stamp(), self.prepared.trace_header())
                remaining = self.file.remaining(self.questions)  # another process may have answered some
            if answered := len(self.questions) - len(remaining):
                print_note(f"{answered} of {len(self.questions)} questions are answered already")
            if not remaining:
                return
            engine = engines.open(self, self.file.add_machine)
            bar = nullcontext(advance) if advance else report_progress("answering", len(remaining))
            with gauge, bar as told:
                start = time.perf_counter()
                for rollout in engine.stream(remaining):
                    self.file.append(rollout)
                    tally.add(rollout)
                    told(1)
        except KeyboardInterrupt:
            print_note(f"{tally.answers} of {len(remaining)} answered; the same command goes on from here")
            raise
        finally:
            if tally.answers:
                self.file.add_energy(tally.energy_record(gauge.reading))
            self.file.close()
        self.failed = tally.failed
        print_note(tally.summary_line(time.perf_counter() - start, engine.describe(), gauge.reading))


def plan_answer_job(
    config: Config, questions: list[Question], once: ResourceCache | None = None
) -> AnswerJob:
    """The job of answering into the files `out` and `trace`; questions answered there are skipped.

    once: shared by several jobs. Raises `UserError` for bad input, and for files that cannot be written or
    hold answers of other settings.
    """
    assert config.out is not None
    if config.workers is not None:
        from dlm_rag.workers.placement import check_ray_installed

        check_ray_installed()
    check_output_files(config)
    once = once or ResourceCache()
    open_search_source(config.retrieval, once)
    from dlm_rag.decode.results_file import AnswersFile

    file = AnswersFile(Path(config.out), Path(config.trace) if config.trace else None)
    file.remaining(questions)
    prepared = prepare_decoder(config, questions, once)
    file.check_same_settings(prepared.answers_depend_on())
    return AnswerJob(config, questions, prepared, file)


def check_output_files(config: Config) -> None:
    """Raises `ConfigError` when a file cannot be written, or is named for two purposes."""
    written = {"out": config.out, "trace": config.trace, "html": config.html}
    suffixes = {"the stamp of out": "run.json", "the lock of out": "lock"} if config.out else {}
    beside = {name: f"{config.out}.{suffix}" for name, suffix in suffixes.items()}
    read = {"questions": config.questions, "corpus": config.retrieval.corpus}
    check_distinct_paths(written, beside | read)
    for path in beside.values():
        if os.path.lexists(path) and not Path(path).is_file():
            raise ConfigError(f"{path} exists and is not a file: remove it, or choose another --out")
    if config.html is not None:
        if config.out is not None and config.trace is None:
            raise ConfigError("the page of answers in a file is made from their traces: add --trace FILE")
        check_page_target(config.html)


def check_distinct_paths(written: Mapping[str, str | None], others: Mapping[str, str | None]) -> None:
    """Raises `ConfigError` where one of the files cannot be written, or two by their keys are the same."""
    seen: dict[object, str] = {}
    for key, path in {**written, **others}.items():
        if path is not None and path != "-":
            other = seen.setdefault(_file_identity(path), key)
            if other != key:
                raise ConfigError(f"{other} and {key} are the same file, {path}: name another for {other}")
    for key, path in written.items():
        if path is not None:
            check_writable(path, key)


def _file_identity(path: str) -> object:
    """What is equal for two names of one file, be they links, hard ones or in another case."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return os.path.realpath(path)
    return found.st_dev, found.st_ino
