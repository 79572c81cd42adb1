"""Where the answer stands in a response, of our models and of public ones; how typography is folded."""

import re
import unicodedata
from typing import NamedTuple

# Signs that people type in several ways, in one: questions and passages are read so, too.
TYPOGRAPHY = {
    ord(char): "'" for char in "\u2018\u2019\u201a\u201b\u2032\u02bc\u00b4\u2039\u203a\u275b\u275c"
}
TYPOGRAPHY |= {ord(char): '"' for char in "\u201c\u201d\u201e\u201f\u2033\xab\xbb\u275d\u275e\u301d\u301e"}
TYPOGRAPHY |= {0x2010: "-", 0x2011: "-", 0x2028: "\n", 0x2029: "\n", 0x85: "\n"}
TYPOGRAPHY |= dict.fromkeys((160, 5760, *range(8192, 8203), 8239, 8287, 12288), " ")
TYPOGRAPHY |= {0xFF00 + place: chr(0x20 + place) for place in range(1, 95)}  # full-width Latin
TYPOGRAPHY |= dict.fromkeys((0xAD, 0x34F, 0x61C, 0x115F, 0x1160, 0x3164, 0xFEFF, 0xFFA0, 0xFFFC), "")
TYPOGRAPHY |= dict.fromkeys((*range(0x180B, 0x180F), *range(0x200B, 0x2010), *range(0x202A, 0x202F)), "")
TYPOGRAPHY |= dict.fromkeys((*range(0x2060, 0x206A), *range(0xFE00, 0xFE10), *range(0xE0000, 0xE01F0)), "")
# Letters of print and of compatibility: joined (fi, Arabic), of mathematics, Roman numerals, kana.
for first, last in (
    (0x2160, 0x2180), (0x2E80, 0x2FD6), (0x3300, 0x3400), (0xFB00, 0xFB07), (0xFB50, 0xFDFE),
    (0xFE70, 0xFEFD), (0xFF65, 0xFFA0), (0x1D400, 0x1D800),
):  # fmt: skip
    TYPOGRAPHY |= {code: unicodedata.normalize("NFKC", chr(code)) for code in range(first, last)}
PLACES_KEPT = {code: said or " " for code, said in TYPOGRAPHY.items() if len(said) < 2}
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
HTML_TAG = r"</?(?:b|i|u|p|em|strong|span|mark|code|br|h[1-6]|summary)(?:[ \t]?/)?>"
_MARKUP = rf"(?:[*_`>}}\[\]【】(「\"' \t]|\\text[a-z]{{0,2}}\{{|{HTML_TAG})"
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
    r"(?<![A-Za-z-])(?<!intermediate )(?<!long )(?<!detailed )"
    r"(?<! is )(?<! is the )(?<! is the correct )(?<! in )(?<! in the )(?<! of )(?<! of the )"
    rf"(?:{_ANSWER_WORD}){_MARKUP}{{0,4}}[:：﹕︰](?:[*_`}}]{{1,2}}(?=[ \t]))?",
    re.IGNORECASE,
)
_ANSWER_PHRASE = re.compile(
    r"(?<!this )(?<!that )\banswer(?:[ \t]to[ \t][^\n.:]{1,200}?|,[ \t]\w{1,12},)?[ \t*_]{1,4}"
    r"(?:is|was|(?:would|should|must|seems[ \t]to|appears[ \t]to)[ \t]be)\b"
    r"(?:[ \t]{0,3}[:：]|[ \t]{1,3}(?:thus|therefore|then|indeed|likely|probably|simply)\b,?)?"
    r"(?=[\s:*_`$\\<\"'“‘])"
    r"|\bantwort[ \t](?:ist|lautet)\b|\br[eé]ponse(?:[ \t]finale)?[ \t]est\b|\bantwoord[ \t]is\b"
    r"|\brespuesta(?:[ \t]\w+)?[ \t]es\b|\brisposta(?:[ \t]\w+)?[ \t]è\b|\bresposta(?:[ \t]\w+)?[ \t]é\b"
    r"|答案(?:就|应该)?[是为為](?!:)|答えは|(?:정답|답변|답)[은는]|(?:đáp[ \t]án|trả[ \t]lời)[ \t]là\b"
    r"|\bответ[ \t][—–-](?=[ \t])|إجابة[ \t]هي|תשובה[ \t]היא|คำตอบคือ",
    re.IGNORECASE,
)
_NO_ANSWER = re.compile(  # in small letters, for names and titles begin so with large ones
    r"[ \t*_]*(?:not|(?:\w{2,12}ly|well|also)[ \t]\w{3,12}ed|based|found|given|taken"
    r"|\w{3,9}(?:ted|ned|fied|rmed|ved)|in[ \t](?:the|passage)|from[ \t]the|(?:in)?correct|right|wrong"
    r"|clear|consistent|because|as[ \t]follows|nicht|pas|không|לא|ليس"
    r"|(?:provided|inferred|shown|present|available|evident|obvious|helpful|unclear|accurate)"
    r"(?=[ \t*_]*(?:[.,;!\n]|\Z)|[ \t](?:in|by|from|and|to|for|here|above|at)\b))\b"
    r"|[ \t]*(?:不[在是知能明清确確包详詳会會存]|未[知提给給找]|没|[無无][法此相])"
)
_HASHES = re.compile(r"#{3,}")
_TITLED = re.compile(r"(?<!#)#{3,}+[ \t]*+(?!\.\s*\Z)(\S[^\n]*)")  # copied: signs are part of it
_STEP = re.compile(r"[ \t*_]*step[ \t]*\d", re.IGNORECASE)
_SECTION_NAME = re.compile(
    r"([ \t*_]++)?+(?:(?:reasoning|analysis|explanation|rationale|justification|solution|evidence"
    r"|thinking|thought[ \t]process|chain[ \t]of[ \t]thought|background|context|summary|question|sources?"
    r"|references?|notes?|passages?|documents?|citations?|confidence|verification|conclusion|facts?|response"
    r"|overview|results?|thoughts?|(?:the[ \t])?(?:problem|task|query)(?:[ \t]statement)?"
    r"|(?:restat|rephras|understand|analy[sz])ing\b[^\n]{0,40}|step[ \t-]by[ \t-]step\b[^\n]{0,40})"
    r"[ \t*_:：]*(?:\n|\Z)|(?(1)[^\n]{0,200}|[^\n]{1,200}):[ \t*_]*(?:\n|\Z))",
    re.IGNORECASE,
)
_QUESTION_LABEL = re.compile(  # or the turn of a person
    r"[ \t*_>#]{0,8}(?:(?:q|question(?:[ \t]\d{1,3})?|human|user)[ \t*_]{0,4}[:：]|#[ \t]{0,4}question\b"
    r"|<\|im_start\|>user)",
    re.IGNORECASE,
)
_REASONING_TAG = re.compile(
    r"(?:<(?:seed:)?|\[(?=/?think\])|◁)(/?)(?:seed:)?"
    r"(think(?:ing)?|thoughts?|reason(?:ing)?|analysis|reflection|scratchpad|search|information)[>\]▷]"
    r"|<\|(?:begin|(end))_of_(thought)\|>",
    re.IGNORECASE,
)
_MARK_START = re.compile(  # also what may be the beginning of one, at the end
    r"[#\\<*_>]|\b(?:answer|final|finish\[)|^[ \t]*(?:a(?:ns\.?)?(?::|$)|==|---)"
    rf"|(?<![A-Za-z-])(?:{_ANSWER_WORD})|(?<!\S){_BEFORE_ANSWER}(?:\S+[ \t]{{1,3}})?\S*\Z",
    re.IGNORECASE | re.MULTILINE,
)
# From the start of its line.
_BEFORE_MARK = re.compile(r"[ \t|]*+(?:(?:[-•+]|\d{1,2}[.)]|[*_]{1,3}|[^\w\s]{1,2})[ \t|*_]*+)?")
_JSON_VALUE = re.compile(
    r"""[:：\s]\s*(?:\[\s*)?(?:\{\s*["']\w{1,20}["']\s*:\s*)?"""
    r"""(?:(?P<quote>["'])((?:(?!(?P=quote))[^\\\n]|\\.)*)(?P=quote)"""
    r"""|(?P<none>[nN](?:ull|one)|\[\s*\]|\{\s*\})(?=\s*[,}\]])"""
    r"""|(-?\d[\d.]*(?:[eE][-+]?\d+)?|true|false)(?=\s*[,}\]]))"""
)
_ANSWER_TAG = re.compile(
    r"(?i)< ?(/?) ?(?:(?:(?:final|short)[ _-]?)?answer|final|result|solution)(?: [^<>\n]{0,80})?>"
)
_ANSWER_ROW = re.compile(  # of a table
    r"^\|[ *_]*(?:final )?answer[ *_:]*\|([^|\n]+)\|[ \t]*$(?!\n[ |]*:?--)", re.IGNORECASE | re.MULTILINE
)
_FINISH = re.compile(r"\bfinish\[([^\n\[\]]{1,300})", re.IGNORECASE)  # as ReAct ends
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s?\{")
_BRACE = re.compile(r"\\[{}]|[{}]")
_LATEX_TEXT = re.compile(r"\\(?:text[a-z]{0,2}|math[a-z]{2,4}|mbox|emph|underline|operatorname\*?)\{")
_EMPHASIS = (
    ("***", "***"), ("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"), ("`", "`"), ("$$", "$$"),
    ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("「", "」"), ("『", "』"), ("【", "】"), ("==", "=="),
    ('"', '"'), ("``", "''"), ("'", "'"), ("[[", "]]"), ("[", "]"), ("(", ")"), ("{", "}"), ("<", ">"),
)  # fmt: skip
_BLANK_OR_MARKUP = re.compile(  # also the line below a heading, a fence, a tag of HTML
    r"(?:\s|:(?=\s|\Z)|[>|][-+]?(?=\s)|[-*+•→](?=[ \t])|(?:-{3,}+|={3,}+|`{3}\w*+)(?=\s)"
    rf"|\d{{1,2}}[.)][ \t](?=\*\*)|{HTML_TAG})*"
)
_SENTENCE_STOP = re.compile(
    r"(?<=[^\W\d_]{4}|\d\d\d\d)(?<!\bProf|\bCapt|\bCorp|\bBros|\bDept|\bUniv)\.(?=[ \t]{1,4}[^\W\d_a-z])"
    r"|!(?=[ \t](?:It|The|He|She|They|This|I)\b)|[。！](?=.)"
)
_BOLD_FIRST = re.compile(r"(?:\*\*|__)(?=\S)([^*_`\n]{1,200})(?:\*\*|__)(?=[,;]|[ \t][(–—])")
_CITED = r"(?:doc(?:ument)?|passage|source|fact)s?[ :#]{0,2}"
_ANSWER_TAIL = re.compile(
    r"(?:[.。．।]|<\|[^|<>\n]{1,40}\|>|(?<=.)</?\w{1,20}>|\[/\w{1,20}\]|[ \t]?\#{3,9}|です|입니다"
    rf"|[ \t]?[\[【](?:{_CITED})?\d{{1,3}}(?:, ?\d{{1,3}}){{0,9}}(?:†[^\]】\n]{{1,40}})?[\]】]"
    rf"|[ \t]?\({_CITED}\d{{1,3}}\))$",
    re.IGNORECASE,
)
MAX_ANSWER_MARKS = 16  # from the last one, until one has an answer
MAX_WRAPPINGS = 32  # around an answer: white space, emphasis, LaTeX, tags, citations
ANSWER_FORMS = ("marked", "titled", "whole")  # titled: marked, with the titles of passages before it


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

    `whole`: its first line, behind what stands in `<think>`. `titled`: the line behind `###`, if there is
    one, without quotes around it and the final period; else as `marked`: what the last of these marks says,
    outside `<think>` and `<search>`: `### answer`, `\boxed{}`, `<answer>`, "answer" as a heading, a label
    or a key of JSON, "A:", "the answer is". A `###` above a section is no mark, unless it is the only one.
    A line that stands alone behind `<think>` needs no mark. Of an answer the first line counts, without
    emphasis, LaTeX and tags around it, citations behind it and the final period.
    """
    shown, thought = _blank_reasoning(response.translate(PLACES_KEPT))
    if form == "whole":
        start = len(shown) - len(shown.lstrip())
        label = _ANSWER_LINE.match(shown, start)
        marks = [_Mark(start, label.end() if label else start, len(shown))]
    elif form == "titled" and (copied := _TITLED.search(shown)):
        said = copied[1].rstrip().removesuffix(".")
        wrap = next((w for w in ('"', "**", "`") if said[: len(w)] == w == said[len(w) :][-len(w) :]), "")
        start = copied.start(1) + len(wrap)
        return AnswerPlace(copied.start(), start, start + len(said) - 2 * len(wrap))
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
    begin = found.start() if found else len(text)
    line = text.rfind("\n", 0, begin) + 1
    begin = line if _BEFORE_MARK.fullmatch(text, line, begin) else begin
    return min(begin, find_answer(text).mark)


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
        if not (tag[1] or tag[3]):
            opened = tag.start() if opened < 0 else opened
        elif opened >= 0 or (tag[2] or tag[4]).lower() not in ("search", "information"):
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
    rows = (row for form in (_ANSWER_ROW, _FINISH) for row in form.finditer(text))
    others = [*_find_boxes(text), *_find_answer_tags(text)]
    others += (_Mark(row.start(), *row.span(1)) for row in rows)
    first = min((each.begin for each in others if text[each.start : each.stop].strip()), default=len(text))
    for line in text.splitlines(keepends=True):
        if _QUESTION_LABEL.match(line):  # a base model goes on with a question of its own
            top = headings[-1].start if headings else begin
            above = text[top : min(begin, top + 1000)]  # perhaps a heading and an empty line
            if marks or first < begin or (above.count("\n") > 1 and "\n" not in above.strip()):
                break
        start, begin, bare = begin, begin + len(line), len(line.rstrip())
        label = _ANSWER_LINE.match(line)
        labels = [label] if label else []
        for found in (*labels, *_ANSWER_LABEL.finditer(line, label.end() if label else 0)):
            around = (found[0][0], line[found.start() - 1 : found.start()], *found[0][-3:])
            named = '"' in around or "'" in around
            quoted = _JSON_VALUE.match(line, found.end() - 1) if named else None
            place = quoted.span(quoted.lastindex or 0) if quoted else (found.end(), len(text) - start)
            place = (place[1], place[1]) if quoted and quoted["none"] else place
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
                if not (heads and _SECTION_NAME.match(text, said.start)):
                    (headings if heads else marks).append(said)
    marks += (each for each in others if each.begin < begin)
    marks = [each for each in marks if each.start < last]
    in_json = text.lstrip("`json \t\r\n").startswith("{")
    if in_json and (keyed := [each for each in marks if each.keyed]):
        return keyed  # whatever other texts of the object say
    if not marks and len(headings) == 1:
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
    if mark.sentence and (bold := _BOLD_FIRST.match(text, start, stop)):
        start, stop = bold.span(1)
    inner = [*_find_boxes(text[start:stop]), *_find_answer_tags(text[start:stop])]
    if inner:
        start, stop = start + inner[-1].start, start + inner[-1].stop
    label = text[text.rfind("\n", 0, mark.start) + 1 : start]
    for _ in range(MAX_WRAPPINGS):
        before, behind = _measure_wrapping(text[start:stop], label)
        if not before and not behind:
            break
        start, stop = start + before, stop - behind
    return start, max(start, stop)


def _measure_wrapping(said: str, label: str) -> tuple[int, int]:
    """How many characters of white space, or of one wrapping, stand before an answer and behind it; label:
    what stands before it in its line, where a wrapping may have been opened."""
    if said != (bare := said.strip()):
        before = len(said) - len(said.lstrip())
        return before, len(said) - len(bare) - before
    if tail := _ANSWER_TAIL.search(said):
        return 0, len(said) - tail.start()
    opened = {")": "(", "]": "[", "}": "{"}.get(said[-1:])
    if opened and opened not in said and opened in label:
        return 0, 1
    latex = _LATEX_TEXT.match(said)
    if latex and _find_closing_brace(said, latex.end()) == len(said) - 1:
        return latex.end(), 1
    for opening, closing in _EMPHASIS:
        if said.startswith(opening) and said.endswith(closing) and len(said) > len(opening + closing):
            if opening not in said[len(opening) : -len(closing)]:
                return len(opening), len(closing)
        elif opening == closing != "'" and said.count(closing) == 1:
            if said.endswith(closing) and opening in label:
                return 0, len(closing)
            if said.startswith(opening) and len(opening) > 1:
                return len(opening), 0
    return 0, 0
