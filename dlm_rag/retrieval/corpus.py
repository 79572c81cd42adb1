"""Corpora: JSON lines of passages, read as a stream once, then row by row; other forms are made such."""

import json
import logging
import os
import re
import reprlib
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, overload

import numpy as np
from blake3 import blake3

from dlm_rag.cli import print_note
from dlm_rag.errors import CorpusError, NamesRemedy, suggest_nearest
from dlm_rag.files import paths, record_readers
from dlm_rag.files.build_once import PARTS_FOLDER, Shard, build_once, make_folder_name, save_array
from dlm_rag.files.checked_json import iter_lines, parse_json_object, read_json_or_empty
from dlm_rag.files.paths import digest_file, digest_open_file, expand_path, get_cache_folder
from dlm_rag.files.record_readers import FIELD_ALIASES, get_field, get_record_id, read_records, write_number
from dlm_rag.progress import report_progress
from dlm_rag.retrieval import text_folder
from dlm_rag.retrieval.text_folder import list_text_files, read_text_passages, split_passages

log = logging.getLogger(__name__)

MAX_PARSED_PASSAGES = 4096  # that are kept in memory
# Of a row that is a passage, as the paragraphs of public corpora are (SQuAD's longest has 3,700); a longer
# one is a document, and cut into passages. Cut from 2,000 on, 2WikiMultihopQA loses 2 points of recall.
MAX_ROW_CHARS = 4000
MAX_CUT_CORPUS_BYTES = 256 << 20  # of a larger corpus, whose rows are taken as they are
_PART_NUMBER = re.compile(r"#[1-9][0-9]{0,5}\Z")  # of a part of a row, or of a file
COUNTS_FILE = "counts.json"  # of the rows that were cut or left out, and the files that were
CONVERTED_CORPUS_VERSION = 14  # raise it when other forms become other JSON lines


@dataclass(frozen=True)
class Passage(NamesRemedy):
    """One passage. Retrievers index its `text`, and the denoiser reads it."""

    _instead: ClassVar = {"page_content": "text", "content": "contents", "metadata": "id and title"}

    id: str
    title: str
    contents: str

    def __repr__(self) -> str:
        return f"Passage({self.id!r}, {reprlib.repr(self.title)}, {reprlib.repr(self.contents)})"

    @cached_property
    def text(self) -> str:
        """Title, line break, contents; or the contents alone, if they begin with the title, as FlashRAG's
        format has them: with the title, plain or in quotes, as the first line."""
        first_line = self.contents.partition("\n")[0].strip()
        if not self.title or first_line in (self.title, f'"{self.title}"'):
            return self.contents
        return f"{self.title}\n{self.contents}"


class OtherRowError(CorpusError):
    """A row is not a passage as it is: it has no text, is too long, or a question with passages."""


Located = tuple[str, int, Passage]  # a passage behind its place in words, and the byte where it begins


def get_row_id(passage_id: str) -> str:
    """The id of the row or file that a passage was cut from: `a` of `a#2`; any other id as it is."""
    return _PART_NUMBER.sub("", passage_id)


def parse_passage(record: dict[str, Any], place: str) -> Passage:
    """The passage in a record; raises `CorpusError` that begins with `place`."""
    name, contents = get_field(record, "contents")
    if contents is None and get_field(record, "question")[1] is not None:
        raise CorpusError(f"{place}: no passages come with this question: name another corpus")
    if contents is None and {*FIELD_ALIASES["contents"]} & {str(key).lower() for key in record}:
        contents = ""  # null, or an empty cell of Parquet
    if contents is None:
        raise CorpusError(f"{place}: the passage has no 'contents'{suggest_nearest('contents', record)}")
    own, title = get_field(record, "title")
    if title is None and isinstance(metadata := record.get("metadata"), dict):  # LangChain
        title = metadata.get("title")
    title, contents = (write_number(x) if type(x) in (int, float) else x for x in (title, contents))
    if not isinstance(title, str | None):
        raise CorpusError(f"{place}: '{own}' must be a text")
    if contents and isinstance(contents, list) and all(isinstance(each, str) for each in contents):
        contents = "".join(f"{each.strip()}\n" for each in contents)  # the paragraphs of KILT
    if not isinstance(contents, str):
        raise CorpusError(f"{place}: '{name}' must be a text that is not empty")
    if not contents.strip():  # of BEIR, some rows are a title alone
        contents = (title or "").strip()
    if not contents:
        raise OtherRowError(f"{place}: '{name}' must be a text that is not empty")
    return Passage(get_record_id(record, "passage", place, CorpusError), title or "", contents)


class Corpus(Sequence[Passage]):
    """The passages of a file by row number; only their offsets are held in memory. `folder` is where
    indexes over exactly these bytes are kept: its name holds the fingerprint."""

    def __init__(self, path: Path, folder: Path, fingerprint: str, state: list[int]) -> None:
        """state: of the file before it was hashed."""
        self.path, self.folder, self.fingerprint = path, folder, fingerprint
        # Of each passage, and the end; as a plain array, for a memmap is slow at single numbers.
        self._offsets = np.asarray(np.load(folder / "offsets" / "offsets.npy", mmap_mode="r"))
        self._file = path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)
        self._hashed, self._lock = state, threading.Lock()
        self._read_row = lru_cache(MAX_PARSED_PASSAGES)(self._parse_row)  # steps find the same ones
        self.check_unchanged()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def split_into_shards(self, scratch: Path, passages: int, size: int) -> list[Shard]:
        """All rows in ranges of at most so many passages and so many bytes of the file, one row at least,
        each with a folder in the scratch folder of a resumable build."""
        (scratch / PARTS_FOLDER).mkdir(exist_ok=True)
        found, start = list[Shard](), 0
        while start < len(self):
            fitting = int(np.searchsorted(self._offsets, self._offsets[start] + size, "right")) - 1
            stop = min(len(self), start + passages, max(fitting, start + 1))
            found.append((range(start, stop), scratch / PARTS_FOLDER / f"{start}-{stop}"))
            start = stop
        return found

    @overload
    def __getitem__(self, row: int) -> Passage: ...
    @overload
    def __getitem__(self, row: slice) -> list[Passage]: ...
    def __getitem__(self, row: int | slice) -> Passage | list[Passage]:
        if isinstance(row, slice):
            return self.read_passages(range(*row.indices(len(self))))
        return self._read_row(range(len(self))[row])

    def _parse_row(self, row: int) -> Passage:
        start, stop = self._offsets[row : row + 2].tolist()
        place = f"{self.path}, row {row}"
        try:
            line = os.pread(self._file.fileno(), stop - start, start)
            return parse_passage(parse_json_object(line, place, CorpusError), place)
        except CorpusError:
            self.check_unchanged()
            raise

    def __iter__(self) -> Iterator[Passage]:
        yield from (self[row] for row in range(len(self)))
        self.check_unchanged()

    def read_passages(self, rows: Iterable[int]) -> list[Passage]:
        """The passages of some rows; raises `CorpusError` as `check_unchanged` does."""
        found = [*map(self._read_row, map(range(len(self)).__getitem__, rows))]
        self.check_unchanged()  # once: it costs as much as a passage
        return found

    def check_unchanged(self) -> None:
        """Raises `CorpusError` where the file holds other bytes than it did; new times alone do no harm."""
        found = os.fstat(self._file.fileno())  # an open file stays the same one: its identity needs no look
        if [found.st_size, found.st_mtime_ns, found.st_ctime_ns] == self._hashed[:3]:
            return
        with self._lock:
            state = paths.read_file_state(self._file.fileno())
            if state != self._hashed and digest_open_file(self._file, self.path) != self.fingerprint:
                raise CorpusError(
                    f"{self.path} has changed while it was in use: answers so far are of the file as it "
                    "was; begin again with the file as it is"
                )
            self._hashed = state


def open_corpus(path: str | Path, index_dir: str | Path | None = None) -> Corpus:
    """The corpus in a file or a folder of texts.

    Files are in any form of `read_records`; what is not JSON lines yet is written as such once, next to
    the indexes. A file of questions that come with passages (`context` of HotpotQA, `paragraphs` of
    MuSiQue) is the corpus of these. Rows that are documents are cut, and those without a text left out.
    The file is hashed at every start, so an index over other bytes is never used. The first start also
    reads every line. Raises `CorpusError` naming file and line.
    """
    path, root = expand_path(path, CorpusError), _get_index_root(index_dir)
    try:
        is_folder = path.is_dir()
        if is_folder and not list_text_files(path):
            raise CorpusError(f"the folder {path} has no .txt or .md files: name others by file")
        path = path if is_folder else paths.resolve_regular_file(path, "corpus", CorpusError)
        compute_digest = text_folder.fingerprint_text_folder if is_folder else digest_file
        state, digest = paths.read_file_state(path), compute_digest(path)
        stem = path.name.partition(".")[0]
        folder = root / make_folder_name(stem, "lines", CONVERTED_CORPUS_VERSION, path.name, digest)
        if not is_folder and not folder.is_dir() and record_readers.is_json_lines(path, CorpusError):
            with suppress(OtherRowError):
                cuts = path.stat().st_size <= MAX_CUT_CORPUS_BYTES
                return _open_json_lines(path, root, state, digest, cuts)
        lines = _write_json_lines(path, folder / f"{stem}.jsonl")
        found = _open_json_lines(lines, root, paths.read_file_state(lines), digest_file(lines))
    except OSError as error:
        raise CorpusError(f"corpus '{error.filename or path}' cannot be read ({error.strerror})") from None
    if is_folder:
        unread = read_json_or_empty(lines.parent / COUNTS_FILE).get("unread", {})
        print_note(f"{path}: {text_folder.describe_text_folder(path, len(found), unread)}")
    return found


def _get_index_root(index_dir: str | Path | None) -> Path:
    return expand_path(index_dir, CorpusError, "retrieval.index_dir") if index_dir else get_cache_folder()


def _open_json_lines(path: Path, root: Path, state: list[int], digest: str, cuts: bool = False) -> Corpus:
    """The corpus in JSON lines, whose rows are found at the first use; may raise `OtherRowError`."""
    folder = root / make_folder_name(path.stem, digest)
    place = folder / "offsets"
    build_once(place, lambda scratch: save_array(scratch / "offsets.npy", _scan_offsets(path, cuts)))
    return Corpus(path, folder, digest, state)


def _write_json_lines(path: Path, target: Path) -> Path:
    """Writes the passages of a file or folder as JSON lines at the first use, and says what is left out."""
    counts = dict[str, Any]()

    def build(scratch: Path) -> None:
        with (scratch / target.name).open("w", encoding="utf-8") as file:
            for _, _, passage in _check_ids(lambda: _read_rows(path, counts), path):
                file.write(json.dumps(asdict(passage), ensure_ascii=False) + "\n")
        (scratch / COUNTS_FILE).write_text(json.dumps(counts))

    build_once(target.parent, build)
    said = read_json_or_empty(target.parent / COUNTS_FILE)
    if cut := said.get("cut"):
        longer = f"{cut:,} rows are longer than {MAX_ROW_CHARS:,} characters"
        log.warning("%s: %s: cut into %d passages", path, longer, said["parts"])
    if blank := said.get("blank"):
        log.warning("%s: %d rows without a text are left out", path, blank)
    return target


def _read_rows(path: Path, counts: dict[str, Any]) -> Iterator[Located]:
    """The rows of a file or folder as passages, of a long one `id`, `id#2` and so on; counts those that are
    cut or left out. Passages that come with questions are read once each, with their titles as ids."""
    counts.update(cut=0, parts=0, blank=0, unread={})
    is_folder = path.is_dir()
    records = read_text_passages(path, counts["unread"]) if is_folder else read_records(path, CorpusError)
    cuts = is_folder or record_readers.holds_at_most(path, MAX_CUT_CORPUS_BYTES)
    texts: dict[str, list[bytes]] = {}  # digests of the texts of each title
    for place, row in records:
        given = _list_contexts(row, place)
        for title, contents in given or ():
            known, digest = texts.setdefault(title, []), blake3(contents.encode()).digest(16)
            if digest not in known:
                known.append(digest)
                yield place, 0, Passage(_number_id(title or "untitled", len(known)), title, contents)
        if given is not None:
            continue
        try:
            passage = parse_passage(row, place)
        except OtherRowError:
            counts["blank"] += 1
            continue
        parts = [passage.contents]
        if cuts and len(passage.contents) > MAX_ROW_CHARS:
            parts = split_passages(passage.contents)
            counts["cut"] += 1
            counts["parts"] += len(parts)
        for number, part in enumerate(parts, 1):
            yield place, 0, Passage(_number_id(passage.id, number), passage.title, part)


def _number_id(name: str, number: int) -> str:
    return name if number == 1 else f"{name}#{number}"


def _list_contexts(row: dict[str, Any], place: str) -> list[tuple[str, str]] | None:
    """Title and text of the passages that come with a question; None for a row that is a passage."""
    given = get_field(row, "contents")[1] is not None
    return None if given else record_readers.list_context_passages(row, place, CorpusError)


def store_texts(rows: Iterable[Any], index_dir: str | Path | None = None) -> Path:
    """The file of JSON lines, among the indexes, with passages that are at hand as texts or records.

    Documents of LangChain are such records too. Rows without an id are numbered from 1, those without a
    text left out, and it is said. Raises `CorpusError` that names the row.
    """
    rows = record_readers.list_table_rows(rows)
    if isinstance(rows, Mapping) and rows and all(isinstance(column, list) for column in rows.values()):
        if len({*map(len, rows.values())}) > 1:
            raise CorpusError("the columns of the corpus differ in length: give one value a passage")
        rows = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    elif isinstance(rows, Mapping):  # one passage, or texts by their ids
        one = any(get_field(rows, name)[1] is not None for name in ("contents", "id"))
        rows = [rows] if one else [{"id": name, "contents": text} for name, text in rows.items()]
    if not isinstance(rows, Iterable) or isinstance(rows, bytes) or hasattr(rows, "read"):
        raise CorpusError(f"the corpus is {type(rows).__name__}: give a file, a folder or a list of texts")
    lines, blank = [], 0
    for number, row in enumerate(rows, start=1):
        if isinstance(row, Passage):
            row = asdict(row)
        elif number == 1 and isinstance(row, str | Path) and names_file(row):
            raise CorpusError(f"the corpus is a list of files ('{row}'): give one, or their folder")
        if isinstance(row, str):
            row = {"contents": row}
        elif hasattr(row, "page_content"):
            title = str((row.metadata or {}).get("title") or "")
            row = {"contents": row.page_content, "title": title, "id": getattr(row, "id", None)}
        if not isinstance(row, Mapping):
            kind = type(row).__name__
            raise CorpusError(f"passage {number} is {kind}: give a text, or a dict with 'text'")
        own = {} if get_field(row, "id")[1] is not None else {"id": str(number)}
        try:
            passage = parse_passage({**row, **own}, f"passage {number}")
        except OtherRowError:
            blank += 1
            continue
        lines.append(json.dumps(asdict(passage), ensure_ascii=False) + "\n")
    if not lines:
        raise CorpusError("the corpus holds no passages")
    if blank:
        log.warning("%d rows of the corpus without a text are left out", blank)
    try:
        text = "".join(lines).encode()
    except UnicodeEncodeError:
        raise CorpusError("a text of the corpus holds half of a character (a lone surrogate)") from None

    def build(scratch: Path) -> None:
        (scratch / "texts.jsonl").write_bytes(text)

    folder = _get_index_root(index_dir) / make_folder_name("texts", blake3(text).hexdigest())
    return build_once(folder, build) / "texts.jsonl"


def names_file(text: str | Path) -> bool:
    """Whether there is a file or folder of that name."""
    with suppress(OSError, ValueError):  # what cannot be a path
        return bool(text) and Path(text).exists()
    return False


def _scan_offsets(path: Path, cuts: bool) -> np.ndarray:
    """Where each passage begins, with the blank lines after it, and the end of the file; raises
    `OtherRowError` for a row that `_read_rows` makes something else of."""
    size, at = path.stat().st_size, 0
    offsets = array("q")

    def read_passages() -> Iterator[Located]:
        with path.open("rb") as file:
            for place, start, line in iter_lines(file, str(path), CorpusError):
                row = parse_json_object(line, place, CorpusError)
                if not record_readers.has_id_field(row) or _list_contexts(row, place) is not None:
                    raise OtherRowError
                passage = parse_passage(row, place)
                if cuts and len(passage.contents) > MAX_ROW_CHARS:
                    raise OtherRowError
                yield place, start, passage

    with report_progress(f"reading {path.name}", size, "bytes") as advance:
        for _, start, _ in _check_ids(read_passages, path):
            offsets.append(start)
            advance(-at + (at := start))
    offsets.append(size)
    return np.frombuffer(offsets, np.int64)


def _check_ids(read: Callable[[], Iterator[Located]], path: Path) -> Iterator[Located]:
    """What `read` gives; at its end raises `CorpusError` for nothing, or an id that occurs twice."""
    digests = array("Q")
    for place, start, passage in read():
        digests.append(int.from_bytes(blake3(passage.id.encode()).digest(8)))
        yield place, start, passage
    if not digests:
        raise CorpusError(f"{path} holds no passages")
    found = np.sort(np.frombuffer(digests, np.uint64))
    ids = set[str]()
    for place, _, passage in read() if (found[1:] == found[:-1]).any() else ():
        if passage.id in ids:
            raise CorpusError(f"{place}: the id '{passage.id}' occurs a second time")
        ids.add(passage.id)
