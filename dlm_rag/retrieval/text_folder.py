"""A folder of texts, Markdown and documents as a corpus: passages of 80 to 120 words. PDF, HTML, Word and
LaTeX files are read as Markdown: `pip install 'dlm_rag[documents]'`."""

import hashlib
import logging
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import yaml

from dlm_rag.errors import CorpusError, translate_failures
from dlm_rag.files.checked_json import decode_utf8
from dlm_rag.files.paths import digest_file
from dlm_rag.files.record_readers import Record
from dlm_rag.text import MAX_TITLE_WORDS, normalize_whitespace, replace_control_chars

TEXT_FILE_SUFFIXES = (".txt", ".md", ".markdown")
# Characters from which a passage may end, and at most: 80 to 120 words, which shipped models read whole.
PASSAGE_LENGTH_CHARS = (500, 700)
# From its beginning alone: tried at every character, it would take the square of the length of a line.
_ENDS = "\n.!?。！？।؟"
_LONG_RUN = re.compile(rf"(?<![^{_ENDS}])[^{_ENDS}]{{{PASSAGE_LENGTH_CHARS[1] + 1},}}")
_PIECE = re.compile(rf".{{1,{PASSAGE_LENGTH_CHARS[1]}}}(?:\s|$)|.{{{PASSAGE_LENGTH_CHARS[1]}}}")
_PART = re.compile(r".{1,200000}(?:\n\n|\Z)|.{1,200000}\s|.{1,200000}", re.DOTALL)
_WITHIN = re.compile(r"[a-z0-9)][.!?] [^\W\d_a-z]")  # the end of a sentence within a line
_LINE_MARK = re.compile(r"[\s>|#`]|[-*+•][ \t]|\d{1,3}[.)][ \t]")  # of lists, tables, code: no prose
# A heading of Markdown and what is below it, to the next; a fence of code hides what looks like one.
_SECTION = re.compile(
    r"^ {0,3}(?P<level>#{1,6})[ \t]+(?P<title>[^\n]+)$"
    r"|^ {0,3}(?P<fence>`{3,}+(?![^\n]*`)|~{3,}).*?(?:^ {0,3}(?P=fence)|\Z)"
    r"|^ {0,3}<!--.*?(?:-->|\Z)|^<pre(?=[\s>]).*?(?:</pre>|\Z)"
    r"|^<(?P<tag>h[1-6])\b[^<>\n]{0,200}>(?P<tagged>[^\n]{1,300}?)</(?P=tag)>[ \t]*$"
    r"|(?:(?<=\n\n)|\A)(?P<underlined> {0,3}[^\s#>|\-*+][^\n]{0,200})\n {0,3}(?P<line>=+|-{2,})[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
# Around the words of a heading: {#attributes}, the address of a link, emphasis, code, tags.
_HEADING_MARKUP = re.compile(
    r"[ \t]\{[^{}\n]{1,100}\}(?=[ \t#]*\Z)|!?\[(?P<linked>[^\[\]\n]{1,200})\]\([^()\n]{0,300}\)"
    r"|(?<!\w)(?P<mark>\*{1,3}|_{1,3}|`{1,2})(?=\S)(?P<marked>[^\n*_`]{1,200})(?<=\S)(?P=mark)(?!\w)"
    r"|</?(?:a|b|i|em|strong|code|span|img|sup|sub)\b[^<>\n]{0,100}>"
)
# What begins a line of other formats as a heading does, and is none, gets `NO_HEADING`, theirs `HEADING`.
_HASH, HEADING, NO_HEADING = re.compile(r"(?m)^(?=#{1,6} |<!--|<pre[\s>])"), "\1", "\2"
_CLOSING = re.compile(r"(?<![ \t])[ \t]+#+[ \t]*\Z")  # behind a heading; "C#" has none
# Between --- (YAML: no line of prose) or +++ (TOML), at the beginning, with a key; in braces (JSON).
_FRONT_MATTER = re.compile(
    r"\A\s{0,20}(?=[^\n]*\n(?:[ \t]*(?:#[^\n]*)?\n){0,20}"
    r"[ \t]*[\w\"'-]{1,60}(?: [a-z][\w-]{0,30}){0,2}[ \t]*[:=])"
    r"(?:---[ \t]*\n(?>(?:[ \t#\-\]}][^\n]*|[^\s#\-\]}][^\n]{0,60}?:(?!\S)[^\n]*)?\n){0,2000}?"
    r"(?:---|\.\.\.)"
    r"|\+\+\+[ \t]*\n(?:[^\n]*\n){0,2000}?(?:\+\+\+|\.\.\.)|\{\n(?:[^\n]*\n){0,2000}?\})[ \t]*(?:\n|\Z)"
)
_FRONT_TITLE = re.compile(
    r"^(?:[ \t]*\"title\"|title)[ \t]*[:=][ \t]*(?:[>|][-+]?[ \t]*\n[ \t]+)?"
    r"(?:(?P<double>\"(?:[^\"\\]|\\.)*\")|'(?P<single>(?:[^']|'')*)'"
    r"|(?P<bare>[^\n]+?(?:\n[ \t]+(?=[^ \t\n])[^\n]+?)*))(?:[ \t]+#[^\n]*)?,?[ \t]*$",
    re.MULTILINE | re.IGNORECASE | re.DOTALL,
)
SKIPPED_NAMES = 8  # of a folder, that are named
MAX_DOCUMENT_BYTES = 256 * 2**20  # of a file, and of what a Word file unpacks to
_HYPHENATED = re.compile(r"(?<!\w)(\w++)(?<=[^\W\d_])-[ \t]*\n(?=[^\W\d_A-ZÀ-Þ])(\w+)")  # at a line's end
_HTML_UNREAD = ("script", "style", "noscript", "template", "nav", "footer", "title")
_HTML_BLOCKS = "p div section article main header aside address form ul ol table blockquote pre".split()
_HTML_BLOCKS += "figure figcaption details summary option textarea".split()
_HTML_ENDS = dict.fromkeys(_HTML_BLOCKS, "\n\n") | dict.fromkeys(("li", "tr", "br", "dt", "dd"), "\n")
_HTML_ENDS |= {"td": " ", "th": " "}
# Around what a reader of a Word file sees, where python-docx does not look: insertions, controls, fields.
_WORD_WRAPPERS = [f"{{*}}{n}" for n in "ins moveTo sdt sdtContent customXml smartTag fldSimple".split()]
_WORD_NOTES = ("/word/footnotes.xml", "/word/endnotes.xml")
_TEX_HEADING = re.compile(  # or what hides one: the first group is empty
    r"\\begin\{verbatim\}(?s:.*?)(?:\\end\{verbatim\}|\Z)|(?<!\\)(?:\\\\)*+%[^\n]*"
    r"|\\(title|chapter|(?:sub){0,2}section|paragraph)\*?(?:\[[^\[\]\n]{0,300}\])?"
    r"\{((?:[^{}]|\{[^{}\n]{0,100}\}){1,300})\}"
)
_TEX_CODE = re.compile(r"\\(begin|end)\{(?:lstlisting|minted)\}(?:\[[^\[\]\n]{0,300}\])?(?:\{\w{1,30}\})?")
_TEX_ADDRESS = re.compile(r"\\(?:url|href)\s?\{[^{}\n]{0,2000}\}")  # in which % is no comment
_TEX_LEVELS = ("title", "chapter", "section", "subsection", "subsubsection", "paragraph")


def list_text_files(folder: Path) -> list[Path]:
    """The files to be read below a folder, by path; what begins with a dot is left out."""
    read = (*TEXT_FILE_SUFFIXES, *list_document_suffixes())
    return [path for path in _list_files(folder) if path.suffix.lower() in read and path.is_file()]


def _list_files(folder: Path) -> list[Path]:
    """Files, pipes, and links, of which those to folders are not followed."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    return [p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts)]


def describe_text_folder(folder: Path, passages: int, unread: Mapping[str, str]) -> str:
    """What was read of a folder, and which of its files were not; unread: of `read_text_passages`."""
    files = list_text_files(folder)
    read, others = len(files) - len(unread), sorted({*_list_files(folder)} - {*files})
    line = f"read {read:,} file{'s' * (read != 1)} into {passages:,} passage{'s' * (passages != 1)}"
    kinds = Counter(path.suffix.lower() for path in files if str(path.relative_to(folder)) not in unread)
    if documents := [f"{kinds[kind]:,} {kind}" for kind in _READERS if kinds[kind]]:
        line += f" ({', '.join(documents)})"
    names = [f"{name} ({reason})" for name, reason in unread.items()]
    names += [path.relative_to(folder).as_posix() for path in others]
    if not names:
        return line
    named = replace_control_chars(", ".join(names[:SKIPPED_NAMES])) + ", ..." * (len(names) > SKIPPED_NAMES)
    if any(path.suffix.lower() in _READERS for path in others):
        named += " (documents are read with: pip install 'dlm_rag[documents]')"
    return f"{line}; skipped {len(names):,}: {named}"


def fingerprint_text_folder(folder: Path) -> str:
    """A digest of all texts of a folder and of their names, of what may not be read the name alone."""
    found = hashlib.sha256()
    for path in list_text_files(folder):
        found.update(f"{path.relative_to(folder)}\n".encode(errors="replace"))
        with suppress(OSError):
            found.update(f"{digest_file(path)}\n".encode())
    return found.hexdigest()


def read_text_passages(folder: Path, unread: dict[str, str]) -> Iterator[Record]:
    """The passages of a folder's texts, `path#1` and so on, titled by the heading above or the file's name.

    unread: receives the names of the files that give no passage, with the reason. Raises `CorpusError`,
    that of the first, where no file gives one and one cannot be read.
    """
    faults = list[CorpusError]()
    for path in (files := list_text_files(folder)):
        name = path.relative_to(folder).as_posix().encode(errors="backslashreplace").decode()
        count, own, markdown = 0, "", path.suffix.lower() not in (".txt", ".pdf")
        try:
            text = read_document(path)
        except CorpusError as error:
            faults.append(error)
            unread[name] = str(error).partition(": ")[2]
            continue
        if markdown and (front := _FRONT_MATTER.match(text)):
            text = text[front.end() :]
            given = _FRONT_TITLE.search(front[0])
            own = given[given.lastgroup or 0].replace("''", "'") if given else ""
            if given and given["double"]:
                own, quoted = own[1:-1], own
                with suppress(yaml.YAMLError):  # an escape that YAML does not know is kept
                    own = yaml.safe_load(quoted)
                own = own.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            own = "" if own in ("~", "null") else normalize_whitespace(own)
        for heading, body in _split_sections(text, own) if markdown else [("", text)]:
            for passage in split_passages(body):
                count += 1
                title, said = heading or own or Path(name).stem, passage.replace(NO_HEADING, "")
                yield str(path), {"id": f"{name}#{count}", "title": title, "contents": said}
        if not count:
            unread[name] = "it holds no text"
    if faults and len(unread) == len(files):
        raise faults[0]


def split_passages(text: str) -> list[str]:
    """A text in passages of at most `PASSAGE_LENGTH_CHARS`."""
    from semantic_text_splitter import TextSplitter  # that for Markdown splits sentences at emphasis

    # What goes on for longer than a passage, in lines, and a long text in parts: the splitter takes the
    # square of their lengths.
    joined = "".join(map(_join_lines, re.split(r"(\n[ \t]*\n)", text)))
    wrapped = _LONG_RUN.sub(lambda run: _PIECE.sub(r"\g<0>\n", run[0]), joined)
    splitter = TextSplitter(PASSAGE_LENGTH_CHARS)
    return [passage for part in _PART.findall(wrapped) for passage in splitter.chunks(part)]


def _join_lines(block: str) -> str:
    """Joins the lines of a long block of prose, whose sentences would be cut where its lines end: sentences
    end within lines, many lines begin small, and few had room for the first word of the next."""
    lines = block.split("\n")
    ends = sum(line.endswith((".", "!", "?", ";", ",")) for line in lines)  # as those of records do
    if len(block) <= PASSAGE_LENGTH_CHARS[1] or any(map(_LINE_MARK.match, lines)) or 2 * ends > len(lines):
        return block
    width = 0.9 * max(map(len, lines))
    pairs = [(len(line) + 1 + len(after.partition(" ")[0]), after) for line, after in pairwise(lines)]
    full = sum(needed > width for needed, _ in pairs) >= 0.8 * len(pairs)
    small = sum(after[:1].islower() for _, after in pairs) > 0.3 * len(pairs)
    return " ".join(lines) if full and small and len(_WITHIN.findall(block)) > len(block) / 400 else block


def _split_sections(text: str, title: str = "") -> Iterator[tuple[str, str]]:
    """The headings of Markdown with what stands below each; above the first is none. Before one stand up to
    two that it is below ("Emma: Plot"), as long as it may be a title. One with nothing below it that stands
    before no other, and is not the first, is its own text. title: of the front matter."""
    heading, last, start, above = "", "", 0, {0: title} if title else dict[int, str]()
    first = True
    for found in _SECTION.finditer(text):
        if said := found["title"] or found["underlined"] or found["tagged"]:
            before, body = heading, text[start : found.start()]
            bare = _HEADING_MARKUP.sub(lambda m: m["linked"] or m["marked"] or "", said)
            said, start = _CLOSING.sub("", bare).strip() or said.strip(), found.end()
            mark = found["level"] or found["tag"] or f"h{1 + (found['line'][0] == '-')}"
            level = len(mark) if mark[0] == "#" else int(mark[1])
            above = {n: name for n, name in above.items() if n < level} | {level: said}
            names = [*dict.fromkeys(above.values())]
            joined = (": ".join(names[-n:]) for n in (3, 2))
            heading = next((each for each in joined if len(each.split()) <= MAX_TITLE_WORDS), said)
            named = first or (last in names and last in heading)
            yield before, body if body.strip() or named else last
            first, last = not last and first, said
    body = text[start:]
    yield heading, body if body.strip() or first else last


def list_document_suffixes() -> list[str]:
    """The suffixes of files whose reader is installed."""
    return [suffix for suffix, (package, _) in _READERS.items() if find_spec(package)]


def read_document(path: Path) -> str:
    """The text of a file, its headings as Markdown has them.

    Raises `CorpusError` for a text that is neither UTF-8 nor UTF-16 with its mark, for what is damaged or
    encrypted, and for more than `MAX_DOCUMENT_BYTES`.
    """
    suffix = path.suffix.lower()
    with translate_failures(CorpusError, f"{path} cannot be read"):
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise CorpusError(f"{path}: it is larger than {MAX_DOCUMENT_BYTES >> 20} MiB: split it")
        if suffix in TEXT_FILE_SUFFIXES:
            data = path.read_bytes()
            utf16 = data.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
            text = data.decode("utf-16") if utf16 else decode_utf8(data, str(path), CorpusError, "text")
            if "\0" in text:  # UTF-16 without its mark, or no text at all
                raise CorpusError(f"{path}: it holds NUL characters: save the file as UTF-8")
            return re.sub("\r\n?", "\n", text)
        for package in ("pypdf", "bs4.dammit", "pylatexenc"):  # else they log a line for each oddity
            logging.getLogger(package).setLevel(logging.ERROR)
        text = _READERS[suffix][1](path)
    lines = (" ".join(line.split()) for line in text.encode(errors="replace").decode().splitlines())
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    return text if suffix == ".pdf" else _HASH.sub(NO_HEADING, text).replace(HEADING, "")


def _read_pdf(path: Path) -> str:
    from pypdf import PdfReader

    return join_words("\n\n".join(page.extract_text() for page in PdfReader(path).pages))


def join_words(text: str) -> str:
    """A text whose words were broken at the ends of lines, with these whole. A hyphen stays where the text
    has the parts as words, and not the whole ("well-known")."""
    words = {*re.findall(r"\w+", _HYPHENATED.sub(" ", text).casefold())}

    def join(found: re.Match[str]) -> str:
        if found[2][0].isupper() or found[2] in ("and", "or", "to", "und", "oder", "bis", "et", "y"):
            return found[0]
        whole, parts = found[1] + found[2], {found[1].casefold(), found[2].casefold()}
        return f"{found[1]}-{found[2]}" if parts <= words and whole.casefold() not in words else whole

    return _HYPHENATED.sub(join, re.sub("\u00ad[ \t]*\n?", "", text))


def _read_html(path: Path) -> str:
    from bs4 import BeautifulSoup, Tag
    from bs4.element import PreformattedString

    data = path.read_bytes()
    # UTF-8 is tried before what the page says and before a guess, unless it looks like UTF-16 or ISO-2022.
    encoding = None if b"\0" in data or b"\x1b" in data else "utf-8"
    page: Any = BeautifulSoup(data, "html.parser", from_encoding=encoding)
    if page.original_encoding in ("iso-8859-1", "latin-1", "ascii"):  # cp1252, says the standard of HTML
        page = BeautifulSoup(data, "html.parser", from_encoding="cp1252")
    title = " ".join(page.title.get_text().split()) if page.title else ""
    found, opened = [f"{HEADING}# {title}\n\n" * bool(title)], [(page, iter(page.children))]
    heading, begin = None, 0
    while opened:  # changes of the tree would take the square of its size
        tag, children = opened[-1]
        node = next(children, None)
        if node is None:
            found.append(_HTML_ENDS.get(tag.name, ""))
            opened.pop()
            if heading and tag is heading:
                heading, said = None, "".join(found[begin:]).split()
                level = HEADING + "#" * int(tag.name[1])
                found[begin:] = [f"\n\n{level} {' '.join(said)}\n\n" * bool(said)]
        elif not isinstance(node, Tag | PreformattedString):  # the latter: a comment, say
            found.append(re.sub(r"\s+", " ", node))
        elif isinstance(node, Tag) and node.name not in _HTML_UNREAD:
            # What is before it may have no end of its own; of a break the end is enough.
            starts = _HTML_ENDS.get(node.name, "") if node.name != "br" else ""
            if not "".join(found[-2:]).rstrip(" ").endswith(starts):
                found.append(starts)
            opened.append((node, iter(node.children)))
            if heading is None and re.fullmatch("h[1-6]", node.name):
                heading, begin = node, len(found)
    return "".join(found)


def _read_docx(path: Path) -> str:
    from docx import Document
    from docx.oxml import parse_xml
    from lxml.etree import strip_elements, strip_tags

    if sum(part.file_size for part in ZipFile(path).infolist()) > MAX_DOCUMENT_BYTES:
        raise CorpusError(f"{path}: it unpacks to more than {MAX_DOCUMENT_BYTES >> 20} MiB: leave it out")
    document: Any = Document(str(path))
    strip_tags(document.element, *_WORD_WRAPPERS)
    strip_elements(document.element, "{*}Fallback", with_tail=False)  # a box once more, for old readers
    parts = document.part.package.iter_parts()
    notes = [parse_xml(part.blob) for part in parts if part.partname in _WORD_NOTES]
    below = [text for each in notes for text in _list_plain_texts(each)]
    return "\n".join((*_list_word_texts(document), *[f"\n{HEADING}# Notes\n"] * bool(below), *below))


def _list_plain_texts(part: Any) -> list[str]:
    """The paragraphs of what python-docx does not read: notes, a box of text."""
    kinds = "{*}t", "{*}tab", "{*}br", "{*}cr"
    texts = ("".join(x.text or " " for x in p.iter(*kinds)).strip() for p in part.iter("{*}p"))
    return [f"\n{text}\n" for text in texts if text]


def _list_word_texts(part: Any) -> Iterator[str]:
    for item in part.iter_inner_content():
        if hasattr(item, "rows"):
            for row in item.rows:  # which has a merged cell once for each column
                cells = {cell._tc: cell for cell in row.cells}.values()
                yield " | ".join("\n".join(_list_word_texts(cell)).strip() for cell in cells)
        else:
            style = (item.style and item.style.name) or ""
            numbered = re.fullmatch("Heading ([1-6])", style)
            level = min(6, 1 + int(numbered[1])) if numbered else style.startswith("Title")
            mark = HEADING + "#" * level + " " if level else ""
            yield f"\n{mark}{' '.join(item.text.split()) if level else item.text}\n"
            for box in item._p.iter("{*}txbxContent"):
                yield from _list_plain_texts(box)


def _read_tex(path: Path) -> str:
    from pylatexenc import latex2text as tex
    from pylatexenc.latexwalker import get_default_latex_context_db
    from pylatexenc.macrospec import std_macro

    def keep(node: Any) -> str:  # which pylatexenc leaves out; several lines as Markdown has code
        text = getattr(node.nodeargd, "verbatim_text", "") or node.latex_verbatim()
        return f"\n````\n{text.strip()}\n````\n" if "\n" in text else text

    data = path.read_bytes()
    try:
        source = data.decode()
    except UnicodeDecodeError:
        source = data.decode("latin-1")  # of older sources
    title = next((found for found in _TEX_HEADING.finditer(source) if found[1]), None)
    body = (source.partition(r"\begin{document}")[2] or source).replace(r"\maketitle", "")
    body = _TEX_CODE.sub(r"\\\1{verbatim}", body)
    body = _TEX_ADDRESS.sub(lambda m: re.sub(r"(?<!\\)%", r"\\%", m[0]), body)
    if title and title[1] == "title":
        body = f"{title[0]}\n{body}"

    def mark(found: re.Match[str]) -> str:
        """A heading as a line of its own, which is all that is left of it once the macros go."""
        if not found[1]:
            return found[0]
        said = re.sub(r"(?<!\\)%[^\n]*\n", "", found[2]).split()  # without comments
        return f"\n\nHEADING{_TEX_LEVELS.index(found[1]) + 1} {' '.join(said)}\n\n"

    context, known = tex.get_default_latex_context_db(), get_default_latex_context_db()
    known.add_context_category("links", macros=[std_macro("href", False, 2)], prepend=True)
    lost = "texttt textsf textmd textup mbox author date".split()  # words that pylatexenc leaves out
    texts = [tex.MacroTextSpec(name, "%s") for name in lost]
    texts += [tex.MacroTextSpec("href", lambda n, l2tobj: l2tobj.node_arg_to_text(n, 1))]
    kept = [tex.MacroTextSpec("verb", keep), *texts], [tex.EnvironmentTextSpec("verbatim", keep)]
    context.add_context_category("kept", *kept, prepend=True)
    plain = tex.LatexNodes2Text(context, math_mode="verbatim").latex_to_text(
        _TEX_HEADING.sub(mark, body), latex_context=known
    )
    return re.sub(r"(?m)^ *HEADING(\d) ", lambda found: HEADING + "#" * int(found[1]) + " ", plain)


_READERS: dict[str, tuple[str, Callable[[Path], str]]] = {  # by suffix: the package, what reads
    ".pdf": ("pypdf", _read_pdf),
    **dict.fromkeys((".html", ".htm", ".xhtml"), ("bs4", _read_html)),
    ".docx": ("docx", _read_docx),
    ".tex": ("pylatexenc", _read_tex),
}
