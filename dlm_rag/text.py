"""Words and sentences: the few rules about text that several rooms share."""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from dlm_rag.answer_forms import HTML_TAG, TYPOGRAPHY, find_answer_span  # noqa: F401 (its old place)

# Words that carry grammar rather than facts: they neither need evidence nor count as evidence.
FUNCTION_WORDS = frozenset(
    """a about after all also am an and any are as at be because been before being between both but
    by can could did do does during each for from had has have he her hers him his how i if in into
    is it its itself me more most my no nor not of off on once only or other our out over own same
    she so some such than that the their them then there these they this those through to too under
    until up was we were what when where which while who whom whose why will with would you your
    s t d ll re ve m therefore thus since hence answer""".split()
)
# What moves the cursor, rings the bell, turns the direction of writing.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# It begins where blanks begin, never within them: a run of blanks is looked at once.
_SENTENCE_END = re.compile(r"(?<!\s)(?:(?<=[.!?])\s+(?:#{3,}\s*)*+|\s*+(?:#{3,}\s*)++|(?>\s*\n)\s*+)")
_BARE_LETTERS = str.maketrans(
    {"æ": "ae", "œ": "oe", "þ": "th", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "ı": "i"}
)
_SIGNS = re.compile("(?<=[a-z])[\u0300-\u036f]+")
_BRACKET = re.compile(r" ?\([^()]*\)$")
MARKS = "".join(  # combining marks of every script of the basic plane: no letters to Python's `\\w`
    chr(code)
    for code in (*range(0x300, 0x1D00), *range(0x1DC0, 0x1E00), 0x3099, 0x309A, *range(0xA600, 0xAC00))
    if unicodedata.category(chr(code)).startswith("M")
)  # fmt: skip
WORD = re.compile(rf"[\w{MARKS}]+")
# Thai, Lao, Tibetan, Burmese, Khmer, kana, Han, Hangul: a sentence, or a word with its endings, is one run.
_JOINED = "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff"
_JOINED += "\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
JOINED_RUN = re.compile(f"([{_JOINED}]+)")
SAME_LETTERS = 5  # words are the same that begin with the same ones
MAX_CLIPPED_CHARS = 300
MAX_TITLE_WORDS = 12  # words of a passage's first line, beyond which it is none


def normalize_whitespace(text: str) -> str:
    """White space folded to single blanks, none at the ends."""
    return " ".join(text.split())


def normalize_text(text: str) -> str:
    """Text as it is asked and searched: NFC, plain quotes, blanks and Latin letters, `\\n` at line ends.

    Soft hyphens, joiners and marks of direction, which nobody sees, are left out.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.translate(TYPOGRAPHY))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def strip_signs(text: str) -> str:
    """The text in small letters, Latin ones without accents and strokes: "Łódź" as lodz."""
    if text.isascii():
        return text.lower()
    plain = unicodedata.normalize("NFD", text.casefold().translate(_BARE_LETTERS))
    return unicodedata.normalize("NFC", _SIGNS.sub("", plain))


def get_title_line(text: str) -> str:
    """The first line of a passage, which is its title where it has one."""
    return text.strip().partition("\n")[0].strip('"')


def fold_title(text: str) -> str:
    """The title of a passage without control characters, so that it cannot look like a line of its own."""
    return normalize_whitespace(replace_control_chars(get_title_line(text)))


def strip_disambiguation(title: str) -> str:
    """The title without what tells it apart: `Hot Rod (film)` is written Hot Rod in a sentence."""
    return _BRACKET.sub("", normalize_whitespace(title))


def find_title_spans(titles: str) -> list[tuple[int, int]]:
    """Character ranges of the titles, kept apart by semicolons, that have a letter or digit."""
    spans, start = [], 0
    for title in titles.split(";"):
        if WORD.search(title):
            spans.append((start, start + len(title)))
        start += len(title) + 1
    return spans


def find_named_passages(titles: str, passages: Mapping[str, str], question: str) -> set[str]:
    """The ids of the passages whose title is one of `titles`, which semicolons keep apart.

    Words are compared, without accents, and "Hot Rod" names `Hot Rod (film)`. A first line that is all of
    the text, or longer than `MAX_TITLE_WORDS`, is no title: such a passage is named by its first words.
    Any is named by words right after its title, unless these name another so or one of them alone is in
    the title; one whose title has a semicolon by all its parts, or by one that names no other. Words of
    the question in a row that name none so name all that have them.
    """
    titles, question = (strip_signs(re.sub(HTML_TAG, "", said)) for said in (titles, question))
    passages = {name: strip_signs(re.sub(HTML_TAG, "", text)) for name, text in passages.items()}
    parts = {fold_words(titles[slice(*span)]) for span in find_title_spans(titles)}

    def find_parts(text: str) -> set[str]:
        """Returns the parts that name it by its title, or by words that it begins with."""
        title = get_title_line(text)
        if len(title.split()) > MAX_TITLE_WORDS or "\n" not in text.strip():
            folded = fold_words(title)
            return {part for part in parts if folded.startswith(part)}
        ways = (title.split(";"), strip_disambiguation(title).split(";"))
        found = [{*map(fold_words, way)} for way in ways] if WORD.search(title) else []
        return set[str]().union(*(way for way in found if way <= parts))

    found = {name: find_parts(text) for name, text in passages.items()}
    others = {part for part in parts.difference(*found.values()) if part.strip() not in FUNCTION_WORDS}

    def goes_on(text: str) -> bool:
        title, _, body = text.strip().partition("\n")
        own, title = {*map(fold_words, title.split(";"))}, fold_words(title)
        body = fold_words(body[: 2 * len(titles)])
        return any(
            part in own or (body.startswith(part) and (" " in part.strip() or part not in title))
            for part in others
        )

    named = {name for name, text in passages.items() if found[name] or goes_on(text)}
    words = fold_words(titles)
    if not named and content_words(titles, 0, len(titles)) and words in fold_words(question):
        named = {name for name, text in passages.items() if words in fold_words(text)}
    return named


def replace_control_chars(text: str) -> str:
    """Foreign text for a terminal or a table: a blank for every control character."""
    return _CONTROL.sub(" ", text)


def find_word_spans(text: str) -> list[tuple[str, tuple[int, int]]]:
    """Runs of letters, digits and combining marks with their character ranges, in order.

    Words are case-folded and compatibility-normalised (NFKC), ranges are those of the text as it is.
    """
    return [
        (unicodedata.normalize("NFKC", match.group()).casefold(), match.span())
        for match in WORD.finditer(text)
    ]


def split_words(text: str) -> list[str]:
    """The words of `find_word_spans`."""
    return [word for word, _ in find_word_spans(text)]


def fold_words(text: str) -> str:
    """The words of a text between single blanks, to look for words in a row."""
    return f" {' '.join(split_words(text))} "


def content_words(text: str, start: int, stop: int) -> list[tuple[str, tuple[int, int]]]:
    """The words within text[start:stop] that are no function words, with their ranges."""
    return [
        (word, span)
        for word, span in find_word_spans(text)
        if start <= span[0] and span[1] <= stop and word not in FUNCTION_WORDS
    ]


def clip_text(text: str) -> str:
    """Foreign text on one line without control characters, of a very long one the beginning."""
    line = normalize_whitespace(replace_control_chars(text))
    return line if len(line) <= MAX_CLIPPED_CHARS else f"{line[: MAX_CLIPPED_CHARS - 1]}…"


def count_held_words(question: str, texts: Iterable[str]) -> float:
    """The share of a question's content words that texts have, by their first `SAME_LETTERS`."""
    held = {word[:SAME_LETTERS] for text in texts for word in split_words(strip_signs(text))}
    bare = strip_signs(question)
    asked = [word[:SAME_LETTERS] for word, _ in content_words(bare, 0, len(bare))]
    return sum(word in held for word in asked) / len(asked) if asked else 1.0


def overlapping_spans(spans: Sequence[tuple[int, int]], start: int, stop: int) -> list[int]:
    """Indices of the spans that share a character with [start, stop)."""
    return [n for n, (first, last) in enumerate(spans) if first < stop and last > start]


def extract_names(text: str) -> set[str]:
    """The words that begin with a capital or a digit, but for a "The" that begins the text."""
    return {
        word
        for word, (start, _) in find_word_spans(text)
        if (text[start].isupper() and (start or word not in FUNCTION_WORDS)) or text[start].isdigit()
    }


def find_sentence_spans(text: str) -> list[tuple[int, int]]:
    """Ranges of sentences: split after . ! ? before white space, at line ends, at ###; each has a word."""
    spans, start = [], 0
    for end in [*_SENTENCE_END.finditer(text), None]:
        stop = end.start() if end else len(text)
        if WORD.search(text, start, stop):
            spans.append((start, stop))
        start = end.end() if end else stop
    return spans


def extract_sentences(text: str) -> list[str]:
    """The texts of `find_sentence_spans`."""
    return [text[start:stop].strip() for start, stop in find_sentence_spans(text)]
