"""Questions with reasoning, answer and support by construction, from a corpus of titled passages alone.

A sentence of passage A names the title of passage B. The name is left out of it and asked for:

    What is the thing left out here: 'En Aasai Rasave is a 1998 Tamil drama film directed by ____.'?
    En Aasai Rasave is a 1998 Tamil drama film directed by Kasthuri Raja. Kasthuri Raja is an Indian film
    director based in Chennai. ### an Indian film director based in Chennai

The first sentence of the response can be found by the question, the second only by the first.
"""

import hashlib
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dlm_rag.retrieval.corpus import Passage
from dlm_rag.retrieval.forked_workers import map_ranges
from dlm_rag.synthesis.passage_links import (
    NameMatcher,
    SentenceIndex,
    TitledPassage,
    is_within_length_limits,
)
from dlm_rag.synthesis.rows_folder import SourceOutcome
from dlm_rag.text import FUNCTION_WORDS, normalize_answer, split_words

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

    def __init__(self, corpus: Iterable[Passage], longest: int = 3, held_out: float = 0.25) -> None:
        """longest: passages of a chain at most. held_out: share of the passages not to be trained on."""
        self.passages = [TitledPassage.from_passage(passage) for passage in corpus]
        self.names = NameMatcher(self.passages)
        self._sentences = SentenceIndex(self.passages)
        self._longest, self._held_out = longest, held_out
        self._gaps = map_ranges(
            lambda numbers: [[*self._find_gaps(row)] for row in numbers], len(self.passages)
        )
        edges = [
            (gap.row, gap.named_row)
            for gaps in self._gaps
            for gap in gaps
            if gap.named_row is not None and self._has_definition(gap.named_row)
        ]
        count, (rows, named) = len(self.passages), np.array(edges, int).reshape(-1, 2).T
        graph = coo_array((np.ones(len(rows), bool), (rows, named)), shape=(count, count))
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
            if self._longest > 1 and gap.named_row is not None and self._has_definition(gap.named_row):
                yield "chain2", [row, gap.named_row], gap
                third = self._only_named(gap.named_row) if self._longest > 2 else None
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
