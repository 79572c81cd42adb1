"""The answers file: one line a question, appended as it finishes; a stopped run goes on from there."""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.trace_file import AnswerLine, TraceContents, TraceHeader, TraceWriter, scan_trace
from dlm_rag.errors import ConfigError
from dlm_rag.files.checked_json import read_json_or_empty, validate_json_value
from dlm_rag.files.journal import (
    Journal,
    check_same_settings,
    drop_lines,
    explain_write_errors,
    hold_file_lock,
    read_json_lines,
    repair_last_line,
)
from dlm_rag.files.paths import write_text_atomic
from dlm_rag.questions import Question

log = logging.getLogger(__name__)


class AnswersFile:
    """Answers (and traces) on disk, with a stamp beside them: `<name>.run.json`.

    The constructor only reads; `open_run` is the first to write. What is there is only ever added to, but
    for the lines of questions that are asked again and a last line that a kill has cut short. Raises
    `ConfigError` or `TraceError` for files that are not this program's, or answers and traces that do
    not belong together.
    """

    def __init__(self, out: Path, trace: Path | None = None) -> None:
        self._out, self._trace, self._file = out, trace, Journal(out)
        self._writer: TraceWriter | None = None
        self._opened = ExitStack()
        self._stamp_path = out.with_name(f"{out.name}.run.json")
        self._read()

    def _read(self) -> None:
        """Takes in what the files hold now; another process may be adding to them."""
        self._stamp = self._read_stamp()
        self._answered: dict[str, str] = {}
        self._failed: set[str] = set()
        answers: dict[str, int] = {}
        for place, record in read_json_lines(self._out, ConfigError):
            none = f"{place} is no line of this program's: choose another file"
            line = validate_json_value(AnswerLine, record, none, ConfigError)
            answers[line.id] = line.answer_hash
            if line.error:
                self._failed.add(line.id)
            else:
                self._answered[line.id] = line.question
        # Read after the answers: each trace is written before its answer, so none can be missing.
        self._traced = TraceContents() if self._trace is None else scan_trace(self._trace)
        traces, asked = self._traced.questions, self._answered
        foreign = traces and not self._stamp_path.is_file()
        if self._trace is not None and (foreign or any(traces.get(n) != answers[n] for n in asked)):
            self._refuse_trace()

    def _refuse_trace(self) -> None:
        raise ConfigError(
            f"trace={self._trace} does not hold the traces of out={self._out}, one for each answer: choose "
            "other files for both"
        )

    def _read_stamp(self) -> dict[str, Any] | None:
        if not self._out.is_file() or not self._out.stat().st_size:
            return None
        stamp = read_json_or_empty(self._stamp_path)
        machines = stamp.setdefault("machines", [])
        known = isinstance(stamp.get("answers_depend_on"), dict) and isinstance(machines, list)
        if not known or not all(isinstance(machine, dict) for machine in machines):
            raise ConfigError(
                f"out={self._out} holds something without a readable {self._stamp_path.name} beside it, "
                "so it is not known what answered: choose another --out"
            )
        return stamp

    def remaining(self, questions: Sequence[Question]) -> list[Question]:
        """The questions without an answer here, those that failed among them.

        Final only after `begin`: until then another process may answer some. Raises `ConfigError` if an
        id has another question's answer.
        """
        for question in questions:
            if self._answered.get(question.id, question.question) != question.question:
                raise ConfigError(
                    f"out={self._out} holds the answer to another question with the id "
                    f"'{question.id}': choose another --out"
                )
        return [question for question in questions if question.id not in self._answered]

    def check_same_settings(self, depends_on: Mapping[str, Any]) -> None:
        """Raises `ConfigError` naming what this run does otherwise than the one that began the file."""
        then = self._stamp["answers_depend_on"] if self._stamp else depends_on
        check_same_settings(then, depends_on, f"out={self._out} holds answers")

    def open_run(self, stamp: dict[str, Any], header: TraceHeader | None = None) -> None:
        """Takes the files for this process; header: of the trace, where there is one.

        stamp: "answers_depend_on", "machines" (a list of one, see `machine.describe_machine`) and whatever
        else is to be known of the run that begins the files. A run that goes on with them adds its machine,
        and warns when it is another one. Lines of questions that failed, and a trace without its answer,
        are taken out: they are asked again. Raises as the constructor does.
        """
        try:
            for name, path in {"out": self._out, "trace": self._trace}.items():
                if path is not None:  # each may be another run's, too
                    self._opened.enter_context(hold_file_lock(Path(f"{path}.lock"), f"{name}={path}"))
            self._read()
            self.check_same_settings(stamp["answers_depend_on"])
            if self._trace is not None:
                assert header is not None, "a trace begins with a header"
                held = self._traced if self._answered else TraceContents()
                self._writer = TraceWriter(self._trace, header, held)
            with explain_write_errors(self._out):
                self._remove_unfinished()
                for journal in [self._file] if self._writer is None else [self._file, self._writer.file]:
                    self._opened.callback(journal.close)
                    journal.open_existing()
                (machine,) = stamp["machines"]
                if self._stamp is None:
                    self._write_stamp(stamp)
            self.add_machine(machine)
        except BaseException:
            self.close()
            raise

    def _remove_unfinished(self) -> None:
        """Takes out what is asked again; the trace first, so that a kill leaves no answer without one."""
        unanswered = {*self._traced.questions} - {*self._answered} - self._failed
        if len(unanswered) > 1:  # a kill leaves one
            self._refuse_trace()
        asked_again = unanswered | self._failed
        for path in (self._trace, self._out):
            if path is not None and path.is_file():
                repair_last_line(path)
                if asked_again:
                    drop_lines(path, asked_again)
        if self._trace is not None and not self._answered:
            self._trace.unlink(missing_ok=True)  # its header may be of other settings

    def add_machine(self, machine: dict[str, Any]) -> None:
        """Stamps the files with a machine that answers too; warns where it is another than before."""
        assert self._stamp is not None, "begun"
        machines = self._stamp["machines"]
        if machine in machines:
            return
        for last in machines[-1:]:
            log.warning(
                "out=%s holds answers made with %s, this run has %s: rounding may differ, and with it "
                "an answer", self._out, *_differences(last, machine)
            )  # fmt: skip
        with explain_write_errors(self._out):
            self._write_stamp(self._stamp | {"machines": [*machines, machine]})

    def _write_stamp(self, stamp: dict[str, Any]) -> None:
        self._stamp = stamp
        write_text_atomic(self._stamp_path, json.dumps(stamp, indent=2, ensure_ascii=False) + "\n")

    def add_energy(self, part: Mapping[str, Any] | None) -> None:
        """Adds to the stamp what this part of the run has spent; a run that goes on adds another.

        None: it was not measured. A full disk is a warning: what was computed is already stored.
        """
        if part is None or self._stamp is None:
            return
        before = self._stamp.get("energy")
        parts = [*(before if isinstance(before, list) else []), part]
        try:
            self._write_stamp(self._stamp | {"energy": parts})
        except OSError as error:
            log.warning("%s does not get the joules of this part: %s", self._stamp_path, error.strerror)

    def append(self, rollout: Rollout) -> None:
        """Adds a finished rollout: first its trace, then its answer, which marks it as done.

        Raises `RunError` where the disk is full, or a file is another's by now; what is there stays.
        """
        with explain_write_errors(self._out):
            if self._stamp is not None and not self._stamp_path.exists():  # taken away meanwhile
                self._write_stamp(self._stamp)
            if self._writer is not None:
                self._writer.write(rollout)
            self._file.append(rollout.to_dict())

    def close(self) -> None:
        self._opened.close()


def write_json_line(stream: TextIO, record: dict[str, Any]) -> None:
    """One JSON line, out at once; in ASCII where the stream is not UTF-8."""
    utf8 = (stream.encoding or "utf-8").lower().replace("-", "") == "utf8"
    stream.write(json.dumps(record, ensure_ascii=not utf8) + "\n")
    stream.flush()


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """`key=value, ...` of each where they differ."""
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    return [", ".join(f"{key}={each.get(key)}" for key in keys) for each in (one, other)]
