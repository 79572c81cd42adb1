"""Sentences of encyclopaedic text, whose periods often end abbreviations and initials.

Stricter than `text.sentences`, which search queries and citations are cut by: there one cut too many does
no harm, here a sentence becomes a training row as it is.
"""

import re

# A mark, closing quotes or brackets, then white space before what can begin a sentence.
_END = re.compile(r"""[.!?]["'”’)\]]*\s+(?=["'“‘(\[]*[A-Z0-9À-ÖØ-Þ])""")
_LAST_WORD = re.compile(r"""[^\s(\["'“‘]*""")  # backwards
_WORD = re.compile(r"\w+")
_ABBREVIATIONS = frozenset(
    """adm al approx apr aug ave bros ca capt cf ch co col corp cpl dec dept dr ed eds est etc feb fig fl
    ft gen gov hon inc jan jr jul jun lt ltd maj mar messrs mr mrs ms mt mts no nos nov oct op p pp pres
    prof pt rep rev sen sep sept sgt sr st ste vol vols vs""".split()
)
# After an abbreviation these begin a sentence, and hardly anything else does.
_STARTERS = frozenset("The It He She They This These In His Her Its Their There After At On As".split())
MAX_BRACKET_CHARS = 200  # characters after which a bracket counts as never closed


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, white space folded.

    A period does not end one after an abbreviation, an initial ("J. K. Rowling") or several ("U.S."),
    unless a word follows that hardly does anything but begin a sentence; none ends within brackets.
    """
    found = []
    for line in text.splitlines():
        line, start = " ".join(line.split()), 0
        for end in _END.finditer(line):
            if not _continues_sentence(line, start, end.end()):
                found.append(line[start : end.end()].rstrip())
                start = end.end()
        found.append(line[start:])
    return [sentence for sentence in found if _WORD.search(sentence)]


def _continues_sentence(line: str, start: int, stop: int) -> bool:
    """Whether a sentence that begins at `start` continues at `stop`, after a mark and a blank.

    Only its last characters are looked at, so that a line without a single end takes linear time.
    """
    stands = line[max(start, stop - MAX_BRACKET_CHARS) : stop].rstrip()
    if stands.rfind("(") > stands.rfind(")"):
        return True
    if stands[-1] != ".":
        return False
    backwards = _LAST_WORD.match(stands[-2::-1])
    word = backwards[0][::-1] if backwards else ""
    initials = bool(re.fullmatch(r"([^\W\d_]\.)*[^\W\d_]", word))
    if not initials and word.lower() not in _ABBREVIATIONS:
        return False
    following = _WORD.match(line, stop)
    return not (following and following[0] in _STARTERS)
