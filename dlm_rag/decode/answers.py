"""The answers file: one line a question, appended as it finishes; a stopped run goes on from there."""

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from dlm_rag.decode.rollout import Rollout
from dlm_rag.errors import ConfigError
from dlm_rag.questions import Question


class AnswersFile:
    """Answers (and traces) on disk, each with a stamp beside it: `<name>.run.json`.

    The constructor only reads; `begin` is the first to write. Raises `ConfigError` for files that
    are not this program's, or answers and traces that do not belong together.
    """

    def __init__(self, out: Path, trace: Path | None = None) -> None:
        self._out, self._trace = out, trace
        self._lock = FileLock(f"{out}.lock", timeout=0)
        self._stamp_path = out.with_name(f"{out.name}.run.json")
        self._stamp = self._read_stamp()
        records = _whole_lines(out)
        self._answered = {r["id"]: r["question"] for r in records if not r.get("error")}
        self._failed = {record["id"] for record in records if record.get("error")}
        if trace is not None:
            self._check_trace(trace, list(self._answered))

    def _read_stamp(self) -> dict[str, Any] | None:
        if not self._out.is_file() or not self._out.stat().st_size:
            return None
        try:
            stamp = json.loads(self._stamp_path.read_text(encoding="utf-8"))
            stamp["answers_depend_on"]
            return stamp
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"out={self._out} holds something without a readable {self._stamp_path.name} beside it, "
                "so it is not known what answered: choose another --out"
            ) from None

    def _check_trace(self, trace: Path, answered: list[str]) -> None:
        traced = [i for record in _whole_lines(trace) if (i := record["id"]) not in self._failed]
        # A trace is written before its answer: a kill in between leaves one more of them.
        if traced[: len(answered)] != answered or len(traced) > len(answered) + 1:
            raise ConfigError(
                f"trace={trace} does not hold the traces of out={self._out}, one for each answer: choose "
                "other files for both"
            )

    def remaining(self, questions: Sequence[Question]) -> list[Question]:
        """The questions without an answer here, those that failed among them.

        Raises `ConfigError` if an id has another question's answer.
        """
        for question in questions:
            if self._answered.get(question.id, question.question) != question.question:
                raise ConfigError(
                    f"out={self._out} holds the answer to another question with the id "
                    f"'{question.id}': choose another --out"
                )
        return [question for question in questions if question.id not in self._answered]

    def check_same(self, depends_on: dict[str, Any]) -> None:
        """Raises `ConfigError` naming what this run does otherwise than the one that began the file."""
        then = self._stamp["answers_depend_on"] if self._stamp else depends_on
        for key in sorted({*then, *depends_on}):
            if then.get(key) != depends_on.get(key):
                raise ConfigError(
                    f"out={self._out} holds answers with {key}={then.get(key)}, this run has "
                    f"{depends_on.get(key)}: choose another --out"
                )

    def begin(self, stamp: dict[str, Any]) -> None:
        """Takes the file for this process and writes the stamp.

        Takes away what a kill left half-written and the lines of questions that failed: they are
        asked again.
        """
        try:
            self._lock.acquire()
        except Timeout:
            raise ConfigError(f"out={self._out} is being written by another process") from None
        for path in (self._trace, self._out):
            if path is not None:
                _drop_lines(path, self._failed)
                _cut_after_lines(path, len(self._answered))
        if self._stamp is None:
            scratch = self._stamp_path.with_name(f"{self._stamp_path.name}.part")
            scratch.write_text(json.dumps(stamp, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            scratch.replace(self._stamp_path)

    def append(self, rollout: Rollout) -> None:
        """Adds a finished rollout: first its trace, then its answer, which marks it as done."""
        if self._trace is not None:
            _append(self._trace, rollout.trace_record())
        _append(self._out, rollout.answer_record())

    def close(self) -> None:
        """Gives the file back."""
        self._lock.release()
        Path(self._lock.lock_file).unlink(missing_ok=True)


def write_line(stream: IO[str], record: dict[str, Any]) -> None:
    """One JSON line, out at once."""
    stream.write(json.dumps(record, ensure_ascii=False) + "\n")
    stream.flush()


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        write_line(file, record)


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of ours, without a last line that has no end."""
    if not path.is_file():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    records = []
    for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
        try:
            record = json.loads(line)
            record["id"], record["question"], record["response"]
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"{path}, line {number} is no line of this program's: choose another file"
            ) from None
        records.append(record)
    return records


def _drop_lines(path: Path, ids: Collection[str]) -> None:
    """Writes the file anew without the records of these ids; a line that has no end stays."""
    if not ids or not path.is_file():
        return
    whole, _, rest = path.read_bytes().rpartition(b"\n")
    kept = [line for line in whole.split(b"\n") if json.loads(line)["id"] not in ids]
    scratch = path.with_name(f"{path.name}.part")
    scratch.write_bytes(b"".join(line + b"\n" for line in kept) + rest)
    scratch.replace(path)


def _cut_after_lines(path: Path, count: int) -> None:
    if not path.is_file():
        return
    with path.open("rb") as file:
        end = sum(len(file.readline()) for _ in range(count))
    os.truncate(path, end)
