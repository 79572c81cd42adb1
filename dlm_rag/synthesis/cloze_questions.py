"""Questions with reasoning, answer and support by construction, from a corpus of titled passages alone.

A sentence of passage A names the title of passage B. The name is left out of it and asked for:

    What is the thing left out here: 'En Aasai Rasave is a 1998 Tamil drama film directed by ____.'?
    En Aasai Rasave is a 1998 Tamil drama film directed by Kasthuri Raja. Kasthuri Raja is an Indian film
    director based in Chennai. ### an Indian film director based in Chennai

The first sentence of the response can be found by the question, the second only by the first.
"""

import hashlib
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dlm_rag.progress import track_progress
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.synthesis.rows_folder import SourceOutcome
from dlm_rag.text import (
    FUNCTION_WORDS,
    normalize_answer,
    normalize_whitespace,
    split_words,
    strip_disambiguation,
)

GAP_MARK = "____"
MIN_CONTEXT_WORDS = 4  # no function words, left of a sentence around its gap
MAX_COMPONENT_PASSAGES = 100  # passages; a larger one cannot be on one side of the split as a whole
QUESTION_TEMPLATES = {
    "what": "What is {name}?",
    "complete": "Which name is left out here: '{gap}'?",
    "chain2": "What is the thing left out here: '{gap}'?",
    "chain3": "What is the thing that the first sentence about the thing left out here names: '{gap}'?",
}
ROW_FILTERS = ["one_sentence", "answer_not_in_question"]  # of every row, and of what a name stands for:
NAME_FILTER = "one_passage"
_CAPITALS = re.compile(r"(?:[A-ZÀ-ÖØ-Þ][\w’'-]{0,40}[^\W_] ){1,4}[A-ZÀ-ÖØ-Þ][\w’'-]{0,40}[^\W_]")
MAX_SENTENCE_WORDS, MAX_WORD_CHARS = 35, 100  # of a sentence or a name; characters of each word
MAX_BRACKET_DEPTH = 4  # brackets within brackets
MAX_ANSWER_WORDS = 15  # of what something is, at most
MAX_SUBJECT_WORDS = 12  # of the name as a definition has it, brackets left out
_CAPITAL = "[A-ZÀ-ÖØ-Þ]"
_BRACKETS = re.compile(r"\([^()]*\)")
_WORD = re.compile(r"[^\W_]+")
_IS = re.compile(r",? (?:is|was|are|were) (?=(?:an?|the|one of) )")
# What follows says more of it than what it is.
_NO_SUBJECT = FUNCTION_WORDS - {"the", "a", "an"}
_MORE = re.compile(r"[;(]|,? (?:who|whom|whose|which|that|where|when)\b|,? (?:best|most|also|well) known\b")
# A mark, closing quotes or brackets, then white space before what can begin a sentence.
_END = re.compile(r"""[.!?]["'”’)\]]*\s+(?=["'“‘(\[]*[A-Z0-9À-ÖØ-Þ])""")
_LAST_WORD = re.compile(r"""[^\s(\["'“‘]*""")  # backwards
_ABBREVIATIONS = frozenset(
    """adm al approx apr aug ave bros ca capt cf ch co col corp cpl dec dept dr ed eds est etc feb fig fl
    ft gen gov hon inc jan jr jul jun lt ltd maj mar messrs mr mrs ms mt mts no nos nov oct op p pp pres
    prof pt rep rev sen sep sept sgt sr st ste vol vols vs""".split()
)
# After an abbreviation these begin a sentence, and hardly anything else does.
_STARTERS = frozenset("The It He She They This These In His Her Its Their There After At On As".split())
_ANY_WORD = re.compile(r"\w+")
MAX_BRACKET_CHARS = 200  # characters after which a bracket counts as never closed


@dataclass(frozen=True)
class TitledPassage:
    """A passage with its name (the title without a bracket at its end) and its sentences.

    what: what its first sentence says that it is, as in "an Indian film director"; "" where that is no
    definition. says: that sentence under the name that others know it by: "John Thomas Sayles (born
    1950) is ..." says "John Sayles is ...".
    """

    id: str
    name: str
    sentences: tuple[str, ...]
    what: str
    says: str
    has_disambiguation: bool  # by that bracket

    @classmethod
    def from_passage(cls, passage: Passage) -> "TitledPassage":
        """The passage as chains see it; a first line that repeats the title is left out."""
        name = strip_disambiguation(passage.title) if is_within_length_limits(passage.title) else ""
        first, _, rest = passage.contents.partition("\n")
        body = rest if first.strip() in (passage.title, f'"{passage.title}"') else passage.contents
        sentences = tuple(split_sentences(body))
        what, says = extract_definition(name, sentences[0]) if sentences and name else ("", "")
        return cls(passage.id, name, sentences, what, says, name != normalize_whitespace(passage.title))


def is_within_length_limits(text: str) -> bool:
    """Whether a sentence or a name has few words, none too long: all else here may take quadratic time."""
    found = text.split()
    return len(found) <= MAX_SENTENCE_WORDS and all(len(word) <= MAX_WORD_CHARS for word in found)


def extract_definition(name: str, sentence: str) -> tuple[str, str]:
    """What a sentence "NAME is/was a ..." says that the name is, and the sentence from its verb on under
    that name alone; twice "" if it is not such a sentence.

    All words of the name stand before the verb ("Jeffrey Thomas Porcaro (1954 - 1992) was" defines no Jeff
    Porcaro). The answer ends where a clause begins that says more, and has at most `MAX_ANSWER_WORDS`
    words.
    """
    bare = sentence
    for _ in range(MAX_BRACKET_DEPTH):
        bare = _BRACKETS.sub(lambda found: " " * len(found[0]), bare)
    found = _IS.search(bare)
    if found is None:
        return "", ""
    subject = _WORD.findall(bare[: found.start()])
    if not subject or len(subject) > MAX_SUBJECT_WORDS or not {*_WORD.findall(name)} <= {*subject}:
        return "", ""
    if subject[0].lower() in _NO_SUBJECT and not name.startswith(subject[0]):
        return "", ""  # "In Emma there is a ball"
    what = _MORE.split(sentence[found.end() :], maxsplit=1)[0].strip().rstrip(".,!?").rstrip()
    if not 2 <= len(what.split()) <= MAX_ANSWER_WORDS:
        return "", ""
    return what, name + sentence[found.start() :].removeprefix(",")


class NameMatcher:
    """Finds names in texts, in time linear in the text: a trie by words, the longest name first.

    Left out are names that several passages have, and those that the texts show to be words: names without
    a capital, single words that also occur without one, or whose title needs a bracket, single characters.
    """

    def __init__(self, passages: Sequence[TitledPassage]) -> None:
        sentences = (sentence for passage in passages for sentence in passage.sentences)
        words = {word for sentence in sentences for word in _WORD.findall(sentence) if word.islower()}
        often = Counter(passage.name for passage in passages)
        self._root: dict[str, Any] = {}
        self.count = 0
        for row, passage in enumerate(passages):
            name, parts = passage.name, _WORD.findall(passage.name)
            if often[name] > 1 or not _is_name(name, parts, words):
                continue
            if len(parts) == 1 and passage.has_disambiguation:
                continue
            node = self._root
            for part in parts:
                node = node.setdefault(part, {})
            if "" not in node:  # names that differ in punctuation only: the first
                node[""] = (name, row)
                self.count += 1

    def find_names(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Start, stop and row of each name in a text, none within another.

        A name next to another capitalised word is taken for a part of a longer one, and is left out.
        """
        spans = [found.span() for found in _WORD.finditer(text)]
        parts = [text[start:stop] for start, stop in spans]
        at = 0
        while at < len(spans):
            node, ends, found = self._root, at, None
            while ends < len(spans) and (below := node.get(parts[ends])) is not None:
                node, ends = below, ends + 1
                if "" in node and text.startswith(node[""][0], spans[at][0]):
                    found = (*node[""], ends)
            if found is None:
                at += 1
                continue
            name, row, ends = found
            start = spans[at][0]
            stop = start + len(name)
            if not _is_part_of_longer_name(text, start, stop):
                yield start, stop, row
            at = ends


def _is_name(name: str, parts: list[str], lower_words: set[str]) -> bool:
    if not parts or not any(part[0].isupper() for part in parts):
        return False
    if not (name[0].isalnum() and len(name) > 1):
        return False
    if len(parts) == 1:
        return parts[0].lower() not in lower_words
    return any(part[0].isupper() or part[0].isdigit() for part in parts[1:])


def _is_part_of_longer_name(text: str, start: int, stop: int) -> bool:
    """Whether a name continues to the left or right, or is part of a quotation."""
    if re.match(rf"(?: |-|[’']s ){_CAPITAL}|[\w-]", text[stop:]) or re.search(r"[\w-]$", text[:start]):
        return True
    before = re.search(rf"({_CAPITAL}[\w.'’]*) $", text[:start])
    if before and before[1].lower() not in FUNCTION_WORDS:
        return True
    quoted = text[:start].count('"') % 2 == 1
    return quoted and not (
        text[:start].rstrip().endswith('"') and text[stop:].lstrip(" ,.").startswith('"')
    )


class SentenceIndex:
    """All sentences of a corpus, to be asked whether one with a gap could be any other."""

    def __init__(self, passages: Iterable[TitledPassage]) -> None:
        every = [sentence for passage in passages for sentence in passage.sentences]
        self._forward = sorted(every)
        self._backward = sorted(sentence[::-1] for sentence in every)

    def count_matches(self, before: str, after: str) -> int:
        """How many sentences begin with `before`, end with `after` and have something in between.

        2 stands for more. Read are the fewer of those with that beginning and those with that end.
        """
        ways = [(self._forward, before, after), (self._backward, after[::-1], before[::-1])]
        found = [
            (range(bisect_left(ordered, begin), bisect_left(ordered, f"{begin}\U0010ffff")), ordered, end)
            for ordered, begin, end in ways
        ]
        places, ordered, end = min(found, key=lambda way: len(way[0]))
        least = len(before) + len(after)
        fits = (n for n in places if len(ordered[n]) > least and ordered[n].endswith(end))
        return len([*islice(fits, 2)])


def split_sentences(text: str) -> list[str]:
    """The sentences of encyclopaedic text, white space folded.

    Stricter than `text.extract_sentences`: a cut too many does harm here, where each becomes a row.

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
    return [sentence for sentence in found if _ANY_WORD.search(sentence)]


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
    following = _ANY_WORD.match(line, stop)
    return not (following and following[0] in _STARTERS)


@dataclass(frozen=True)
class ClozeGap:
    """A sentence of one passage with a name left out; `named_row`: the row whose name it is, if any."""

    row: int
    before: str
    name: str
    after: str
    named_row: int | None = None

    @property
    def sentence(self) -> str:
        """The sentence as it stands in the passage."""
        return f"{self.before}{self.name}{self.after}"


class CorpusRowGenerator:
    """The rows of a corpus, passage by passage; all that it keeps is some three times the texts."""

    failed = 0  # nothing can

    def __init__(self, corpus: Iterable[Passage], held_out: float = 0.25) -> None:
        """held_out: share of the passages not to be trained on."""
        self.passages = [TitledPassage.from_passage(passage) for passage in corpus]
        self.names = NameMatcher(self.passages)
        self._sentences = SentenceIndex(self.passages)
        self._held_out = held_out
        rows = track_progress(range(len(self.passages)), "reading sentences")
        self._gaps = [[*self._find_gaps(row)] for row in rows]
        edges = [
            (gap.row, gap.named_row)
            for gaps in self._gaps
            for gap in gaps
            if gap.named_row is not None and self._has_definition(gap.named_row)
        ]
        count, (naming, named) = len(self.passages), np.array(edges, int).reshape(-1, 2).T
        graph = coo_array((np.ones(len(naming), bool), (naming, named)), shape=(count, count))
        _, component = connected_components(graph, directed=False)
        self._sizes = np.bincount(component)[component]
        self._first_rows = np.unique(component, return_index=True)[1][component]

    def __len__(self) -> int:
        return len(self.passages)

    def outcomes(self, done: set[str]) -> Generator[SourceOutcome]:
        """What becomes of each passage that is not done."""
        for place, passage in enumerate(self.passages):
            if passage.id not in done:
                yield SourceOutcome(place, passage.id, *self.make_rows(place))

    def make_rows(self, row: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """The rows that begin with a passage, and how many were left out by reason.

        Every one passes `ROW_FILTERS`: only one sentence of the corpus fits the gap, only one passage has
        the name, and the answer does not stand in the question.
        """
        found, dropped = [], dict[str, int]()
        for kind, chain, gap in self._chains(row):
            made = self._make_row(kind, [self.passages[each] for each in chain], gap)
            made["held_out"] = self.is_held_out(row)
            if len({self.is_held_out(each) for each in chain}) > 1:
                reason = "left out: across the split"
            elif contains_answer(made["question"], made["golden_answers"][0]):
                reason = "left out: the answer stands in the question"
            else:
                found.append(made)
                continue
            dropped[reason] = dropped.get(reason, 0) + 1
        for number, made in enumerate(found):
            made["id"] = f"{made['id']}#{number}"
        return found, dropped

    def is_held_out(self, row: int) -> bool:
        """The side of a passage: that of all it is connected with by chains, where these are not too many.

        No passage of a chain to train on is in a chain that is held out.
        """
        key = self.passages[self._first_rows[row] if self._sizes[row] <= MAX_COMPONENT_PASSAGES else row].id
        return int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) < self._held_out * 2**32

    def _chains(self, row: int) -> Iterator[tuple[str, list[int], ClozeGap | None]]:
        """Kind, rows of the passages and gap of everything that can be asked from a passage on."""
        if self.passages[row].what and self._has_unique_name(row):
            yield "what", [row], None
        for gap in self._gaps[row]:
            yield "complete", [row], gap
            if gap.named_row is not None and self._has_definition(gap.named_row):
                yield "chain2", [row, gap.named_row], gap
                third = self._only_named(gap.named_row)
                if third is not None and third != row and self._has_definition(third):
                    yield "chain3", [row, gap.named_row, third], gap

    def _make_row(
        self, kind: str, passages: Sequence[TitledPassage], gap: ClozeGap | None
    ) -> dict[str, Any]:
        blank = f"{gap.before}{GAP_MARK}{gap.after}" if gap else ""
        answer = gap.name if gap and kind == "complete" else passages[-1].what
        said = [gap.sentence] if gap else []
        said += [passage.says for passage in passages[len(said) :]]
        ids = [passage.id for passage in passages]
        return {
            "id": f"{ids[0]}#{kind}",
            "question": QUESTION_TEMPLATES[kind].format(name=passages[0].name, gap=blank),
            "golden_answers": [answer],
            "supporting_ids": ids,
            "hops": len(ids),
            "response": f"{' '.join(said)} ### {answer}",
            "source_ids": ids,
            "template": kind,
            "filters": ROW_FILTERS if kind == "complete" else [*ROW_FILTERS, NAME_FILTER],
        }

    def _find_gaps(self, row: int) -> Iterator[ClozeGap]:
        """Names of passages, the own one among them, and runs of capitalised words; each alone in a gap."""
        for sentence in self.passages[row].sentences:
            if not is_within_length_limits(sentence):
                continue
            spans = list(self.names.find_names(sentence))
            taken = [(start, stop) for start, stop, _ in spans]
            for run in _CAPITALS.finditer(sentence):
                begins = run.start()
                if run[0].partition(" ")[0].lower() in FUNCTION_WORDS:  # "The", "In", as a sentence begins
                    begins += run[0].index(" ") + 1
                if " " in sentence[begins : run.end()] and not any(
                    a < run.end() and b > begins for a, b in taken
                ):
                    spans.append((begins, run.end(), -1))
            for start, stop, named in sorted(spans):
                before, name, after = sentence[:start], sentence[start:stop], sentence[stop:]
                left = [word for word in split_words(f"{before} {after}") if word not in FUNCTION_WORDS]
                if len(left) < MIN_CONTEXT_WORDS or contains_answer(f"{before} {GAP_MARK} {after}", name):
                    continue
                if self._sentences.count_matches(before, after) == 1:
                    yield ClozeGap(row, before, name, after, None if named in (-1, row) else named)

    def _only_named(self, row: int) -> int | None:
        """The one other passage that a passage names where it says what it is, if it is one."""
        passage = self.passages[row]
        verb = passage.sentences[0].index(passage.what)
        found = self.names.find_names(passage.sentences[0])
        named = {other for start, _, other in found if start >= verb} - {row}
        return named.pop() if len(named) == 1 else None

    def _has_definition(self, row: int) -> bool:
        """Whether a passage says what it is, in a first sentence that is not too long."""
        passage = self.passages[row]
        return bool(passage.what) and is_within_length_limits(passage.sentences[0])

    def _has_unique_name(self, row: int) -> bool:
        """Whether the name of a passage stands for it alone."""
        return self._has_definition(row) and any(
            found == row and stop - start == len(self.passages[row].name)
            for start, stop, found in self.names.find_names(self.passages[row].name)
        )


def contains_answer(text: str, answer: str) -> bool:
    """Whether the words of an answer stand in a text, in that order, as SQuAD compares them."""
    return f" {normalize_answer(answer)} " in f" {normalize_answer(text)} "
