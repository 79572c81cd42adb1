"""Which passages stand behind which words: citations, and the words the evidence holds."""

from collections.abc import Callable, Collection, Mapping, Sequence

from typing_extensions import TypedDict  # that of Python 3.11 cannot be checked by pydantic

from dlm_rag.text import FUNCTION_WORDS, find_answer_span, find_sentence_spans, find_word_spans, split_words

Span = tuple[int, int]


class CitedPassage(TypedDict):
    """A passage that is cited, the last step that committed one of its words, and these words."""

    id: str
    step: int
    words: list[str]


class Citation(TypedDict):
    """A sentence of the reasoning, or the answer, with what stands behind it; kind says which it is."""

    text: str
    kind: str
    passages: list[CitedPassage]
    unsupported: list[str]


def content_words(text: str, start: int, stop: int) -> list[tuple[str, Span]]:
    """The words within text[start:stop] that are no function words, with their ranges."""
    return [
        (word, span)
        for word, span in find_word_spans(text)
        if start <= span[0] and span[1] <= stop and word not in FUNCTION_WORDS
    ]


def overlapping_spans(spans: Sequence[Span], start: int, stop: int) -> list[int]:
    """Indices of the spans that share a character with [start, stop)."""
    return [n for n, (first, last) in enumerate(spans) if first < stop and last > start]


def find_grounded_tokens(
    text: str, token_spans: Sequence[Span], known_words: Collection[str]
) -> list[bool]:
    """For each token of `text` whether every content word it writes into is one of `known_words`.

    Tokens of function words, punctuation and blanks are always held.
    """
    held = [True] * len(token_spans)
    for word, (start, stop) in content_words(text, 0, len(text)):
        if word not in known_words:
            for token in overlapping_spans(token_spans, start, stop):
                held[token] = False
    return held


def split_citable_spans(response: str) -> list[tuple[Span, str]]:
    """What is cited: each sentence of the reasoning, then the answer where there is one, with its kind."""
    answer = find_answer_span(response)
    units = [(span, "reasoning") for span in find_sentence_spans(response[: answer[0]])]
    return [*units, (answer, "answer")] if answer[0] < answer[1] else units


def cite_passages(
    response: str,
    token_spans: Sequence[Span],
    commit_steps: Sequence[int],
    evidence_at: Callable[[int], Sequence[str]],
    texts: Mapping[str, str],
    question: str,
) -> list[Citation]:
    """For each sentence of the reasoning and for the answer, the passages that hold its words.

    token_spans, commit_steps: per token of the response its character range and commit step.
    evidence_at: ids of the passages in context at a step, in rank order; texts: by id.

    A passage holds a word when it was in context at every step that committed a token of the word,
    and contains it. Of the passages the fewest are taken: first the one that holds most words of
    the sentence, then whichever adds most words that are not in the question, while one does (of
    equals the one whose word comes first). Each is cited with the last step that committed one of
    its words. Words held by none are listed.
    """
    passage_words = {name: frozenset(split_words(text)) for name, text in texts.items()}
    asked = frozenset(split_words(question))
    units: list[Citation] = []
    for (start, stop), kind in split_citable_spans(response):
        holders = _holders(response, (start, stop), token_spans, commit_steps, evidence_at, passage_words)
        unheld = dict.fromkeys(word for word, _, names in holders if not names)
        units.append(
            {
                "text": response[start:stop].strip(),
                "kind": kind,
                "passages": _choose_passages(holders, asked),
                "unsupported": list(unheld),
            }
        )
    return units


def _holders(
    response: str,
    unit: Span,
    token_spans: Sequence[Span],
    commit_steps: Sequence[int],
    evidence_at: Callable[[int], Sequence[str]],
    passage_words: Mapping[str, Collection[str]],
) -> list[tuple[str, int, list[str]]]:
    """Each content word of a unit with its last commit step and the passages that hold it, by rank."""
    found = []
    for word, (start, stop) in content_words(response, *unit):
        steps = sorted({commit_steps[token] for token in overlapping_spans(token_spans, start, stop)})
        always = set.intersection(*(set(evidence_at(step)) for step in steps))
        ranked = [name for name in evidence_at(steps[-1]) if name in always]
        found.append((word, steps[-1], [name for name in ranked if word in passage_words[name]]))
    return found


def _choose_passages(
    holders: list[tuple[str, int, list[str]]], asked: Collection[str]
) -> list[CitedPassage]:
    passages: list[CitedPassage] = []
    open_words = list(holders)
    while open_words:
        gains: dict[str, tuple[int, int]] = {}  # words it holds; of these, words not in the question
        for word, _, names in open_words:
            for name in names:
                every, new = gains.get(name, (0, 0))
                gains[name] = (every + 1, new + (word not in asked))
        # The first may hold words of the question only; what is added must bring others.
        values = {name: gain[::-1] if passages else gain for name, gain in gains.items()}
        best = max(values, key=values.__getitem__, default=None)
        if best is None or not values[best][0]:
            break
        taken = [(word, step) for word, step, names in open_words if best in names]
        passages.append(
            {
                "id": best,
                "step": max(step for _, step in taken),
                "words": list(dict.fromkeys(word for word, _ in taken)),
            }
        )
        open_words = [item for item in open_words if best not in item[2]]
    return passages
