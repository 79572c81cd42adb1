"""Words and sentences: the few rules about text that several rooms share."""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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
_BRACKET = re.compile(r" ?\([^()]*\)$")
MARKS = "".join(  # combining marks of every script of the basic plane: no letters to Python's `\\w`
    chr(code)
    for code in (*range(0x300, 0x1D00), *range(0x1DC0, 0x1E00), 0x3099, 0x309A, *range(0xA600, 0xAC00))
    if unicodedata.category(chr(code)).startswith("M")
)  # fmt: skip
WORD = re.compile(rf"[\w{MARKS}]+")
_TYPOGRAPHY = {ord(char): "'" for char in "\u2018\u2019\u201a\u201b\u2032\u02bc\u00b4"}
_TYPOGRAPHY |= {ord(char): '"' for char in "\u201c\u201d\u201e\u201f\u2033\xab\xbb\u275d\u275e\u301d\u301e"}
_TYPOGRAPHY |= {ord(char): "'" for char in "\u2039\u203a\u275b\u275c"} | {0x2010: "-", 0x2011: "-"}
_TYPOGRAPHY |= dict.fromkeys((160, 5760, *range(8192, 8203), 8239, 8287, 12288), " ")
_TYPOGRAPHY |= {0xFF00 + place: chr(0x20 + place) for place in range(1, 95)}  # full-width Latin
_TYPOGRAPHY |= {0x2028: "\n", 0x2029: "\n", 0x85: "\n"}
_TYPOGRAPHY |= dict.fromkeys((0xAD, 0x61C, *range(0x200B, 0x2010), *range(0x2060, 0x2065), 0xFEFF), "")
_TYPOGRAPHY |= dict.fromkeys((0x3164, *range(0xFE00, 0xFE10), *range(0xE0000, 0xE01F0)), "")
_TYPOGRAPHY |= dict.fromkeys((0x34F, 0x115F, 0x1160, *range(0x180B, 0x180F), 0xFFA0, 0xFFFC), "")
# Letters of print and of compatibility: joined (fi, Arabic), of mathematics, Roman numerals, kana.
for first, last in (
    (0x2160, 0x2180), (0x2E80, 0x2FD6), (0x3300, 0x3400), (0xFB00, 0xFB07), (0xFB50, 0xFDFE),
    (0xFE70, 0xFEFD), (0xFF65, 0xFFA0), (0x1D400, 0x1D800),
):  # fmt: skip
    _TYPOGRAPHY |= {code: unicodedata.normalize("NFKC", chr(code)) for code in range(first, last)}
_TYPOGRAPHY |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), "")
_PLACES_KEPT = {code: said or " " for code, said in _TYPOGRAPHY.items() if len(said) < 2}
# Thai, Lao, Tibetan, Burmese, Khmer, kana, Han, Hangul: a sentence, or a word with its endings, is one run.
_JOINED = "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff"
_JOINED += "\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
JOINED_RUN = re.compile(f"([{_JOINED}]+)")
# "Answer" in the languages that evaluations use, and what may stand before it.
_BEFORE_ANSWER = (
    r"(?:(?:the|my|so|thus|therefore|final|short|correct|direct|best|complete|overall),?[ \t]{1,3}){0,4}"
)
_ANSWER_WORD = _BEFORE_ANSWER + (
    r"(?:answers?|(?<=final[ \t])(?:result|output))(?:[ \t]{1,2}(?:\#?\d{1,2}\b|\([a-z]{1,12}\)))?"
    r"|(?:final|short)[_-]?answer"
    r"|(?:finale?[ \t])?antwort|endg[uü]ltige[ \t]antwort|r[eé]ponse(?:[ \t]finale)?|antwoord|svar"
    r"|respuesta(?:[ \t]final)?|risposta(?:[ \t]finale)?|resposta(?:[ \t]final)?|vastaus|cevap"
    r"|odpowied[zź]|odpov[eě][dď]"
    r"|v[aá]lasz|r[aă]spuns|jawa(?:ban|pan)|đáp[ \t]án|trả[ \t]lời|(?:окончательный[ \t])?ответ|відповідь"
    r"|отговор|odgovor|yanıt|απάντηση|(?:最终|最終|正确)?(?:答案|回答)[是为為]?|答え?"
    r"|(?:최종[ \t])?(?:정답|답변|답)|(?:ال)?(?:إجابة|جواب)(?:[ \t]النهائية)?|پاسخ"
    r"|ה?תשובה(?:[ \t]הסופית)?|उत्तर|जवाब|উত্তর|คำตอบ(?:สุดท้าย)?"
)
_TAG = r"</?(?:b|i|u|p|em|strong|span|code|br|h[1-6]|summary)(?:[ \t]?/)?>"  # of HTML
_MARKUP = rf"(?:[*_`>}}\[\]【】(「\"' \t]|\\text[a-z]{{0,2}}\{{|{_TAG})"
_COLON = r"(?:[:：﹕︰]|[ \t](?:-|–|—|=|=>|->|→)(?=[ \t]))"
# A line that begins with the word, as a heading, a label ("Answer: Dover"), or alone above the answer.
_ANSWER_LINE = re.compile(
    rf"[ \t]{{0,8}}(?:[-•+][ \t])?(?P<heading>\#{{1,6}}|={{2,20}}|-{{3,20}})?{_MARKUP}{{0,8}}"
    r"(?:(?:\d{1,2}[.)]|[^\w\s\#\\<{\[(]{1,2})[ \t]*)?"  # its number, a sign
    rf"(?:(?:{_ANSWER_WORD}){_MARKUP}{{0,8}}(?:{_COLON}[ \t]{{0,8}}(?:[*_`}}]{{1,2}}(?=[ \t\r\n]|\Z))?"
    r"|(?:\#{1,6}|={2,20}|-{3,20})?[ \t]{0,8}(?=[\r\n]|\Z)|(?:(?<=r\])(?!\()|(?<=案】))[ \t]{0,8})"
    rf"|(?:a|ans\.?|final){_MARKUP}{{0,4}}[:：](?:\*\*)?)",
    re.IGNORECASE,
)
# The same within a line; "Intermediate answer:", as Self-Ask writes it, is no answer yet.
_ANSWER_LABEL = re.compile(
    rf"(?<![A-Za-z-])(?<!intermediate )(?<!long )(?<!detailed )(?:{_ANSWER_WORD}){_MARKUP}{{0,4}}[:：﹕︰]"
    r"(?:[*_`}]{1,2}(?=[ \t]))?",
    re.IGNORECASE,
)
_ANSWER_PHRASE = re.compile(
    r"\banswer(?:[ \t]to[ \t][^\n.:]{1,200}?|,[ \t]\w{1,12},)?[ \t*_]{1,4}"
    r"(?:is|was|(?:would|should|must|seems[ \t]to|appears[ \t]to)[ \t]be)\b"
    r"(?:[ \t]{0,3}[:：]|[ \t]{1,3}(?:thus|therefore|then|indeed|likely|probably|simply)\b,?)?"
    r"(?=[\s:*_`$\\<\"'“‘])"
    r"|\bantwort[ \t](?:ist|lautet)\b|\br[eé]ponse(?:[ \t]finale)?[ \t]est\b|\bantwoord[ \t]is\b"
    r"|\brespuesta(?:[ \t]\w+)?[ \t]es\b|\brisposta(?:[ \t]\w+)?[ \t]è\b|\bresposta(?:[ \t]\w+)?[ \t]é\b"
    r"|答案(?:就|应该)?[是为為](?!:)|答えは|(?:정답|답변|답)[은는]|(?:đáp[ \t]án|trả[ \t]lời)[ \t]là\b"
    r"|\bответ[ \t][—–-](?=[ \t])|إجابة[ \t]هي|תשובה[ \t]היא|คำตอบคือ",
    re.IGNORECASE,
)
_NO_ANSWER = re.compile(
    r"[ \t*_]*(?:not|supported|based|found|given|stated|mentioned|derived|in[ \t]the|in[ \t]passage"
    r"|from[ \t]the|correct|clear|because|as[ \t]follows|nicht|pas|không|לא|ليس)\b|[ \t]*[不未没無无]",
    re.IGNORECASE,
)
_HASHES = re.compile(r"#{3,}")
_STEP = re.compile(r"[ \t*_]*step[ \t]*\d", re.IGNORECASE)
_SECTION_NAME = re.compile(
    r"[ \t*_]*(?:(?:reasoning|analysis|explanation|rationale|justification|solution|evidence|thoughts?"
    r"|thinking|thought[ \t]process|chain[ \t]of[ \t]thought|background|context|summary|question|sources?"
    r"|references?|notes?|passages?|documents?|citations?|confidence|verification|conclusion|facts?|response"
    r"|overview|results?"
    r"|step[ \t-]by[ \t-]step\b[^\n]{0,40})[ \t*_:：]*(?:\n|\Z)|[^\n]{1,200}:[ \t*_]*(?:\n|\Z))",
    re.IGNORECASE,
)
_QUESTION_LABEL = re.compile(r"[ \t*_>#]{0,8}(?:q|question)[ \t*_]{0,4}[:：]", re.IGNORECASE)
_REASONING_TAG = re.compile(
    r"(?:<(?:seed:)?|\[(?=/?think\])|◁)(/?)(?:seed:)?"
    r"(think(?:ing)?|thoughts?|reason(?:ing)?|analysis|reflection|scratchpad|search|information)[>\]▷]",
    re.IGNORECASE,
)
_MARK_START = re.compile(  # also what may be the beginning of one, at the end
    r"[#\\<*_>]|\b(?:answer|final)|^[ \t]*(?:a(?:ns\.?)?(?::|$)|==|---)"
    rf"|(?<![A-Za-z-])(?:{_ANSWER_WORD})|(?<!\S){_BEFORE_ANSWER}(?:\S+[ \t]{{1,3}})?\S*\Z",
    re.IGNORECASE | re.MULTILINE,
)
_JSON_VALUE = re.compile(
    r"""[:：\s]\s*(?:\[\s*)?(?:\{\s*["']\w{1,20}["']\s*:\s*)?"""
    r"""(?:(?P<quote>["'])((?:(?!(?P=quote))[^\\\n]|\\.)*)(?P=quote)"""
    r"""|(-?\d[\d.]*|true|false)(?=\s*[,}\]]))"""
)
_ANSWER_TAG = re.compile(
    r"< ?(/?) ?(?:(?:(?:final|short)[ _-]?)?answer|result|solution)(?: [^<>\n]{0,80})?>", re.IGNORECASE
)
_ANSWER_ROW = re.compile(  # of a table
    r"^\|[ *_]*(?:final )?answer[ *_:]*\|([^|\n]+)\|[ \t]*$(?!\n[ |]*:?--)", re.IGNORECASE | re.MULTILINE
)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s?\{")
_BRACE = re.compile(r"\\[{}]|[{}]")
_LATEX_TEXT = re.compile(r"\\(?:text[a-z]{0,2}|math[a-z]{2,4}|mbox|emph|underline|operatorname\*?)\{")
_EMPHASIS = (
    ("***", "***"), ("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"), ("`", "`"), ("$$", "$$"),
    ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("「", "」"), ("『", "』"), ("【", "】"), ("==", "=="),
    ('"', '"'), ("``", "''"), ("'", "'"), ("[[", "]]"), ("[", "]"), ("(", ")"), ("{", "}"), ("<", ">"),
)  # fmt: skip
_BLANK_OR_MARKUP = re.compile(  # also the line below a heading, a fence, a tag of HTML
    r"(?:\s|:(?=\s)|[>|][-+]?(?=\s)|[-*+•→](?=[ \t])|(?:-{3,}+|={3,}+|`{3}\w*+)(?=\s)"
    rf"|{_TAG})*"
)
_SENTENCE_STOP = re.compile(r"(?<=[^\W\d_]{4}|\d\d\d\d)[.!](?=[ \t]{1,4}[^\W\d_a-z])|[。！](?=.)")
_CITED = r"(?:doc(?:ument)?|passage|source|fact)s?[ :#]{0,2}"
_ANSWER_TAIL = re.compile(
    r"(?:[.。．।]|<\|[^|<>\n]{1,40}\|>|(?<=.)</?\w{1,20}>|\[/\w{1,20}\]|[ \t]?\#{3,9}|です|입니다"
    rf"|[ \t]?[\[【](?:{_CITED})?\d{{1,3}}(?:, ?\d{{1,3}}){{0,9}}(?:†[^\]】\n]{{1,40}})?[\]】]"
    rf"|[ \t]?\({_CITED}\d{{1,3}}\))$",
    re.IGNORECASE,
)
MAX_ANSWER_MARKS = 16  # from the last one, until one has an answer
SAME_LETTERS = 5  # words are the same that begin with the same ones
MAX_CLIPPED_CHARS = 300
MAX_TITLE_WORDS = 12  # words of a passage's first line, beyond which it is none
MAX_WRAPPINGS = 32  # around an answer: white space, emphasis, LaTeX, tags, citations
ANSWER_FORMS = ("marked", "titled", "whole")  # titled: marked, with the titles of passages before it


def normalize_whitespace(text: str) -> str:
    """White space folded to single blanks, none at the ends."""
    return " ".join(text.split())


def normalize_text(text: str) -> str:
    """Text as it is asked and searched: NFC, plain quotes, blanks and Latin letters, `\\n` at line ends.

    Soft hyphens, joiners and marks of direction, which nobody sees, are left out.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.translate(_TYPOGRAPHY))
    return text.replace("\r\n", "\n").replace("\r", "\n")


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

    Words are compared, and "Hot Rod" names `Hot Rod (film)`. A first line that is all of the text, or has
    more than `MAX_TITLE_WORDS` words, is no title: such a passage is named by words that it begins with.
    Any is named by words right after its title, unless these name another so or one of them alone is in
    the title; one whose title has a semicolon by all parts of it. Words of the question in a row that name
    none so name all that have them.
    """
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
        title, body = fold_words(title), fold_words(body[: 2 * len(titles)])
        return any(body.startswith(part) and (" " in part.strip() or part not in title) for part in others)

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
    held = {word[:SAME_LETTERS] for text in texts for word in split_words(text)}
    asked = [word[:SAME_LETTERS] for word, _ in content_words(question, 0, len(question))]
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


class AnswerPlace(NamedTuple):
    """Where an answer stands in a response, and where the mark before it begins."""

    mark: int
    start: int
    stop: int


def find_answer_span(response: str, form: str = "marked") -> tuple[int, int]:
    """Character range of the answer in a response, empty at its end when there is none (`find_answer`)."""
    return find_answer(response, form)[1:]


def find_answer(response: str, form: str = "marked") -> AnswerPlace:
    r"""The place of the answer in a response; empty, at its end, when there is none.

    `whole`: its first line, behind what stands in `<think>`. `marked` and `titled`: what the last of these
    marks says, outside `<think>` and `<search>`: `### answer`, `\boxed{}`, `<answer>`, "answer" as a
    heading, a label or a key of JSON, "A:", "the answer is". A `###` above a section is no mark, unless it
    is the only one.
    A line that stands alone behind `<think>` needs no mark. Of an answer the first line counts, without
    emphasis, LaTeX and tags around it, citations behind it and the final period.
    """
    shown, thought = _blank_reasoning(response.translate(_PLACES_KEPT))
    if form == "whole":
        start = len(shown) - len(shown.lstrip())
        label = _ANSWER_LINE.match(shown, start)
        marks = [_Mark(start, label.end() if label else start, len(shown))]
    else:
        last = shown.rstrip().rpartition("\n")[2]
        closed = last.startswith("#") and last.strip("# \t")  # a heading, as Markdown may have it
        begun = last.endswith("###") and not closed  # and nothing is said yet
        marks = [] if begun else _find_marks(shown)
        if not marks and thought and "\n" not in shown.strip():
            marks = [_Mark(0, 0, len(shown))]
    for mark in marks[: -MAX_ANSWER_MARKS - 1 : -1]:
        start, stop = _trim_answer(shown, mark)
        if start < stop:
            return AnswerPlace(min(mark.begin, start), start, stop)
    return AnswerPlace(len(response), len(response), len(response))


def find_possible_mark(text: str) -> int:
    """Where the mark of an answer may begin in a text that still grows; its end, where none may."""
    found = _MARK_START.search(text)
    return min(found.start() if found else len(text), find_answer(text).mark)


class _Mark(NamedTuple):
    begin: int
    start: int  # of what it marks
    stop: int
    sentence: bool = False  # which ends where the sentence does
    keyed: bool = False  # by a key of JSON


def _blank_reasoning(response: str) -> tuple[str, bool]:
    """The response with blanks in place of what is thought and searched, and whether something was; what is
    never closed goes on to the end, or to an `<answer>`."""
    spans, opened = list[tuple[int, int]](), -1
    for tag in _REASONING_TAG.finditer(response):
        if not tag[1]:
            opened = tag.start() if opened < 0 else opened
        elif opened >= 0 or tag[2].lower() not in ("search", "information"):
            spans.append((max(opened, 0), tag.end()))
            opened = -1
    if opened >= 0:
        found = response.lower().rfind("<answer>", opened)
        spans.append((opened, found if found >= 0 else len(response)))
    shown, at = [], 0
    for start, stop in spans:
        shown += [response[at:start], " " * (stop - max(start, at))]
        at = stop
    return "".join([*shown, response[at:]]), bool(spans)


def _find_marks(text: str) -> list[_Mark]:
    """The marks of answers, in order; headings of sections only where nothing else marks an answer."""
    marks, headings, begin, last = list[_Mark](), list[_Mark](), 0, len(text.rstrip())
    for line in text.splitlines(keepends=True):
        if marks and _QUESTION_LABEL.match(line):  # a base model goes on with a question of its own
            break
        start, begin, bare = begin, begin + len(line), len(line.rstrip())
        label = _ANSWER_LINE.match(line)
        labels = [label] if label else []
        for found in (*labels, *_ANSWER_LABEL.finditer(line, label.end() if label else 0)):
            around = (found[0][0], line[found.start() - 1 : found.start()], *found[0][-3:])
            named = '"' in around or "'" in around
            quoted = _JSON_VALUE.match(line, found.end() - 1) if named else None
            place = quoted.span(quoted.lastindex or 0) if quoted else (found.end(), len(text) - start)
            said = _Mark(
                start + found.start(), start + place[0], start + place[1], not quoted, bool(quoted)
            )
            marks.append(said)
        for found in _ANSWER_PHRASE.finditer(line):
            if not _NO_ANSWER.match(line, found.end()):
                ends = found[0][-1] == ":" or found.end() >= bare
                stop = len(text) if ends else begin
                marks.append(_Mark(start + found.end(), start + found.end(), stop, True))
        for found in _HASHES.finditer(line, label.end() if label else 0):
            said = _Mark(start + found.start(), start + found.end(), len(text))
            if not _STEP.match(line, found.end()):
                heads = begin < last and not line[: found.start()].strip()
                (headings if heads else marks).append(said)
    marks += (each for each in (*_find_boxes(text), *_find_answer_tags(text)) if each.begin < begin)
    marks += (_Mark(row.start(), *row.span(1)) for row in _ANSWER_ROW.finditer(text))
    marks = [each for each in marks if each.start < last]
    in_json = text.lstrip("`json \t\r\n").startswith("{")
    if in_json and (keyed := [each for each in marks if each.keyed]):
        return keyed  # whatever other texts of the object say
    if not marks and len(headings) == 1 and not _SECTION_NAME.match(text, headings[0].start):
        return headings
    return sorted(marks)


def _find_boxes(text: str) -> list[_Mark]:
    r"""What stands in each `\boxed{}`, to its own brace; in one that is not closed, to the end."""
    found, at = [], 0
    while box := _BOX.search(text, at):
        at = _find_closing_brace(text, box.end())
        found.append(_Mark(box.start(), box.end(), at))
    return found


def _find_closing_brace(text: str, start: int) -> int:
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return brace.start()
    return len(text)


def _find_answer_tags(text: str) -> list[_Mark]:
    """What stands in each `<answer>`, the innermost of several; in the last, closed or not."""
    found, opened = [], None
    for tag in _ANSWER_TAG.finditer(text):
        if tag[1] and opened:
            found.append(_Mark(opened.start(), opened.end(), tag.start()))
        opened = None if tag[1] else tag
    if opened:
        found.append(_Mark(opened.start(), opened.end(), len(text)))
    return found


def _trim_answer(text: str, mark: _Mark) -> tuple[int, int]:
    """The range of the answer itself in what a mark says."""
    start, stop = mark.start, mark.stop
    lead = _BLANK_OR_MARKUP.match(text, start, stop)
    start = lead.end() if lead else start
    stop = min(stop, end) if (end := text.find("\n", start)) >= 0 else stop
    if mark.sentence and (end_of := _SENTENCE_STOP.search(text, start, stop)):
        stop = end_of.start() + 1
    inner = [*_find_boxes(text[start:stop]), *_find_answer_tags(text[start:stop])]
    if inner:
        start, stop = start + inner[-1].start, start + inner[-1].stop
    for _ in range(MAX_WRAPPINGS):
        before, behind = _measure_wrapping(text[start:stop])
        if not before and not behind:
            break
        start, stop = start + before, stop - behind
    return start, max(start, stop)


def _measure_wrapping(said: str) -> tuple[int, int]:
    """How many characters of white space, or of one wrapping, stand before an answer and behind it."""
    if said != (bare := said.strip()):
        before = len(said) - len(said.lstrip())
        return before, len(said) - len(bare) - before
    if tail := _ANSWER_TAIL.search(said):
        return 0, len(said) - tail.start()
    if said and said[-1] in ")]" and {")": "(", "]": "["}[said[-1]] not in said:  # opened before the label
        return 0, 1
    latex = _LATEX_TEXT.match(said)
    if latex and _find_closing_brace(said, latex.end()) == len(said) - 1:
        return latex.end(), 1
    for opening, closing in _EMPHASIS:
        if said.startswith(opening) and said.endswith(closing) and len(said) > len(opening + closing):
            if opening not in said[len(opening) : -len(closing)]:
                return len(opening), len(closing)
        elif opening == closing != "'" and said.count(closing) == 1:
            if said.endswith(closing):
                return 0, len(closing)  # opened before the label
            if said.startswith(opening) and len(opening) > 1:
                return len(opening), 0
    return 0, 0
