"""The answers file: one line a question, appended as it finishes; a stopped run goes on from there."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from dlm_rag.data.questions import Question
from dlm_rag.decode.rollout import Rollout
from dlm_rag.errors import ConfigError

# Settings that cannot change an answer.
_FREE = set("questions out trace device attention batch_size index_folder dense_batch_size".split())


class AnswersFile:
    """Answers (and traces) on disk. `done` holds the ids that earlier runs of the command answered.

    A line that was cut off by a kill is taken away. Beside the answers lies `<name>.run.json` with
    the stamp of the run that began the file.
    """

    def __init__(self, out: Path, trace: Path | None = None) -> None:
        self._out, self._trace = out, trace
        records = _complete_lines(out)
        self._answered = {record["id"]: record.get("question") for record in records}
        if trace is not None:
            kept = [record for record in _complete_lines(trace) if record["id"] in self._answered]
            _rewrite(trace, kept)

    @property
    def done(self) -> set[str]:
        return set(self._answered)

    def remaining(self, questions: Sequence[Question]) -> list[Question]:
        """The questions without an answer here; raises `ConfigError` if an id has another question's."""
        for question in questions:
            if self._answered.get(question.id, question.question) != question.question:
                raise ConfigError(
                    f"out={self._out} holds the answer to another question with the id "
                    f"'{question.id}': choose another --out"
                )
        return [question for question in questions if question.id not in self._answered]

    def check_settings(self, config: dict[str, Any], fingerprint: str) -> None:
        """Raises `ConfigError` naming the setting in which this run differs from the file's."""
        path = self._stamp_path
        if not self._answered or not path.is_file():
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        if before["corpus_fingerprint"] != fingerprint:
            raise ConfigError(f"out={self._out} holds answers over another corpus: choose another --out")
        then, now = _flatten(before["config"]), _flatten(config)
        for key, value in now.items():
            if key.rpartition(".")[2] not in _FREE and then.get(key) != value:
                raise ConfigError(
                    f"out={self._out} holds answers with {key}={then.get(key)}, this run asks for "
                    f"{value}: choose another --out"
                )

    def begin(self, stamp: dict[str, Any]) -> None:
        """Writes the stamp, unless it continues a file that has one."""
        if not (self._answered and self._stamp_path.is_file()):
            text = json.dumps(stamp, indent=2, ensure_ascii=False)
            self._stamp_path.write_text(f"{text}\n", encoding="utf-8")

    def append(self, rollout: Rollout) -> None:
        """Adds a finished rollout: first its trace, then its answer, which marks it as done."""
        if self._trace is not None:
            _append(self._trace, rollout.trace_record())
        _append(self._out, rollout.answer_record())
        self._answered[rollout.id] = rollout.question

    @property
    def _stamp_path(self) -> Path:
        return self._out.with_name(f"{self._out.name}.run.json")


def write_line(stream: IO[str], record: dict[str, Any]) -> None:
    """One JSON line, out at once."""
    stream.write(json.dumps(record, ensure_ascii=False) + "\n")
    stream.flush()


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        write_line(file, record)


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON lines file, after cutting off a last line that has no end."""
    if not path.is_file():
        return []
    whole, _, rest = path.read_bytes().rpartition(b"\n")
    if rest:
        os.truncate(path, len(whole) + 1 if whole else 0)
    records = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            record = json.loads(line)
            record["id"]
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"{path}, line {number} is no line of this program's: choose another file"
            ) from None
        records.append(record)
    return records


def _rewrite(path: Path, records: list[dict[str, Any]]) -> None:
    scratch = path.with_name(f"{path.name}.part")
    with scratch.open("w", encoding="utf-8") as file:
        for record in records:
            write_line(file, record)
    scratch.replace(path)


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
