"""Records from files as people hand them in, one by one, each with its place for error messages.

Read are JSON lines, JSON (an array, or an object that holds one list of objects), CSV and TSV with a
header, and Parquet, each also gzipped. What a file is shows in its first bytes; only CSV and TSV need
their suffix. But for a JSON document no file is in memory as a whole.

Of public multi-hop data sets support, contexts, hops and type are read as well: of HotpotQA,
2WikiMultihopQA and MuSiQue as published and in the hub's parquet (columns in an object, JSON in a text),
FlashRAG, which keeps the original's fields in `metadata`, and SARDI.
"""

import csv
import gzip
import html
import io
import json
import os
import re
import shutil
import tempfile
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from dlm_rag.errors import UserError, suggest_nearest
from dlm_rag.files.checked_json import decode_utf8, iter_lines, parse_json, parse_json_object
from dlm_rag.progress import report_progress

SUPPORTED_FORMATS = (
    "JSON lines (.jsonl), JSON (.json), CSV (.csv), TSV (.tsv) or Parquet (.parquet), each also gzipped "
    "(.gz); a corpus may be a folder of .txt and .md files"
)
# The names that a field goes by; the first that is there counts.
FIELD_ALIASES = {
    "id": ("id", "_id", "question_id", "questionid", "wikipedia_id",  # TriviaQA, KILT
           "docid", "doc_id", "passage_id", "pid"),  # Pyserini, MS MARCO
    "question": ("question", "query", "text", "input"),  # MS MARCO, BEIR's queries, KILT
    "golden_answers": ("golden_answers", "answers", "answer", "possible_answers", "answerkey"),
    "answer_aliases": ("answer_aliases",),
    "supporting_ids": ("supporting_ids", "supporting_docs"),
    "contents": ("contents", "text", "page_content"),  # the last: LangChain
    "title": ("title", "wikipedia_title"),  # the last: KILT
}  # fmt: skip
ROW_FILE_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")  # the rows of a folder
PEEK_BYTES = 2**20  # bytes that are looked at to tell forms apart
UNSUPPORTED_MAGIC = (b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x1f\x8b")  # zip to gzip
MAX_JSON_BYTES = 2**31  # bytes of a document, which is in memory as a whole
# A gzipped file unpacks to at most so many bytes, or so many times its size: texts have 3 to 20 times.
MAX_UNPACKED_BYTES, MAX_UNPACKED_FACTOR = 2**30, 100
# Of HotpotQA (Yang et al. 2018) and 2WikiMultihopQA (Ho et al. 2020): passages that the type needs.
HOPS_BY_TYPE = {"bridge": 2, "comparison": 2, "compositional": 2, "inference": 2, "bridge_comparison": 4}
# Of questions: rows of a corpus may have that of what they are for.
QUESTION_IDS = ("query_id", "qid")
LAYOUT_FIELDS = (
    "type", "supporting_facts", "context", "paragraphs", "question_decomposition", "evidences",
    "answerable", "answer_aliases", "choices", "options",
)  # fmt: skip
_MUSIQUE_ID = re.compile(r"([2-4])hop\d?__")
TYPE_LABEL = re.compile(r"[A-Za-z][\w-]{0,39}")
_QUOTED_TITLE = re.compile(r'"([^\n]+)"\n')  # of FlashRAG's passages
_CARRIAGE_RETURN = re.compile(r"(?<=\r)(?!\n)")  # alone: a line end of old tables
_JSON_START = re.compile(rb"\[\s*[\[{\"\]]|\{\s*[\"}]")  # the film "[REC]" begins a text
_SENTENCE_FIELDS = ("sentences", "content", "paragraph_text", "text")
Record = tuple[str, dict[str, Any]]  # its place, its fields
RecordReader = Callable[[IO[bytes], str, type[UserError]], Iterator[Record]]


def get_field(record: Mapping[str, Any], name: str) -> tuple[str, Any]:
    """The name that a field goes by in a record, and its value, the first that is no blank text; its first
    name and None where it is not.

    Capitals make no difference where no name is there as it is written (`Question,Answer` of Bamboogle).
    """
    there = [key for key, value in record.items() if not is_missing(value)]
    for own in ({key: key for key in there}, {str(key).lower(): key for key in there}):
        found = [own[alias] for alias in FIELD_ALIASES[name] if alias in own]
        if said := [key for key in found if not isinstance(record[key], str) or record[key]] or found:
            return said[0], record[said[0]]
    return name, None


def list_table_rows(table: Any) -> Any:
    """The rows of a table of pandas, polars or Arrow; anything else as it is."""
    for name, words in (("to_dicts", ()), ("to_pylist", ()), ("to_dict", ("records",))):
        if hasattr(table, "columns") and hasattr(table, name):
            return _list_arrays(getattr(table, name)(*words))
    return table


def _list_arrays(value: Any) -> Any:
    """A value with lists in place of NumPy's arrays, and None of what is missing."""
    if isinstance(value, dict):
        return {key: _list_arrays(own) for key, own in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    return [*map(_list_arrays, value)] if isinstance(value, list) else None if is_missing(value) else value


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN or pandas' NA, as a table has in an empty cell."""
    return value is None or type(value).__name__ == "NAType" or (type(value) is float and value != value)


def write_number(value: Any) -> str:
    """A text, or a number as people write it: a column with gaps makes 1931 of it 1931.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def has_id_field(record: Mapping[str, Any]) -> bool:
    """Whether a record has a field for an id, empty or not."""
    return not {*FIELD_ALIASES["id"]}.isdisjoint(str(name).lower() for name in record)


def get_record_id(record: dict[str, Any], what: str, place: str, error: type[UserError]) -> str:
    """The id of a record as text; raises `error` unless it is a text that is not blank, or an integer."""
    name, value = get_field(record, "id")
    if value is None:
        raise error(f"{place}: the {what} has no 'id'{suggest_nearest('id', record)}")
    if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
        return str(value)
    raise error(f"{place}: the '{name}' of the {what} must be a text that is not empty, or an integer")


def read_records(path: Path, error: type[UserError], plain: str | None = None) -> Iterator[Record]:
    """The records of a file, in order; where the first has no field for an id, with their numbers for ids.

    plain: the field that each line of plain text becomes, if that is a form too; ids are q1, q2, ...
    Raises `error`, which names the file and the line, item or row.
    """
    try:
        size, at = path.stat().st_size, 0
        with (
            path.open("rb", buffering=PEEK_BYTES) as file,
            report_progress(f"reading {path.name}", size, "bytes") as advance,
        ):
            for record in read_record_stream(file, path, error, plain):
                yield record
                advance(-at + (at := file.tell()))
    except OSError as problem:
        raise error(f"{path} cannot be read ({problem.strerror or problem})") from None


def list_row_files(folder: Path, error: type[UserError]) -> list[Path]:
    """The files of a folder, by name, whose suffix says that they hold rows; raises `error` for none."""
    # JSON documents and subfolders (notes, other splits) are left out.
    paths = sorted(path for path in folder.glob("[!.]*") if path.is_file())
    files = [path for path in paths if _get_suffix(path) in ROW_FILE_SUFFIXES]
    if not files:
        raise error(f"'{folder}' has no file of rows ({', '.join(ROW_FILE_SUFFIXES)}): name a file")
    return files


def read_record_stream(
    file: IO[bytes], path: Path, error: type[UserError], plain: str | None = None
) -> Iterator[Record]:
    """`read_records` of an open file that may be a pipe."""
    opened = _unzip(file, path, error)
    has_ids = None
    try:
        records = _choose_reader(opened, path, error, plain)(opened, str(path), error)
        for number, (place, row) in enumerate(records, start=1):
            if plain and not has_id_field(row):
                own = [value for key, value in row.items() if str(key).lower() in QUESTION_IDS]
                row = {"id": own[0], **row} if own else row
            has_ids = has_id_field(row) if has_ids is None else has_ids
            yield place, row if has_ids else {"id": number, **row}
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise error(f"{path} is a broken gzip file: compress it again") from None


def is_json_lines(path: Path, error: type[UserError]) -> bool:
    """Whether a file is JSON lines as they are: not gzipped, no other form."""
    try:
        with path.open("rb", buffering=PEEK_BYTES) as file:
            plain = _unzip(file, path, error) is file
            return plain and _choose_reader(file, path, error, None) is _read_json_lines
    except OSError as problem:
        raise error(f"'{path}' cannot be read ({problem.strerror})") from None


def holds_at_most(path: Path, most: int) -> bool:
    """Whether a file holds at most so many bytes, once it is no longer gzipped; a broken one says later."""
    with path.open("rb", buffering=PEEK_BYTES) as file, suppress(OSError, EOFError, zlib.error):
        opened = _unzip(file, path, UserError)
        opened.seek(most)
        return not opened.read(1)
    return True


def _unzip(file: Any, path: Path, error: type[UserError]) -> Any:
    if file.peek(2)[:2] != b"\x1f\x8b":
        return file
    return io.BufferedReader(_BoundedGzipFile(file, path, error), PEEK_BYTES)


class _BoundedGzipFile(gzip.GzipFile):
    """Raises `error` where a file unpacks to far more than texts do: it would fill the disk."""

    def __init__(self, file: IO[bytes], path: Path, error: type[UserError]) -> None:
        super().__init__(fileobj=file)
        self._left = max(MAX_UNPACKED_BYTES, MAX_UNPACKED_FACTOR * os.fstat(file.fileno()).st_size)
        most = f"{MAX_UNPACKED_BYTES >> 30} GiB and {MAX_UNPACKED_FACTOR} times its size"
        self._refusal = error(f"{path} unpacks to more than {most}: if that is right, unpack it first")

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer)
        self._left -= size
        if self._left < 0:
            raise self._refusal
        return size


def _get_suffix(path: Path) -> str:
    """The suffix in small letters, that of gzip left out."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _choose_reader(file: Any, path: Path, error: type[UserError], plain: str | None) -> RecordReader:
    suffix, head = _get_suffix(path), file.peek(PEEK_BYTES)
    if head[:4] == b"PAR1" or suffix == ".parquet":
        return _read_parquet
    readable = not head.startswith(UNSUPPORTED_MAGIC)
    if readable and suffix in (".csv", ".tsv"):
        return partial(_read_table, delimiter="," if suffix == ".csv" else "\t")
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if readable and plain is not None and suffix in ("", ".txt") and not _JSON_START.match(text):
        return partial(_read_plain_lines, field=plain)
    if readable and text[:1] == b"[":
        return _read_json_items
    if readable and suffix == ".json" and text:
        first, _, rest = text.partition(b"\n")
        in_lines = first.rstrip().endswith(b"}") and rest.lstrip()[:1] == b"{"
        return _read_json_lines if in_lines else _read_json_items
    if readable and (suffix in (".jsonl", ".ndjson") or not text or text[:1] == b"{"):
        return _read_json_lines
    raise error(f"{path} is not in a format that is read: {SUPPORTED_FORMATS}")


def _read_json_lines(file: IO[bytes], path: str, error: type[UserError]) -> Iterator[Record]:
    for place, _, line in iter_lines(file, path, error):
        yield place, parse_json_object(line, place, error)


def _read_plain_lines(file: IO[bytes], path: str, error: type[UserError], field: str) -> Iterator[Record]:
    count = 0
    for place, _, line in iter_lines(file, path, error):
        for text in filter(str.strip, decode_utf8(line, place, error).splitlines()):
            count += 1
            yield place, {"id": f"q{count}", field: text.strip()}


def _read_table(file: IO[bytes], path: str, error: type[UserError], delimiter: str) -> Iterator[Record]:
    """The rows below a header, blank lines left out; an empty cell is None."""
    csv.field_size_limit(2**31 - 1)  # `iter_lines` has the limit
    lines = iter_lines(file, path, error, blank=True)
    decoded = (decode_utf8(line, place, error) for place, _, line in lines)
    text = (part for line in decoded for part in _CARRIAGE_RETURN.split(line) if part)
    reader, header, before = csv.reader(text, delimiter=delimiter, strict=True), list[str](), 0
    try:
        for cells in reader:
            place, before = f"{path}, line {before + 1}", reader.line_num
            if cells and not header:
                header = [name.strip() for name in cells]
                _check_columns([name for name in header if name], place, error)
                if len(header) == 1 and re.search("[;\t,]", header[0].replace(delimiter, "")):
                    raise error(f"{place}: the header has no comma (CSV) or tab (TSV) between its columns")
            elif cells:
                if len(cells) != len(header):
                    raise error(f"{place}: the row has more or fewer cells than the header")
                yield place, {n: cell or None for n, cell in zip(header, cells, strict=True) if n}
    except csv.Error as problem:
        raise error(
            f"{path}, line {before + 1}: the row cannot be read ({problem}); put a cell that holds "
            "quotes in quotes, and double its own"
        ) from None


def _read_parquet(file: IO[bytes], path: str, error: type[UserError]) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise error("parquet needs pyarrow: install it with `pip install 'dlm_rag[parquet]'`") from None
    with tempfile.TemporaryFile() as copy:
        if isinstance(getattr(file, "raw", None), gzip.GzipFile) or not file.seekable():
            shutil.copyfileobj(file, copy)  # its end is read first
            file = copy
        try:
            opened = parquet.ParquetFile(file)
            _check_columns(opened.schema_arrow.names, path, error)
            start = 1
            for batch in opened.iter_batches(1024):
                for number, row in enumerate(batch.to_pylist(), start):
                    yield f"{path}, row {number}", row
                start += len(batch)
        except error:
            raise
        except (ArrowException, OSError, ValueError, OverflowError) as problem:
            raise error(f"{path} is not a parquet file ({problem})") from None


def _check_columns(names: list[str], place: str, error: type[UserError]) -> None:
    """Raises `error` for two columns of one name, of which a record would have the last only."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise error(f"{place}: the header has two columns '{twice[0]}': rename one")


def _read_json_items(file: IO[bytes], path: str, error: type[UserError]) -> Iterator[Record]:
    """The items of an array, or of the one list of objects in an object."""
    document = file.read(MAX_JSON_BYTES + 1)
    if len(document) > MAX_JSON_BYTES:
        raise error(f"{path} is JSON of more than {MAX_JSON_BYTES >> 30} GiB: make it JSON lines")
    found = parse_json(document, path, error, "file")
    if isinstance(found, dict):
        lists = [value for value in found.values() if isinstance(value, list)]
        lists = [value for value in lists if any(isinstance(item, dict) for item in value)]
        is_row = any(get_field(found, name)[1] is not None for name in ("question", "contents"))
        row = [found] if is_row else None  # of JSON lines, the only one
        found = _flatten_squad(lists[0]) if len(lists) == 1 and row is None else row
    if not isinstance(found, list):
        raise error(f"{path} holds no list of objects, or more than one: leave one")
    for number, item in enumerate(found, start=1):
        if not isinstance(item, dict):
            raise error(f"{path}, item {number} is not a JSON object")
        yield f"{path}, item {number}", item


def _flatten_squad(articles: list[Any]) -> list[Any]:
    """The questions of SQuAD as published, each with its context; other items as they are."""
    try:
        return [
            {**asked, "title": article.get("title"), "context": paragraph["context"]}
            for article in articles
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]
    except (KeyError, TypeError):
        return articles


def flatten_layout(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the fields of a public layout at the top, and what JSON in a text holds as values."""
    metadata = _decode(row.get("metadata"))
    found = dict(row)
    for name in LAYOUT_FIELDS:
        value = row.get(name)
        if value is None and isinstance(metadata, dict):
            value = metadata.get(name)
        if value is not None:
            found[name] = _decode(value)
    if isinstance(outputs := row.get("output"), list):  # KILT: an answer, or the pages of one, in each
        given = [each for each in outputs if isinstance(each, dict)]
        found.setdefault("golden_answers", [each["answer"] for each in given if each.get("answer")])
        pages = next((each["provenance"] for each in given if each.get("provenance")), ())
        found.setdefault("supporting_docs", pages)
    return found


def list_supporting_titles(row: dict[str, Any], place: str, error: type[UserError]) -> tuple[str, ...]:
    """The titles of the passages that support a question, each once, in the order of a flattened row."""
    facts, paragraphs = row.get("supporting_facts"), row.get("paragraphs")
    steps, docs = row.get("question_decomposition"), row.get("supporting_docs")
    titles: list[Any] = []
    if facts is not None:
        titles = [title for title, _ in _pair_up(facts, "supporting_facts", place, error)]
    elif isinstance(paragraphs, list):
        chosen = [each for each in paragraphs if isinstance(each, dict) and each.get("is_supporting")]
        titles = [title for title, _ in _pair_up(chosen, "paragraphs", place, error)]
    elif isinstance(steps, list):
        found = [step.get("support_paragraph") for step in steps if isinstance(step, dict)]
        titles = [each.get("title") for each in found if isinstance(each, dict)]
    elif isinstance(docs, list):
        titles = [_find_title(doc) for doc in docs if isinstance(doc, dict)]
        titles = [] if None in titles else titles
    return tuple(dict.fromkeys(title for title in titles if isinstance(title, str) and title.strip()))


def count_hops(row: dict[str, Any], name: str) -> int | None:
    """Hops by MuSiQue's ids (`name`) and decompositions, else by type, then evidences; None if unknown."""
    if found := _MUSIQUE_ID.match(name):
        return int(found[1])
    kind = row.get("type")
    typed = isinstance(kind, str) and {"supporting_facts", "context"} & {*row}
    if typed and kind in HOPS_BY_TYPE and not row.get("question_decomposition"):
        return HOPS_BY_TYPE[kind]
    steps = row.get("question_decomposition") or row.get("evidences")
    return len(steps) if isinstance(steps, list) and steps else None


def list_context_passages(
    row: dict[str, Any], place: str, error: type[UserError]
) -> list[tuple[str, str]] | None:
    """Title and text of each passage that comes with a question; None where none can come with it."""
    row = flatten_layout(row)
    context = row.get("context")  # of SQuAD, with its title
    if isinstance(context, str) and get_field(row, "question")[1] is not None:
        row["context"] = [[get_field(row, "title")[1] or "", context]]
    name = next((key for key in ("context", "paragraphs") if isinstance(row.get(key), list | dict)), None)
    if name is None:
        return None
    found = []
    for title, said in _pair_up(row[name], name, place, error):
        sentences = said if isinstance(said, list) else [said]
        if not all(isinstance(text, str) for text in (title, *sentences)):
            raise error(f"{place}: the passages in '{name}' must be a title and sentences, which are texts")
        found.append((title, " ".join(text.strip() for text in sentences if text.strip())))
    return [(title, text) for title, text in found if text]


def normalize_title(title: str) -> str:
    """What two spellings of a title have in common: quotes around it, white space and escapes are none."""
    return " ".join(unicodedata.normalize("NFC", html.unescape(title)).split()).strip('" ')


def _decode(value: Any) -> Any:
    """A value, or what JSON in a text holds, as cells of tables and some parquets have it."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # a text that begins so
        return value


def _pair_up(value: Any, name: str, place: str, error: type[UserError]) -> Iterator[tuple[Any, Any]]:
    """Titles and what stands with each: of pairs, objects, an object of columns, or titles alone."""
    if isinstance(value, dict) and isinstance(titles := value.get("title"), list):
        columns = (each for key, each in value.items() if key != "title" and isinstance(each, list))
        others = next(columns, [""] * len(titles))
        if len(others) == len(titles):
            yield from zip(titles, others, strict=True)
            return
    for item in value if isinstance(value, list) else [None]:
        if isinstance(item, str):
            yield item, ""
        elif isinstance(item, list) and len(item) == 2:
            yield item[0], item[1]
        elif isinstance(item, dict) and "title" in item:
            yield item["title"], next((item[key] for key in _SENTENCE_FIELDS if key in item), "")
        else:
            raise error(f"{place}: '{name}' must be pairs of a title and what belongs to it")


def _find_title(doc: dict[str, Any]) -> str | None:
    if isinstance(title := doc.get("title"), str):
        return title
    quoted = _QUOTED_TITLE.match(str(doc.get("contents") or ""))
    return quoted[1] if quoted else None
