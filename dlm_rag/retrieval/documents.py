"""PDF, HTML, Word and LaTeX files of a corpus as Markdown: `pip install 'dlm_rag[documents]'`."""

import logging
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from dlm_rag.errors import CorpusError, translate_failures

MAX_DOCUMENT_BYTES = 256 * 2**20  # of a file, and of what a Word file unpacks to
_HTML_UNREAD = ("script", "style", "noscript", "template", "nav", "footer")
_HTML_BLOCKS = ("p", "div", "section", "article", "ul", "ol", "table", "blockquote", "pre")
_HTML_LINES = ("li", "tr", "br", "dt", "dd")
_TEX_HEADING = re.compile(r"\\(title|chapter|(?:sub){0,2}section|paragraph)\*?\{([^{}\n]{1,300})\}")


def list_document_suffixes() -> list[str]:
    """The suffixes of files whose reader is installed."""
    return [suffix for suffix, (package, _) in _READERS.items() if find_spec(package)]


def read_document(path: Path) -> str:
    """The text of a file, its headings as Markdown has them.

    Raises `CorpusError` for a file that is damaged, encrypted or larger than `MAX_DOCUMENT_BYTES`.
    """
    with translate_failures(CorpusError, f"{path} cannot be read"):
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise CorpusError(
                f"{path} is larger than {MAX_DOCUMENT_BYTES >> 20} MiB: split it, or leave it out"
            )
        text = _READERS[path.suffix.lower()][1](path)
    lines = (" ".join(line.split()) for line in text.encode(errors="replace").decode().splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _read_pdf(path: Path) -> str:
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # else a line for each oddity of a file
    return "\n\n".join(page.extract_text() for page in PdfReader(path).pages)


def _read_html(path: Path) -> str:
    from bs4 import BeautifulSoup

    page: Any = BeautifulSoup(path.read_bytes(), "html.parser")
    title = page.title.get_text() if page.title else ""
    for tag in page([*_HTML_UNREAD, "title"]):
        tag.decompose()
    for text in page.find_all(string=True):
        text.replace_with(re.sub(r"\s+", " ", text))
    for tag in page(re.compile("^h[1-6]$")):
        tag.replace_with(f"\n\n{'#' * int(tag.name[1])} {' '.join(tag.get_text().split())}\n\n")
    for tag in page([*_HTML_BLOCKS, *_HTML_LINES]):
        tag.insert_after("\n\n" if tag.name in _HTML_BLOCKS else "\n")
    return f"# {' '.join(title.split())}\n\n" * bool(title.strip()) + page.get_text()


def _read_docx(path: Path) -> str:
    from docx import Document

    if sum(part.file_size for part in ZipFile(path).infolist()) > MAX_DOCUMENT_BYTES:
        raise CorpusError(f"{path} unpacks to more than {MAX_DOCUMENT_BYTES >> 20} MiB: leave it out")
    found = []
    for item in Document(str(path)).iter_inner_content():
        if hasattr(item, "rows"):  # a table
            found += [" | ".join(cell.text for cell in row.cells) for row in item.rows]
            continue
        style = (item.style.name if item.style else "") or ""
        level = {"Title": 1} | {f"Heading {number}": number for number in range(1, 7)}
        found.append(f"\n{'#' * level.get(style, 0)} {item.text}\n")
    return "\n".join(found)


def _read_tex(path: Path) -> str:
    from pylatexenc.latex2text import LatexNodes2Text

    source = path.read_text(encoding="utf-8", errors="replace")
    title = _TEX_HEADING.search(source)
    body = source.partition(r"\begin{document}")[2] or source
    if title and title[1] == "title":
        body = f"{title[0]}\n{body}"
    # Marked before the macros go: a heading of LaTeX is a line of its own, which is all that is left of it.
    marked = _TEX_HEADING.sub(lambda found: f"\n\nHEADING {found[2]}\n\n", body.replace(r"\maketitle", ""))
    logging.getLogger("pylatexenc").setLevel(logging.ERROR)
    return re.sub("(?m)^ *HEADING ", "# ", LatexNodes2Text(math_mode="verbatim").latex_to_text(marked))


_READERS: dict[str, tuple[str, Callable[[Path], str]]] = {  # by suffix: the package, what reads
    ".pdf": ("pypdf", _read_pdf),
    ".html": ("bs4", _read_html),
    ".htm": ("bs4", _read_html),
    ".docx": ("docx", _read_docx),
    ".tex": ("pylatexenc", _read_tex),
}
DOCUMENT_SUFFIXES = tuple(_READERS)
