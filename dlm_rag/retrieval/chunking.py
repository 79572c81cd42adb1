"""A folder of texts and Markdown as a corpus: passages of one to two hundred words."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from dlm_rag.errors import CorpusError
from dlm_rag.files.checked_json import decode_utf8, is_utf8_encodable
from dlm_rag.files.digest import digest_file
from dlm_rag.files.record_readers import Record

TEXT_FILE_SUFFIXES = (".txt", ".md", ".markdown")
PASSAGE_LENGTH_CHARS = (600, 1200)  # characters from which a passage may end, and at most: 100 to 200 words
# From its beginning alone: tried at every character, it would take the square of the length of a line.
_LONG_RUN = re.compile(rf"(?<![^\n.!?])[^\n.!?]{{{PASSAGE_LENGTH_CHARS[1] + 1},}}")
_PIECE = re.compile(rf".{{1,{PASSAGE_LENGTH_CHARS[1]}}}(?:\s|$)|.{{{PASSAGE_LENGTH_CHARS[1]}}}")
# A heading of Markdown and what is below it, to the next; a fence of code hides what looks like one.
_SECTION = re.compile(r"^(#{1,6})[ \t]+(?P<title>[^\n]+)$|^(```|~~~).*?(^\3|\Z)", re.MULTILINE | re.DOTALL)


def list_text_files(folder: Path) -> list[Path]:
    """The texts below a folder in the order of their paths; what begins with a dot is left out."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in TEXT_FILE_SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def fingerprint_text_folder(folder: Path) -> str:
    """A digest of all texts of a folder and of their names. Raises `OSError`."""
    found = hashlib.sha256()
    for path in list_text_files(folder):
        found.update(f"{path.relative_to(folder)}\n{digest_file(path)}\n".encode(errors="replace"))
    return found.hexdigest()


def read_text_passages(folder: Path) -> Iterator[Record]:
    """The passages of a folder's texts, `path#1` and so on, titled by the heading above or the file's name.

    Raises `CorpusError` for a text that is not UTF-8.
    """
    from semantic_text_splitter import MarkdownSplitter, TextSplitter

    for path in list_text_files(folder):
        name, count = path.relative_to(folder).as_posix(), 0
        try:
            data = path.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        except OSError as error:
            raise CorpusError(f"{path} cannot be read ({error.strerror})") from None
        text = decode_utf8(data, str(path), CorpusError, "text")
        if not is_utf8_encodable(name):
            raise CorpusError(f"{path!a}: the name is not UTF-8: rename the file")
        markdown = path.suffix.lower() != ".txt"
        splitter = (MarkdownSplitter if markdown else TextSplitter)(PASSAGE_LENGTH_CHARS)
        for title, body in split_markdown_sections(text) if markdown else [("", text)]:
            # What goes on for longer than a passage, in lines: the splitter takes the square of its length.
            wrapped = _LONG_RUN.sub(lambda run: _PIECE.sub(r"\g<0>\n", run[0]), body)
            for passage in splitter.chunks(wrapped):
                count += 1
                yield str(path), {"id": f"{name}#{count}", "title": title or path.stem, "contents": passage}


def split_markdown_sections(text: str) -> Iterator[tuple[str, str]]:
    """The headings of Markdown with what stands below each; what is above the first has none."""
    title, start = "", 0
    for found in _SECTION.finditer(text):
        if heading := found["title"]:
            yield title, text[start : found.start()]
            title, start = heading.rstrip(" \t#") or heading[0], found.end()
    yield title, text[start:]
