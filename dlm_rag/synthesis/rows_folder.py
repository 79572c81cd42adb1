"""The folder of rows: a journal while they are made, then files to train on, whatever is killed in between.

    .journal.jsonl       one line a source, once it is decided what becomes of it; gone when all is written
    rows.jsonl           the rows to train on, in the order of their sources
    held_out/rows.jsonl  the others, where there are any
    rows.json            settings, stamp, counts
    README.md            the card

A line of the journal stands for a source as a whole: a kill loses what was not written yet, and the same
command makes just that. The files are made of the journal alone, in the order of the sources, so that they
are the same bytes whatever was stopped and in whatever order the sources were done.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from dlm_rag.config import SynthesisConfig
from dlm_rag.energy.meter import format_energy, summarise_energy
from dlm_rag.errors import ConfigError
from dlm_rag.files.checked_json import read_json_or_empty, validate_json_value
from dlm_rag.files.journal import (
    Journal,
    acquire_file_lock,
    append_energy,
    check_same_settings,
    explain_write_errors,
    read_json_lines,
    release_file_lock,
    repair_last_line,
    write_note,
)
from dlm_rag.files.paths import make_folder, open_atomic_file, write_text_atomic
from dlm_rag.progress import track_progress
from dlm_rag.questions import read_questions
from dlm_rag.text import split_words

JOURNAL, NOTE, CARD, ROWS, HELD_OUT, LOCK = (
    ".journal.jsonl", "rows.json", "README.md", "rows.jsonl", "held_out", "synthesis.lock",
)  # fmt: skip
EVALUATION_NGRAM_WORDS = 12  # that a row may not share with an evaluation set
# Columns of all rows, of questions, of texts.
_ORIGIN_COLUMNS = {
    "source_ids": list[str], "template": str, "filters": list[str], "model": str, "settings": str,
    "finish_reason": str, "prompt_tokens": int, "response_tokens": int,
}  # fmt: skip
QUESTION_COLUMNS = {
    "id": str, "question": str, "golden_answers": list[str], "supporting_ids": list[str],
    "hops": int, "response": str, **_ORIGIN_COLUMNS,
}  # fmt: skip
TEXT_COLUMNS = {"id": str, "title": str, "text": str, **_ORIGIN_COLUMNS}
TEMPLATE_DESCRIPTIONS = {
    "trace": "questions with a reasoning trace that was decoded, its supporting_ids the passages it cites",
    "what": "what a passage says that its title is",
    "complete": "a sentence of a passage with a name left out, to be completed",
    "chain2": "a sentence with the name of another passage left out, asked what that is",
    "chain3": "the same, one passage further on",
    "paraphrase": "questions in other words, all else as it was",
    "faq": "passages as questions and answers",
    "table": "passages as a table",
}
if TYPE_CHECKING:
    from filelock import FileLock

    DatasetRow = dict[str, Any]
else:  # as a line of the journal has it
    FIELDS = {name: kind | None for name, kind in (QUESTION_COLUMNS | TEXT_COLUMNS).items()}
    DatasetRow = TypedDict("DatasetRow", FIELDS | {"held_out": bool}, total=False)


@dataclass(frozen=True)
class SourceOutcome:
    """What became of a source: its place among all of them, its rows, what was left out and what it took.

    Rows that are not for training also have `held_out`.
    """

    place: int
    source: str
    rows: list[DatasetRow]
    dropped: dict[str, int] = field(default_factory=dict)  # rows by reason
    spent: dict[str, int] = field(default_factory=dict)  # tokens, requests


@dataclass(frozen=True)
class RowsManifest:
    """What rows.json says; `complete` once every source is decided and its rows are written."""

    depends_on: dict[str, Any]
    stamp: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    energy: list[dict[str, Any]] = field(default_factory=list)
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
        self._lock: FileLock | None = None
        self._file = Journal(self._journal)
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
        what = f"out={self.folder} holds rows"
        check_same_settings(found.depends_on, self._depends_on, what)
        for name in (JOURNAL, NOTE, CARD, ROWS, HELD_OUT, f"{HELD_OUT}/{ROWS}"):
            if (path := self.folder / name).is_symlink():
                raise ConfigError(f"{path} is a link, and what it leads to would be written: take it away")
        self.complete = found.complete

    def begin(self, stamp: dict[str, Any]) -> None:
        """Takes the folder for this process; `done` then names the sources that are decided."""
        make_folder(self.folder, "out=")
        self._lock = acquire_file_lock(self.folder / LOCK, f"out={self.folder}")
        try:
            self._check()
            if self.complete:
                self._clear()
                return
            if not self._note.exists():
                self._write_note(stamp=stamp)
            self._journal.touch()
            # before: what is not ours is not cut
            self.done = {
                validate_json_value(SourceOutcome, line, place, ConfigError).source
                for place, line in read_json_lines(self._journal, ConfigError)
            }
            repair_last_line(self._journal)
            self._file.open_existing()
        except BaseException:
            self.close()
            raise

    def _write_note(self, **more: Any) -> dict[str, Any]:
        note = read_json_or_empty(self._note) | {"depends_on": self._depends_on} | more
        write_note(self._note, note)
        return note

    def append_outcome(self, outcome: SourceOutcome) -> None:
        """One line of the journal, out at once. Raises `RunError` where the disk is full."""
        assert outcome.source not in self.done
        with explain_write_errors(self.folder):
            self._file.append(asdict(outcome))
        self.done.add(outcome.source)

    def append_energy(self, part: dict[str, Any] | None) -> None:
        """Adds to the note what a part of the run has drawn; None: nobody asked."""
        append_energy(self._note, part)

    def finish(
        self, config: SynthesisConfig, columns: dict[str, Any], complete: bool = True
    ) -> dict[str, int]:
        """Writes the files and the card, and then that they are written; returns the counts.

        complete: whether every source is decided. Until then the journal stays, and the files are written
        again by the run that resumes.
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
            for row in self._filter_rows(config.decontaminate_against, counts):
                held_out = row.get("held_out", False)
                counts[f"{'held out' if held_out else 'rows'}: {row.get('template')}"] += 1
                line = {name: (self._common | row).get(name) for name in columns}
                files[held_out].write(json.dumps(line, ensure_ascii=False) + "\n")
        for home in homes:
            if not home.stat().st_size:
                home.unlink()
        ordered = dict(sorted(counts.items()))
        note = self._write_note(counts=ordered)
        write_text_atomic(self.folder / CARD, render_dataset_card(self.folder, ordered, note))
        if complete:
            self._write_note(complete=True)
            self._clear()
        return ordered

    def _filter_rows(self, against: str | None, counts: "Counter[str]") -> Iterator[dict[str, Any]]:
        """Yields the rows that are kept, in the order of their sources, and counts the others.

        Rows are compared by their question, or their text where they have none, with rows of the same
        template: the same sentence completed and asked about are two tasks.
        """
        evaluated = collect_evaluation_ngrams(against)
        lengths, seen = {len(gram) for gram in evaluated}, set[tuple[str, str]]()
        for outcome in self._iterate_outcomes():
            for kind, key in (("left out", "dropped"), ("spent", "spent")):
                counts.update({f"{kind}: {name}": n for name, n in outcome.get(key, {}).items()})
            for row in outcome["rows"]:
                said = split_words(row.get("question") or row.get("text") or "")
                task = row.get("template", ""), " ".join(said)
                if any(gram in evaluated for size in lengths for gram in _iterate_ngrams(said, size)):
                    counts["left out: in an evaluation set"] += 1
                elif task in seen:
                    counts["left out: equal to an earlier row"] += 1
                else:
                    seen.add(task)
                    yield row

    def _iterate_outcomes(self) -> Iterator[dict[str, Any]]:
        """Yields the lines of the journal in the order of their sources."""
        starts: list[tuple[int, int]] = []  # place of a source, where its line begins
        with self._journal.open("rb") as file:
            while line := file.readline():
                starts.append((json.loads(line)["place"], file.tell() - len(line)))
            for _, start in track_progress(sorted(starts), "writing rows"):
                file.seek(start)
                yield json.loads(file.readline())

    def _clear(self) -> None:
        """Takes away what a folder that is complete needs no more."""
        for path in (*self.folder.glob(".part-*"), *(self.folder / HELD_OUT).glob(".part-*")):
            path.unlink()  # of a file that a kill has cut short
        if (self.folder / HELD_OUT).is_dir() and not any((self.folder / HELD_OUT).iterdir()):
            (self.folder / HELD_OUT).rmdir()
        self._journal.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives the folder back."""
        self._file.close()
        if self._lock is not None:
            release_file_lock(self._lock)
            self._lock = None


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


def render_dataset_card(folder: Path, counts: dict[str, int], note: dict[str, Any]) -> str:
    """Returns the Markdown of README.md: what is in a folder of rows, how it was made and is used."""
    stamp, parts = note.get("stamp", {}), note.get("energy", [])
    made, rest = [], []
    for key, n in counts.items():
        side, _, name = key.partition(": ")
        if side in ("rows", "held out"):
            made.append(f"| {name} | {side} | {n:,} | {TEMPLATE_DESCRIPTIONS.get(name, '')} |")
        elif side in ("left out", "spent"):
            rest.append(f"\n| {key} | {n:,} |")
    energy = format_energy(summarise_energy(parts), str(parts[-1].get("reason"))) if parts else ""
    depends_on = json.dumps(note["depends_on"], indent=2, ensure_ascii=False).replace("\n", "\n    ")
    return f"""\
# {folder.resolve().name}: rows to train on

Made by `{stamp.get("command", "dlm-rag synthesize")}` of {counts["sources"]:,} sources, \
{stamp.get("date", "")}, commit {stamp.get("commit", "unknown")}.

| template | for | rows | what it is |
|---|---|---|---|
{chr(10).join(made) or "| none | | 0 | |"}

`rows` are to be trained on; `held out` ones are in held_out/: no passage of theirs is in a row.

| left out, or spent | |
|---|---|{"".join(rest)}

{energy and f"{energy}.{chr(10) * 2}"}    dlm-rag train data.questions={folder} data.corpus=FILE ...

What the rows depend on:

    {depends_on}
"""
