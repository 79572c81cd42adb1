"""Which passages support which words: citations, and the words that the evidence holds."""

from collections.abc import Callable, Collection, Mapping, Sequence

from typing_extensions import TypedDict  # that of Python 3.11 cannot be checked by pydantic

from dlm_rag.text import FUNCTION_WORDS, find_answer_span, find_sentence_spans, find_word_spans, split_words

Span = tuple[int, int]
HeldWord = tuple[str, int, list[str]]  # a word, its last commit step, the passages that hold it, by rank


class CitedPassage(TypedDict):
    """A passage that is cited, the last step that committed one of its words, and these words."""

    id: str
    step: int
    words: list[str]


class Citation(TypedDict):
    """A sentence of the reasoning, or the answer, with what supports it; kind says which it is."""

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
    unknown = [span for word, span in content_words(text, 0, len(text)) if word not in known_words]
    foreign = {token for span in unknown for token in overlapping_spans(token_spans, *span)}
    return [token not in foreign for token in range(len(token_spans))]


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

    def find_holders(word: str, span: Span) -> HeldWord:
        steps = sorted({commit_steps[token] for token in overlapping_spans(token_spans, *span)})
        always = set.intersection(*(set(evidence_at(step)) for step in steps))
        ranked = [name for name in evidence_at(steps[-1]) if name in always]
        return word, steps[-1], [name for name in ranked if word in passage_words[name]]

    units: list[Citation] = []
    for unit, kind in split_citable_spans(response):
        words = [find_holders(word, span) for word, span in content_words(response, *unit)]
        unheld = dict.fromkeys(word for word, _, names in words if not names)
        cited, text = _choose_passages(words, asked), response[slice(*unit)].strip()
        units.append({"text": text, "kind": kind, "passages": cited, "unsupported": list(unheld)})
    return units


def _choose_passages(words: list[HeldWord], asked: Collection[str]) -> list[CitedPassage]:
    passages: list[CitedPassage] = []
    while words:
        gains: dict[str, tuple[int, int]] = {}  # words it holds; of these, words not in the question
        for word, _, names in words:
            for name in names:
                every, new = gains.get(name, (0, 0))
                gains[name] = (every + 1, new + (word not in asked))
        # The first may hold words of the question only; what is added must bring others.
        values = {name: gain[::-1] if passages else gain for name, gain in gains.items()}
        best = max(values, key=values.__getitem__, default=None)
        if best is None or not values[best][0]:
            break
        taken = [(word, step) for word, step, names in words if best in names]
        step = max(step for _, step in taken)
        passages.append({"id": best, "step": step, "words": list(dict.fromkeys(word for word, _ in taken))})
        words = [word for word in words if best not in word[2]]
    return passages
