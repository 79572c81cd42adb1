"""The folder of rows: a journal while they are made, then files to train on, whatever is killed in between.

    .journal.jsonl       one line a source, once it is decided what becomes of it; gone when all is written
    rows.jsonl           the rows to train on, in the order of their sources
    held_out/rows.jsonl  the others, where there are any
    rows.json            settings, stamp, counts

A kill loses what was not written yet, and the same command makes just that. The files are made of the
journal alone, in the order of the sources, so that they are the same bytes whatever was stopped.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlm_rag.errors import ConfigError
from dlm_rag.files import journal
from dlm_rag.files.checked_json import read_json_or_empty, validate_json_value
from dlm_rag.files.paths import make_folder, open_atomic_file
from dlm_rag.questions import read_questions
from dlm_rag.text import split_words

JOURNAL, NOTE, ROWS, HELD_OUT, LOCK = (
    ".journal.jsonl", "rows.json", "rows.jsonl", "held_out", "synthesis.lock",
)  # fmt: skip
EVALUATION_NGRAM_WORDS = 12  # that a row may not share with an evaluation set
COLUMNS = (
    "id", "question", "golden_answers", "supporting_ids", "hops", "response", "source_ids", "template",
    "filters", "model", "settings",
)  # fmt: skip


@dataclass(frozen=True)
class SourceOutcome:
    """What became of a source: its place among all of them, its rows, and counts of what was left out.

    Rows that are not for training also have `held_out`.
    """

    place: int
    source: str
    rows: list[dict[str, Any]]
    counts: dict[str, int] = field(default_factory=dict)  # rows left out, tokens spent


@dataclass(frozen=True)
class RowsManifest:
    """What rows.json says; `complete` once every source is decided and its rows are written."""

    depends_on: dict[str, Any]
    stamp: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    complete: bool = False


class RowsFolder:
    """A folder that rows are made into; the constructor only reads.

    Raises `ConfigError` for a folder that is not this program's, or holds rows of other settings.
    """

    def __init__(self, folder: Path, depends_on: dict[str, Any], model: str = "") -> None:
        """depends_on: all that can change a row. model: who made the rows, for their column."""
        self.folder, self._depends_on = folder, depends_on
        digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
        self._common = {"model": model, "settings": digest}
        self._journal, self._note = folder / JOURNAL, folder / NOTE
        self._file, self._opened = journal.Journal(self._journal), ExitStack()
        self.done: set[str] = set()
        self._check()

    def _check(self) -> None:
        note = read_json_or_empty(self._note)
        try:
            names = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        except OSError as error:
            raise ConfigError(f"out={self.folder} cannot be a folder: {error.strerror}") from None
        # A kill may leave the lock, and the note while it was being written.
        foreign = sorted(name for name in names if name != LOCK and not name.startswith("."))
        if foreign and "depends_on" not in note:
            raise ConfigError(
                f"{self.folder} holds '{foreign[0]}', which is of no rows: name a new or empty folder"
            )
        whole = {"depends_on": self._depends_on} | note
        found = validate_json_value(RowsManifest, whole, str(self._note), ConfigError)
        journal.check_same_settings(found.depends_on, self._depends_on, f"out={self.folder} holds rows")
        for name in (JOURNAL, NOTE, ROWS, HELD_OUT, f"{HELD_OUT}/{ROWS}"):
            if (path := self.folder / name).is_symlink():
                raise ConfigError(f"{path} is a symbolic link, which is not written through: remove it")
        self.complete = found.complete

    def begin(self, stamp: dict[str, Any]) -> None:
        """Takes the folder for this process; `done` then names the sources that are decided."""
        make_folder(self.folder, "out=")
        lock = journal.acquire_file_lock(self.folder / LOCK, f"out={self.folder}")
        with ExitStack() as opened:
            opened.callback(journal.release_file_lock, lock)
            self._check()
            if self.complete:
                self._clear()
            else:
                if not self._note.exists():
                    self._write_note(stamp=stamp)
                self._journal.touch()
                # before: what is not ours is not cut
                self.done = {
                    read_outcome(line, place).source
                    for place, line in journal.read_json_lines(self._journal, ConfigError)
                }
                journal.repair_last_line(self._journal)
                opened.callback(self._file.close)
                self._file.open_existing()
            self._opened = opened.pop_all()

    def _write_note(self, **more: Any) -> None:
        note = read_json_or_empty(self._note) | {"depends_on": self._depends_on} | more
        journal.write_note(self._note, note)

    def append_outcome(self, outcome: SourceOutcome) -> None:
        """Appends a line to the journal, at once. Raises `RunError` where the disk is full."""
        assert outcome.source not in self.done
        with journal.explain_write_errors(self.folder):
            self._file.append(asdict(outcome))
        self.done.add(outcome.source)

    def finish(self, against: str | None, complete: bool = True) -> dict[str, int]:
        """Writes the files, and then that they are written; returns the counts.

        against: files of evaluation questions, by commas. complete: whether every source is decided. Until
        then the journal stays, and the files are written again by the run that resumes.
        """
        self._file.append()  # it may have been taken away
        counts: Counter[str] = Counter(sources=len(self.done))
        (self.folder / HELD_OUT).mkdir(exist_ok=True)
        homes = [self.folder / ROWS, self.folder / HELD_OUT / ROWS]
        with ExitStack() as stack:
            files = [
                stack.enter_context(stack.enter_context(open_atomic_file(home)).open("w", encoding="utf-8"))
                for home in homes
            ]
            for row in self._filter_rows(collect_evaluation_ngrams(against), counts):
                held_out = row.get("held_out", False)
                counts[f"{'held out' if held_out else 'rows'}: {row.get('template')}"] += 1
                line = {name: (self._common | row).get(name) for name in COLUMNS}
                files[held_out].write(json.dumps(line, ensure_ascii=False) + "\n")
        for home in homes:
            if not home.stat().st_size:
                home.unlink()
        ordered = dict(sorted(counts.items()))
        self._write_note(counts=ordered, complete=complete)
        if complete:
            self._clear()
        return ordered

    def _filter_rows(
        self, evaluated: set[tuple[str, ...]], counts: "Counter[str]"
    ) -> Iterator[dict[str, Any]]:
        """Yields the rows that are kept, in the order of their sources, and counts the others.

        Left out are those that share words with an evaluation set, and a question that a row of the same
        template asks already: a sentence completed and one asked about are two tasks.
        """
        lengths, seen = {len(gram) for gram in evaluated}, set[tuple[str, str]]()
        with self._journal.open(encoding="utf-8") as file:
            outcomes = sorted((json.loads(line) for line in file), key=lambda outcome: outcome["place"])
        for outcome in outcomes:
            counts.update(outcome["counts"])
            for row in outcome["rows"]:
                said = split_words(row["question"])
                task = row["template"], " ".join(said)
                if any(gram in evaluated for size in lengths for gram in _iterate_ngrams(said, size)):
                    counts["left out: in an evaluation set"] += 1
                elif task in seen:
                    counts["left out: equal to an earlier row"] += 1
                else:
                    seen.add(task)
                    yield row

    def _clear(self) -> None:
        """Removes what a folder that is complete needs no more."""
        held_out = self.folder / HELD_OUT
        for path in (*self.folder.glob(".part-*"), *held_out.glob(".part-*")):
            path.unlink()  # of a file that a kill has cut short
        if held_out.is_dir() and not any(held_out.iterdir()):
            held_out.rmdir()
        self._journal.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives the folder back."""
        self._opened.close()


def read_outcome(line: Any, place: str) -> SourceOutcome:
    """Returns a line of the journal; raises `ConfigError` for one that is damaged."""
    outcome = validate_json_value(SourceOutcome, line, place, ConfigError)
    if not all(isinstance(row.get(name), str) for row in outcome.rows for name in ("question", "template")):
        raise ConfigError(f"{place}: a row has no question or no template")
    return outcome


def collect_evaluation_ngrams(against: str | None) -> set[tuple[str, ...]]:
    """Returns runs of `EVALUATION_NGRAM_WORDS` words of questions, a shorter question whole.

    against: files of questions, by commas. Raises `QuestionError`.
    """
    found: set[tuple[str, ...]] = set()
    for path in against.split(",") if against else []:
        for question in read_questions(path.strip()):
            said = split_words(question.question)
            found.update(_iterate_ngrams(said, min(EVALUATION_NGRAM_WORDS, len(said))))
    return found - {()}


def _iterate_ngrams(said: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(said[n : n + size]) for n in range(len(said) - size + 1))
