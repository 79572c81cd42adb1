"""Records from files as people hand them in, one by one, each with its place for error messages.

Read are JSON lines, JSON (an array, or an object that holds one list of objects), CSV and TSV with a
header, and Parquet, each also gzipped. What a file is shows in its first bytes; only CSV and TSV need
their suffix. A file is never in memory as a whole.
"""

import csv
import gzip
import io
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from dlm_rag.errors import UserError, nearest
from dlm_rag.jsonl import DECODER, decode_line, is_blank, lines, not_json, parse_object, reject_halves
from dlm_rag.progress import progress

FORMS = (
    "JSON lines (.jsonl), JSON (.json), CSV (.csv), TSV (.tsv) or Parquet (.parquet), each also gzipped "
    "(.gz); a corpus may be a folder of .txt and .md files"
)
# The names that a field goes by; the first that is there counts.
ALIASES = {
    "id": ("id", "_id"),
    "question": ("question", "text"),  # BEIR's queries
    "golden_answers": ("golden_answers", "answers", "answer"),
    "supporting_ids": ("supporting_ids", "supporting_docs"),
    "contents": ("contents", "text"),
}
PEEK = 2**20  # bytes that are looked at to tell forms apart
CHUNK = 2**18  # characters of a JSON document read at a time

Record = tuple[str, dict[str, Any]]  # its place, its fields
Reader = Callable[[IO[bytes], str, type[UserError]], Iterator[Record]]


def field_of(record: dict[str, Any], name: str) -> tuple[str, Any]:
    """The name that a field goes by in a record, and its value; its first name and None where it is not."""
    found = next((alias for alias in ALIASES[name] if record.get(alias) is not None), name)
    return found, record.get(found)


def id_of(record: dict[str, Any], what: str, place: str, error: type[UserError]) -> str:
    """The id of a record as text; raises `error` unless it is a text that is not blank, or an integer."""
    name, value = field_of(record, "id")
    if value is None:
        raise error(f"{place}: the {what} has no 'id'{nearest('id', record)}")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise error(f"{place}: the '{name}' of the {what} must be a text that is not empty, or an integer")
    return value


def expand(path: str | Path, error: type[UserError]) -> Path:
    """The path with `~` read as a home folder; raises `error` where that, or a path, is none."""
    try:
        found = Path(path).expanduser()
        found.exists()
    except RuntimeError:
        raise error(f"'{path}': there is no such home folder; write the whole path") from None
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or "no path"
        raise error(f"'{str(path)[:60]}' cannot be read ({reason})") from None
    return found


def find_file(path: str | Path, what: str, error: type[UserError]) -> Path:
    """The path of a regular file; raises `error` for anything else."""
    found = expand(path, error)
    if not found.exists():
        raise error(f"{what} '{path}' was not found")
    if not found.is_file():
        kind = "a folder" if found.is_dir() else "a pipe or a device, and it is read more than once"
        raise error(f"{what} '{path}' is {kind}: name a file")
    return found


def read_records(path: Path, error: type[UserError], plain: str | None = None) -> Iterator[Record]:
    """The records of a file, in order. Tables without a column of ids have their rows numbered.

    plain: the field that each line of plain text becomes, if that is a form too; ids are q1, q2, ...
    Raises `error`, which names the file and the line, item or row.
    """
    try:
        size, at = path.stat().st_size, 0
        with (
            path.open("rb", buffering=PEEK) as file,
            progress(f"reading {path.name}", size, "bytes") as advance,
        ):
            for record in records_in(file, path, error, plain):
                yield record
                advance(-at + (at := file.tell()))
    except OSError as problem:
        raise error(f"{path} cannot be read ({problem.strerror or problem})") from None


def records_in(
    file: IO[bytes], path: Path, error: type[UserError], plain: str | None = None
) -> Iterator[Record]:
    """`read_records` of an open file that may be a pipe."""
    opened = _unzipped(file)
    try:
        yield from _form(opened, path, error, plain)(opened, str(path), error)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise error(f"{path} is a broken gzip file: compress it anew") from None


def is_json_lines(path: Path, error: type[UserError]) -> bool:
    """Whether a file is JSON lines as they are: not gzipped, no other form."""
    try:
        with path.open("rb", buffering=PEEK) as file:
            return _unzipped(file) is file and _form(file, path, error, None) is _json_lines
    except OSError as problem:
        raise error(f"'{path}' cannot be read ({problem.strerror})") from None


def _unzipped(file: Any) -> Any:
    if file.peek(2)[:2] != b"\x1f\x8b":
        return file
    return io.BufferedReader(gzip.GzipFile(fileobj=file), PEEK)


def suffix_of(path: Path) -> str:
    """The suffix in small letters, that of gzip left out."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _form(file: Any, path: Path, error: type[UserError], plain: str | None) -> Reader:
    """How the file is read."""
    suffix, head = suffix_of(path), file.peek(PEEK)
    if head[:4] == b"PAR1" or suffix == ".parquet":
        return _parquet_rows
    if suffix in (".csv", ".tsv"):
        return partial(_table_rows, delimiter="," if suffix == ".csv" else "\t")
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] == b"[":
        return _json_items
    if suffix in (".jsonl", ".ndjson") or not text:
        return _json_lines
    if suffix == ".json":
        first, _, rest = text.partition(b"\n")
        in_lines = first.rstrip().endswith(b"}") and rest.lstrip()[:1] == b"{"
        return _json_lines if in_lines else _json_items
    if text[:1] == b"{":
        return _json_lines
    if plain is not None and suffix in ("", ".txt"):
        return partial(_plain_lines, field=plain)
    raise error(f"{path} is in no form that is read: {FORMS}")


def _json_lines(file: IO[bytes], path: str, error: type[UserError]) -> Iterator[Record]:
    for number, line in enumerate(lines(file, path, error), start=1):
        if not is_blank(line):
            place = f"{path}, line {number}"
            yield place, parse_object(line, place, error)


def _plain_lines(file: IO[bytes], path: str, error: type[UserError], field: str) -> Iterator[Record]:
    count = 0
    for number, line in enumerate(lines(file, path, error), start=1):
        if not is_blank(line):
            count += 1
            place = f"{path}, line {number}"
            yield place, {"id": f"q{count}", field: decode_line(line, place, error).strip()}


def _table_rows(file: IO[bytes], path: str, error: type[UserError], delimiter: str) -> Iterator[Record]:
    """The rows below a header; an empty cell is a field that is not there."""
    csv.field_size_limit(2**31 - 1)  # `lines` has the limit
    text = (
        decode_line(line, f"{path}, line {n}", error)
        for n, line in enumerate(lines(file, path, error), start=1)
    )
    reader, before, header = csv.reader(text, delimiter=delimiter, strict=True), 0, list[str]()
    try:
        for cells in reader:
            place, before = f"{path}, line {before + 1}", reader.line_num
            if not cells:
                continue
            if not header:
                header, number = cells, 0
                if twice := [name for name in header if name and header.count(name) > 1]:
                    raise error(f"{place}: the header has two columns '{twice[0]}': rename one")
                continue
            if len(cells) != len(header):
                raise error(f"{place}: the row has {len(cells)} cells, the header {len(header)}")
            number += 1
            row = {name: cell for name, cell in zip(header, cells, strict=True) if name and cell}
            yield place, _numbered(row, header, number)
    except csv.Error as problem:
        raise error(
            f"{path}, line {before + 1}: the row cannot be read ({problem}); a cell that holds quotes "
            "stands in quotes, and each of its own is doubled"
        ) from None


def _parquet_rows(file: IO[bytes], path: str, error: type[UserError]) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise error("parquet needs pyarrow: install it with `pip install 'dlm_rag[parquet]'`") from None
    with tempfile.TemporaryFile() as copy:
        if isinstance(getattr(file, "raw", None), gzip.GzipFile) or not file.seekable():
            shutil.copyfileobj(file, copy)  # its end is read first
            file = copy
        try:
            batches = (batch.to_pylist() for batch in parquet.ParquetFile(file).iter_batches(1024))
            for number, row in enumerate(chain.from_iterable(batches), start=1):
                yield f"{path}, row {number}", _numbered(row, list(row), number)
        except (ArrowException, OSError, ValueError, OverflowError) as problem:
            raise error(f"{path} is not a parquet file ({problem})") from None


def _numbered(row: dict[str, Any], columns: list[str], number: int) -> dict[str, Any]:
    return row if {*ALIASES["id"]} & {*columns} else {"id": number, **row}


def _json_items(file: IO[bytes], path: str, error: type[UserError]) -> Iterator[Record]:
    """The items of an array, or of the one list of objects in an object; else the object itself."""
    text = _JsonText(file, path, error)
    if text.next() == "[":
        yield from text.records()
    else:
        yield from _json_object(text, path, error)
    if text.next():
        raise error(f"{path}, line {text.line}: the file goes on after its JSON: name JSON lines .jsonl")


def _json_object(text: "_JsonText", path: str, error: type[UserError]) -> Iterator[Record]:
    fields, lists, begun = dict[str, Any](), list[str](), text.line
    text.take("{")
    while text.next() != "}":
        line, key = text.line, text.value()
        text.take(":")
        if not isinstance(key, str) or key in fields or key in lists:
            raise error(f"{path}, line {line}: the key '{key}' is no text or occurs a second time")
        if text.next() != "[":
            fields[key] = text.value()
        elif text.next(after="[") != "{":
            fields[key] = [item for _, item in text.items()]
        else:
            lists.append(key)
            if len(lists) > 1:
                raise error(f"{path} holds two lists, '{lists[0]}' and '{key}': leave one")
            yield from text.records()
        if text.next() != "}":
            text.take(",")
    text.take("}")
    if not lists:
        yield f"{path}, line {begun}", fields


class _JsonText:
    """A JSON document read value by value; only the value that is read is in memory.

    `line` is that of the next character.
    """

    def __init__(self, file: IO[bytes], path: str, error: type[UserError]) -> None:
        self._file = io.TextIOWrapper(file, "utf-8-sig", newline="")
        self._path, self._error = path, error
        self._text, self._at, self.line = "", 0, 1

    def next(self, after: str = "") -> str:
        """The next character that is not white space, or the one behind `after`; "" at the end."""
        while True:
            at = self._skip(self._at)
            self._move(at)
            if after:
                at = self._skip(at + len(after))
            if at < len(self._text):
                return self._text[at]
            if not self._more():
                return ""

    def take(self, wanted: str) -> str:
        """Takes the next character, which must be one of `wanted`."""
        found = self.next()
        if not found or found not in wanted:
            raise self._bad(f"Expecting {' or '.join(map(repr, wanted))}")
        self._move(self._at + 1)
        return found

    def value(self) -> Any:
        """Takes the next value."""
        self.next()
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as problem:
                # Only at the end of what was read can more of it help, or within a text.
                cut = problem.pos >= len(self._text) - 16 or problem.msg.startswith("Unterminated")
                if not cut or not self._more():
                    raise self._bad(problem.msg) from None
                continue
            except (ValueError, RecursionError) as problem:
                raise self._bad(not_json(problem)) from None
            if end < len(self._text) or not self._more():  # else a number may go on
                if "\\ud" in self._text[self._at : end].lower():
                    reject_halves(value, f"{self._path}, line {self.line}", self._error)
                self._move(end)
                return value

    def items(self) -> Iterator[tuple[int, Any]]:
        """Takes an array: of each item the line in which it begins, and the item."""
        self.take("[")
        if self.next() == "]":
            self.take("]")
            return
        while True:
            self.next()
            line = self.line
            yield line, self.value()
            if self.take(",]") == "]":
                return

    def records(self) -> Iterator[Record]:
        """Takes an array of objects."""
        for number, (line, item) in enumerate(self.items(), start=1):
            place = f"{self._path}, item {number} (line {line})"
            if not isinstance(item, dict):
                raise self._error(f"{place} is not a JSON object")
            yield place, item

    def _skip(self, at: int) -> int:
        while at < len(self._text) and self._text[at] in " \t\r\n":
            at += 1
        return at

    def _move(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def _more(self) -> bool:
        rest = self._text[self._at :]
        if len(rest) > 2**28:
            raise self._bad("one value of more than 256 MiB")
        try:
            more = self._file.read(max(CHUNK, len(rest)))
        except UnicodeDecodeError:
            raise self._error(f"{self._path} is not UTF-8, at line {self.line} or later") from None
        self._text, self._at = rest + more, 0
        return bool(more)

    def _bad(self, reason: str) -> UserError:
        return self._error(f"{self._path}, line {self.line}: the file is not JSON ({reason})")
