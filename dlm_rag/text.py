"""Words and sentences: the few rules about text that several rooms share."""

import re
import string
import unicodedata
from collections.abc import Sequence

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
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s*#{3,}\s*|\s*\n+\s*")
_BRACKET = re.compile(r" ?\([^()]*\)$")
_WORD = re.compile(r"[\w\u0300-\u036f]+")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ANSWER_MARKS = (
    re.compile(r"\\boxed\{([^{}]*)\}"),
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
    re.compile(r"answer is:?\s+([^\n]+)", re.IGNORECASE),
)
ANSWER_FORMS = ("marked", "whole")
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def normalize_whitespace(text: str) -> str:
    """White space folded to single blanks, none at the ends."""
    return " ".join(text.split())


def get_title_line(text: str) -> str:
    """The first line of a passage, which is its title where it has one."""
    return text.strip().partition("\n")[0].strip('"')


def strip_disambiguation(title: str) -> str:
    """The title without what tells it apart: `Hot Rod (film)` is written Hot Rod in a sentence."""
    return _BRACKET.sub("", normalize_whitespace(title))


def replace_control_chars(text: str) -> str:
    """Foreign text for a terminal or a table: a blank for every control character."""
    return _CONTROL.sub(" ", text)


def drop_repeated_words(text: str) -> str:
    """Words (split at white space) in order of their first occurrence, each once (SARDI's query)."""
    return " ".join(dict.fromkeys(text.split()))


def find_word_spans(text: str) -> list[tuple[str, tuple[int, int]]]:
    """Runs of letters, digits and combining marks with their character ranges, in order.

    Words are case-folded and compatibility-normalised (NFKC), ranges are those of the text as it is.
    """
    return [
        (unicodedata.normalize("NFKC", match.group()).casefold(), match.span())
        for match in _WORD.finditer(text)
    ]


def split_words(text: str) -> list[str]:
    """The words of `find_word_spans`."""
    return [word for word, _ in find_word_spans(text)]


def content_words(text: str, start: int, stop: int) -> list[tuple[str, tuple[int, int]]]:
    """The words within text[start:stop] that are no function words, with their ranges."""
    return [
        (word, span)
        for word, span in find_word_spans(text)
        if start <= span[0] and span[1] <= stop and word not in FUNCTION_WORDS
    ]


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
    """Character ranges of the sentences: split after . ! ? before white space, at line ends, at ###.

    Ranges without a letter or digit are left out.
    """
    spans, start = [], 0
    for end in [*_SENTENCE_END.finditer(text), None]:
        stop = end.start() if end else len(text)
        if _WORD.search(text, start, stop):
            spans.append((start, stop))
        start = end.end() if end else stop
    return spans


def extract_sentences(text: str) -> list[str]:
    """The texts of `find_sentence_spans`."""
    return [text[start:stop].strip() for start, stop in find_sentence_spans(text)]


def find_answer_span(response: str, form: str = "marked") -> tuple[int, int]:
    r"""Character range of the answer in a response, empty at its end when there is none.

    `marked` is read in this order: what follows the last `###`; the inside of the last `\boxed{}`, then
    of the last `<answer>`; what follows the last "answer is". Only the first line counts, without blanks
    around it and a final period. In the form `whole` that is the response's first line.
    """
    marker = response.rfind("###")
    if form == "whole":
        start, stop = 0, len(response)
    elif marker >= 0:
        start, stop = marker + 3, len(response)
    else:
        found = next((hits for mark in _ANSWER_MARKS if (hits := [*mark.finditer(response)])), [])
        if not found:
            return len(response), len(response)
        start, stop = found[-1].span(1)
    inner = response[start:stop]
    start += len(inner) - len(inner.lstrip())
    answer = inner.strip().partition("\n")[0].rstrip().removesuffix(".").rstrip()
    return (start, start + len(answer)) if answer else (len(response), len(response))


def normalize_answer(text: str, articles: bool = False) -> str:
    """SQuAD's rule (Rajpurkar et al. 2016): lower case, no punctuation, no articles, blanks folded.

    articles: whether they stay all the same.
    """
    kept = text.lower().translate(_NO_PUNCTUATION)
    return normalize_whitespace(kept if articles else _ARTICLE.sub(" ", kept))
