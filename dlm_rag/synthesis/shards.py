"""The folder of rows: a journal while they are made, then files to train on, whatever is killed in between.

    .journal.jsonl       one line a source, once it is decided what becomes of it; gone when all is written
    rows-00000.parquet   the rows to train on, in the order of their sources
    held_out/            the others, where there are any
    rows.json            settings, stamp, counts
    README.md            the card

A line of the journal stands for a source as a whole: a kill loses what was not written yet, and the same
command makes just that. The files are made of the journal alone, in the order of the sources, so that they
are the same bytes whatever was stopped and in whatever order the sources were done.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from dlm_rag.config import SynthesisConfig
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
from dlm_rag.files.paths import make_folder, resolve_path_inside, write_text_atomic
from dlm_rag.progress import report_progress
from dlm_rag.synthesis.dataset_card import render_dataset_card
from dlm_rag.synthesis.dedup import DuplicateFilter

JOURNAL, NOTE, CARD, PARTS, HELD_OUT, LOCK = (
    ".journal.jsonl", "rows.json", "README.md", ".parts", "held_out", "synthesis.lock",
)  # fmt: skip
# Columns in the words of Arrow: of all rows, of questions, of texts.
_ORIGIN_COLUMNS = {
    "source_ids": "list", "template": "string", "filters": "list", "model": "string", "settings": "string",
    "finish_reason": "string", "prompt_tokens": "int64", "response_tokens": "int64",
}  # fmt: skip
QUESTION_COLUMNS = {
    "id": "string", "question": "string", "golden_answers": "list", "supporting_ids": "list",
    "hops": "int64", "response": "string", **_ORIGIN_COLUMNS,
}  # fmt: skip
TEXT_COLUMNS = {"id": "string", "title": "string", "text": "string", **_ORIGIN_COLUMNS}
FLUSH_BLOCK_ROWS = 10_000  # rows in memory
if TYPE_CHECKING:
    from filelock import FileLock

    DatasetRow = dict[str, Any]
else:  # as a line of the journal has it
    KINDS = {"string": str | None, "int64": int | None, "list": list[str] | None}
    COLUMNS = QUESTION_COLUMNS | TEXT_COLUMNS
    FIELDS = {name: KINDS[kind] for name, kind in COLUMNS.items()} | {"held_out": bool}
    DatasetRow = TypedDict("DatasetRow", FIELDS, total=False)


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
    """What rows.json says; `complete` once every source is decided and its rows are in `files`."""

    depends_on: dict[str, Any]
    stamp: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    energy: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
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
        self._journal, self._note, self._parts = folder / JOURNAL, folder / NOTE, folder / PARTS
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
        for path in (self._journal, self._note, self._parts, self.folder / CARD, self.folder / HELD_OUT):
            if path.is_symlink():
                raise ConfigError(f"{path} is a link, and what it leads to would be written: take it away")
        self.complete = found.complete
        self._written = {self._path(name) for name in found.files}

    def _path(self, name: str) -> Path:
        return resolve_path_inside(self.folder, name, str(self._note), ConfigError)

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
        self, config: SynthesisConfig, columns: dict[str, str], complete: bool = True
    ) -> dict[str, int]:
        """Writes the files and the card, and then that they are written; returns the counts.

        complete: whether every source is decided. Until then the journal stays, and the files are written
        again by the run that resumes.
        """
        self._file.append()  # it may have been taken away
        counts: Counter[str] = Counter(sources=len(self.done))
        names = self._write_shards(config, columns, counts)
        homes = {name: self._path(name) for name in names}
        for stale in self._written - {*homes.values()}:
            stale.unlink(missing_ok=True)
        for name, home in homes.items():
            home.parent.mkdir(exist_ok=True)
            (self._parts / name).replace(home)
        ordered = dict(sorted(counts.items()))
        note = self._write_note(counts=ordered, files=names)
        write_text_atomic(self.folder / CARD, render_dataset_card(self.folder, ordered, note))
        if complete:
            self._write_note(complete=True)
            self._clear()
        return ordered

    def _write_shards(
        self, config: SynthesisConfig, columns: dict[str, str], counts: "Counter[str]"
    ) -> list[str]:
        """Writes and counts the rows that are kept, `shard_rows` a file; the names of the files."""
        shutil.rmtree(self._parts, ignore_errors=True)
        (self._parts / HELD_OUT).mkdir(parents=True)
        waiting: dict[str, list[dict[str, Any]]] = {"": [], f"{HELD_OUT}/": []}
        names: dict[str, list[str]] = {side: [] for side in waiting}

        def write_waiting(side: str) -> None:
            names[side].append(f"{side}rows-{len(names[side]):05d}.{config.format}")
            write_shard(self._parts / names[side][-1], waiting[side], columns)
            waiting[side].clear()

        duplicates = DuplicateFilter(config.dedup_threshold, config.decontaminate_against)
        with report_progress("writing rows", len(self.done)) as advance:
            blocks = self._iterate_row_blocks(counts, advance)
            for row, reason in (pair for rows in blocks for pair in duplicates.filter_rows(rows)):
                if reason:
                    counts[f"left out: {reason}"] += 1
                    continue
                held_out = row.get("held_out", False)
                counts[f"{'held out' if held_out else 'rows'}: {row.get('template')}"] += 1
                side = f"{HELD_OUT}/" if held_out else ""
                waiting[side].append({name: (self._common | row).get(name) for name in columns})
                if len(waiting[side]) == config.shard_rows:
                    write_waiting(side)
        for side, rows in waiting.items():
            if rows:
                write_waiting(side)
        return [name for side in names.values() for name in side]

    def _iterate_row_blocks(self, counts: "Counter[str]", advance: Any) -> Iterator[list[dict[str, Any]]]:
        """The rows in the order of their sources, some thousand at a time."""
        starts: list[tuple[int, int]] = []  # place of a source, where its line begins
        block: list[dict[str, Any]] = []
        with self._journal.open("rb") as file:
            while line := file.readline():
                starts.append((json.loads(line)["place"], file.tell() - len(line)))
            for _, start in sorted(starts):
                file.seek(start)
                outcome = json.loads(file.readline())
                for kind, key in (("left out", "dropped"), ("spent", "spent")):
                    counts.update({f"{kind}: {name}": n for name, n in outcome.get(key, {}).items()})
                block += outcome["rows"]
                if len(block) >= FLUSH_BLOCK_ROWS:
                    yield block
                    block = []
                advance(1)
        yield block

    def _clear(self) -> None:
        """Takes away what a folder that is complete needs no more."""
        shutil.rmtree(self._parts, ignore_errors=True)
        for path in self.folder.glob(".part-*"):  # of a note that a kill has cut short
            path.unlink()
        self._journal.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives the folder back."""
        self._file.close()
        if self._lock is not None:
            release_file_lock(self._lock)
            self._lock = None


def write_shard(path: Path, rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """A file of rows, all with the same columns, in the form that its suffix names."""
    if path.suffix == ".jsonl":
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_text("".join(lines), encoding="utf-8")
        return
    import pyarrow
    from pyarrow import parquet

    kinds = {"list": pyarrow.list_(pyarrow.string())}
    schema = pyarrow.schema([(name, kinds.get(kind) or kind) for name, kind in columns.items()])
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)


def check_synthesis_packages(config: SynthesisConfig) -> None:
    """Raises `ConfigError` where a package that the settings need is not installed."""
    needs = {
        "pyarrow": (config.format == "parquet", "synthesis.format=jsonl"),
        "datasketch": (config.dedup_threshold is not None, "synthesis.dedup_threshold=null"),
    }
    for package, (needed, remedy) in needs.items():
        try:
            if needed:
                import_module(package)
        except ImportError:
            raise ConfigError(
                f"{package} is not installed: `pip install 'dlm_rag[synthesis]'`, or set {remedy}"
            ) from None
