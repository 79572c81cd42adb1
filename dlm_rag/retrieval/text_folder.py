"""A folder of texts and Markdown as a corpus: passages of fifty to a hundred words."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from dlm_rag.errors import CorpusError
from dlm_rag.files.checked_json import decode_utf8, is_utf8_encodable
from dlm_rag.files.digest import digest_file
from dlm_rag.files.record_readers import Record
from dlm_rag.text import replace_control_chars

TEXT_FILE_SUFFIXES = (".txt", ".md", ".markdown")
DOCUMENT_SUFFIXES = (".pdf", ".docx", ".html", ".htm")  # which other programs make into Markdown
# Characters from which a passage may end, and at most: 50 to 100 words, which shipped models read whole.
PASSAGE_LENGTH_CHARS = (300, 600)
# From its beginning alone: tried at every character, it would take the square of the length of a line.
_LONG_RUN = re.compile(rf"(?<![^\n.!?])[^\n.!?]{{{PASSAGE_LENGTH_CHARS[1] + 1},}}")
_PIECE = re.compile(rf".{{1,{PASSAGE_LENGTH_CHARS[1]}}}(?:\s|$)|.{{{PASSAGE_LENGTH_CHARS[1]}}}")
# A heading of Markdown and what is below it, to the next; a fence of code hides what looks like one.
_SECTION = re.compile(
    r"^(#{1,6})[ \t]+(?P<title>[^\n]+)$|^(```|~~~).*?(^\3|\Z)"
    r"|(?:(?<=\n\n)|\A)(?P<underlined>[^\n#>|\-*+][^\n]{0,200})\n(?:={2,}|-{2,})[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
# Between --- (YAML) or +++ (TOML), at the beginning.
_FRONT_MATTER = re.compile(r"\A\ufeff?(---|\+\+\+)[ \t]*\n(?:[^\n]*\n){0,200}?(?:\1|\.\.\.)[ \t]*(?:\n|\Z)")
_FRONT_TITLE = re.compile(r"^title[ \t]*[:=][ \t]*([^\n]+)$", re.MULTILINE | re.IGNORECASE)
SKIPPED_NAMES = 8  # of a folder, that are named


def list_text_files(folder: Path) -> list[Path]:
    """The files to be read below a folder, by path; what begins with a dot is left out."""
    return [path for path in _list_files(folder) if path.suffix.lower() in TEXT_FILE_SUFFIXES]


def describe_text_folder(folder: Path, passages: int) -> str:
    """What was read of a folder, and which of its files were not."""
    files = list_text_files(folder)
    read, left_out = len(files), sorted({*_list_files(folder)} - {*files})
    skipped = [replace_control_chars(path.relative_to(folder).as_posix()) for path in left_out]
    named = ", ".join(skipped[:SKIPPED_NAMES]) + ", ..." * (len(skipped) > SKIPPED_NAMES)
    if any(path.suffix.lower() in DOCUMENT_SUFFIXES for path in left_out):
        named += " (make documents into Markdown first, as by markitdown)"
    line = f"read {read:,} file{'s' * (read != 1)} into {passages:,} passage{'s' * (passages != 1)}"
    return line + (f"; skipped {len(skipped):,}: {named}" if skipped else "")


def _list_files(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
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
    for path in list_text_files(folder):
        name, count = path.relative_to(folder).as_posix(), 0
        markdown, text = path.suffix.lower() != ".txt", _read_text(path)
        if not is_utf8_encodable(name):
            raise CorpusError(f"{path!a}: the name is not UTF-8: rename the file")
        named, text = split_front_matter(text) if markdown else ("", text)
        for title, body in split_markdown_sections(text) if markdown else [("", text)]:
            for passage in split_passages(body, markdown):
                count += 1
                heading = title or named or path.stem
                yield str(path), {"id": f"{name}#{count}", "title": heading, "contents": passage}


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    except OSError as error:
        raise CorpusError(f"{path} cannot be read ({error.strerror})") from None
    return decode_utf8(data, str(path), CorpusError, "text")


def split_passages(text: str, markdown: bool = False) -> list[str]:
    """A text in passages of at most `PASSAGE_LENGTH_CHARS`."""
    from semantic_text_splitter import MarkdownSplitter, TextSplitter

    # What goes on for longer than a passage, in lines: the splitter takes the square of its length.
    wrapped = _LONG_RUN.sub(lambda run: _PIECE.sub(r"\g<0>\n", run[0]), text)
    return (MarkdownSplitter if markdown else TextSplitter)(PASSAGE_LENGTH_CHARS).chunks(wrapped)


def split_front_matter(text: str) -> tuple[str, str]:
    """The title that the front matter of Markdown gives, if any, and the text without it."""
    found = _FRONT_MATTER.match(text)
    if not found:
        return "", text
    title = _FRONT_TITLE.search(found[0])
    return (title[1].strip().strip("\"'") if title else ""), text[found.end() :]


def split_markdown_sections(text: str) -> Iterator[tuple[str, str]]:
    """The headings of Markdown with what stands below each; what is above the first has none."""
    title, start = "", 0
    for found in _SECTION.finditer(text):
        if heading := found["title"] or found["underlined"]:
            yield title, text[start : found.start()]
            title, start = heading.rstrip(" \t#") or heading[0], found.end()
    yield title, text[start:]
