"""The decoding trajectory as data (its files: `trace_file.py`), its citations, when no answer is given."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import takewhile
from typing import Any

from typing_extensions import TypedDict  # that of Python 3.11 cannot be checked by pydantic

from dlm_rag.answer_forms import find_answer, find_answer_span
from dlm_rag.decode.provisional_log import ProvisionalDelta, ProvisionalToken, replay_provisional
from dlm_rag.errors import NamesRemedy
from dlm_rag.text import (
    clip_text,
    content_words,
    count_held_words,
    extract_names,
    extract_sentences,
    find_named_passages,
    find_sentence_spans,
    find_title_spans,
    fold_title,
    fold_words,
    get_title_line,
    overlapping_spans,
    split_words,
    strip_disambiguation,
)

Span = tuple[int, int]
HeldWord = tuple[str, int, list[str]]  # a word, its last commit step, the passages that hold it, by rank
ABSTAIN_REASONS = {
    "nothing_found": "no passage was found",
    "no_passage": "the model read no answer in the passages found",
    "unknown_form": "this is not a form of question that the model knows",
    "no_answer": "what was written has no answer",
    "unsupported_words": "what was written has words that no passage has",
    "not_named": "the passages that were named before the answer do not have it",
    "unsure": "what was read is too unsure",
}
# What a model that was trained to abstain writes for an answer: none is in the passages; none can be.
_REASON_BY_WORD = {"unknown": "no_passage", "unclear": "unknown_form"}
_OWN_WORDS = {*_REASON_BY_WORD, "yes"}  # of answers: these need no passage; nor do function words
# Sureness: confidence x (share of the question's words held)^power x exp(weight (relevance - usual)).
ASKED_WORDS_POWER, RELEVANCE_WEIGHT, USUAL_RELEVANCE = 0.3, 0.2, 2.0
_find_words = lru_cache(1024)(lambda text: frozenset(split_words(text)))  # of passages, which come again


class ClosestPassage(TypedDict):
    """A passage that has words of the question, its title, and its sentence that has most of them."""

    id: str
    title: str
    sentence: str


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


@dataclass(slots=True)
class CommittedToken:
    """A committed token: its position on the canvas from 0, and its probability at temperature 1.

    token: its text; a character of several tokens is in that of the one that is written last. log_prob:
    the logarithm of the probability, finite even if that underflows; None where a server gives none.
    """

    position: int
    token_id: int
    token: str
    confidence: float
    log_prob: float | None = None


@dataclass(frozen=True)
class Action:
    """A sampled decision of a step, and how likely it was (`engine/policy.py`)."""

    candidates: tuple[int, ...] = ()  # canvas positions that might have been committed
    tokens: tuple[int, ...] = ()  # drawn for each, -1 where it stayed; `copy_words` may write others
    forced: bool = False  # whether none would have been, so that one had to
    log_prob: float = 0.0  # of commits and stays, in nats


@dataclass
class RolloutStep:
    """One step: what was committed, then what was searched for and which passages are the evidence now.

    Step 0 searches with the question and commits nothing. The tokens of step s were committed with the
    evidence of step s - 1 in context.

    - query: None if no search was due.
    - passage_ids: the evidence after the step, by rank; `dropped`: passages that did not fit the prompt.
    - retrieved: False if the query equals the last one.
    - remasked: positions that were masked again (uniform noise).
    - edited: tokens that replaced committed ones (only with an edit threshold).
    - seconds: this question's share of each stage.
    """

    step: int
    query: str | None
    passage_ids: tuple[str, ...]
    retrieved: bool
    committed: tuple[CommittedToken, ...] = ()
    remasked: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    edited: tuple[CommittedToken, ...] = ()
    action: Action | None = None  # where a policy sampled
    guesses: ProvisionalDelta | None = None  # of positions that stay masked, where they are recorded

    @property
    def written_tokens(self) -> tuple[CommittedToken, ...]:
        return (*self.committed, *self.edited)

    def write_tokens(self, canvas: dict[int, CommittedToken]) -> dict[int, CommittedToken]:
        """The tokens of a canvas by position after the step."""
        kept = {n: token for n, token in canvas.items() if n not in {*self.remasked}}
        return kept | {token.position: token for token in self.written_tokens}


@dataclass
class Rollout(NamesRemedy):
    """The trajectory of one question, complete once `finished`."""

    _instead = dict.fromkeys(("text", "output", "generated_text", "content"), "response") | {
        "result": "answer", "prediction": "answer", "source_documents": "passages", "context": "passages",
        "documents": "passages", "contexts": "passages", "tokens": "final_tokens()", "latency": "seconds",
        "json": "to_dict()", "model_dump": "to_dict()", "to_json": "to_dict()", "error_message": "error",
        "to_pandas": "pandas.DataFrame(rollout.to_rows())", "trace": "steps", "history": "steps",
        "num_steps": "len(rollout.steps)", "queries": "steps[n].query",
        "logprobs": "steps[n].committed[m].log_prob",
    } | dict.fromkeys(("scores", "score", "probability"), "confidence")  # fmt: skip

    id: str
    question: str
    prompt_layout: str
    canvas_length: int
    steps: list[RolloutStep] = field(default_factory=list)
    response: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # it was decoded with; as in `DecodeConfig`
    passages: dict[str, str] = field(default_factory=dict)  # every passage ever found, by id, as found
    evidence_texts: dict[str, str] = field(default_factory=dict)  # what of them was in the prompt
    citations: list[Citation] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)  # the largest cut of any step
    # By number, the `RowInput` of a step that sampled, for policy gradients; in no trace.
    states: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)
    finished: bool = False
    error: str = ""  # why there is no answer
    answer_form: str = "marked"  # where the answer stands in the response
    # Geometric mean of the probabilities of the answer's tokens and its end (not of those that a text alone
    # confirmed, `decode.copy_words`); None: no answer or no tokens.
    confidence: float | None = None
    # By how many nats passages make a token of the question likelier (arXiv 2204.07496); None: unknown.
    relevance: float | None = None
    # Of a model behind a server, whose tokens are not in the steps: requests, prompt_tokens,
    # completion_tokens, and how many replies were cut at their most tokens.
    usage: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        said = self.error or ("no answer" if self.abstained else self.answer)
        return f"Rollout({self.question[:60]!r}, {said[:60]!r}, {self.forwards} forwards)"

    def __str__(self) -> str:
        """The answer, or what there is in place of one."""
        near = self.closest
        why = describe_abstention(self.abstain_reason, near) if self.abstained else ""
        lines = [f"- {each['title']}: {each['sentence']}" for each in near]
        return self.error or self.answer or "\n".join(filter(None, [why, *lines])) or self.response

    @property
    def answer(self) -> str:
        """The answer; empty if the response has none or the model abstains."""
        return "" if self.error or self.abstain_reason else self.written_answer

    @property
    def written_answer(self) -> str:
        """The answer as written, also if the model abstains; "" if there is none."""
        return self.response[slice(*find_answer_span(self.response, self.answer_form))]

    @property
    def unsupported(self) -> dict[str, str]:
        """Words that neither a passage nor the question has, each with the kind of the last unit with it.

        Of the answer all but function words, of the sentences before it names and numbers alone.
        """
        found = {
            word: unit["kind"]
            for unit in self.citations
            for word in unit["unsupported"]
            if word not in _OWN_WORDS and (unit["kind"] == "answer" or word in extract_names(unit["text"]))
        }
        if not found:
            return found
        known = {*split_words(self.question)}.union(*map(split_words, self.passages.values()))
        return {word: kind for word, kind in found.items() if word not in known}

    @property
    def abstain_reason(self) -> str:
        """Why no answer is given, a key of `ABSTAIN_REASONS`; "" if the answer stands."""
        mode, answer = self.settings.get("abstain") or "never", self.written_answer
        titled = self.answer_form == "titled"
        if mode == "never" or self.error:
            return ""
        if titled and not (answer and self.passages):
            return "no_answer" if self.passages else "nothing_found"
        if not answer:
            return ""  # the response is shown as it is
        if reason := _REASON_BY_WORD.get(answer.casefold()):
            return reason
        kinds = {*self.unsupported.values()}
        if "answer" in kinds or (kinds and mode != "answer"):
            return "unsupported_words"
        if titled and not self._named_have_answer(answer):
            return "not_named"
        sure = 1.0 if self.confidence is None else self.confidence
        if titled:
            more = 0.0 if self.relevance is None else RELEVANCE_WEIGHT * (self.relevance - USUAL_RELEVANCE)
            share = count_held_words(self.question, self._find_named())
            sure *= share**ASKED_WORDS_POWER * math.exp(more)
        return "" if sure >= self.settings.get("answer_threshold", 0.0) else "unsure"

    def _find_named(self) -> list[str]:
        named = self.response[: find_answer(self.response, self.answer_form).mark]
        return [self.passages[name] for name in find_named_passages(named, self.passages, self.question)]

    def _named_have_answer(self, answer: str) -> bool:
        """Whether a passage that is named has the answer as it stands, from its first content word on.

        Where it is the title of one of several, and not in the question, another one has to mention it, or
        its own another: "Night Ferry; Edwin Marlowe ### Edwin Marlowe" may be the wrong director.
        """
        named, said, words = self._find_named(), fold_words(answer), content_words(answer, 0, len(answer))
        core = fold_words(answer[words[0][1][0] : words[-1][1][1]]) if words else ""
        if not named or (core.strip() not in _OWN_WORDS and not any(core in fold_words(t) for t in named)):
            return False
        titles = {text: fold_words(strip_disambiguation(get_title_line(text))) for text in named}
        own = [text for text in named if titles[text] == said]
        others = [text for text in named if titles[text] != said]
        linked = (said in fold_words(b) or titles[b] in fold_words(a) for a in own for b in others)
        return not own or not others or said in fold_words(self.question) or any(linked)

    @property
    def abstained(self) -> bool:
        """Whether the model gives no answer because it has read none."""
        return bool(self.abstain_reason)

    @property
    def closest(self) -> list[ClosestPassage]:
        """The passages that come closest to the question where the model abstains, else none."""
        return find_closest(self.question, self.passages) if self.abstained else []

    @property
    def sources(self) -> dict[str, int]:
        """The cited passages in the order of their first citation, each with how many words it gave.

        One that gave neither a word of the answer nor a name or number is left out, unless none did.
        """
        words, telling = Counter[str](), set[str]()
        for unit in self.citations:
            names = extract_names(unit["text"])
            for passage in unit["passages"]:
                words[passage["id"]] += len(passage["words"])
                if unit["kind"] == "answer" or names.intersection(passage["words"]):
                    telling.add(passage["id"])
        return {name: count for name, count in words.items() if name in telling or not telling}

    @property
    def evidence(self) -> tuple[str, ...]:
        """Ids of the passages in the evidence after the last step, in rank order."""
        return self.steps[-1].passage_ids if self.steps else ()

    @property
    def forwards(self) -> int:
        """Denoising passes: one per step after step 0. Behind a server, one per token."""
        return self.usage.get("completion_tokens", sum(1 for step in self.steps if step.step > 0))

    @property
    def retrievals(self) -> int:
        """Number of searches; an unchanged query makes none."""
        return sum(step.retrieved for step in self.steps)

    @property
    def tokens_committed(self) -> int:
        """Positions that hold a token after the last step."""
        return self.usage.get("completion_tokens", len(self.commit_steps()))

    def tokens_before_end(self, end_ids: Collection[int]) -> int:
        """Number of these before the first end token, without the padding after it."""
        held = self.final_tokens()
        end = min((n for n, token in held.items() if token.token_id in end_ids), default=self.canvas_length)
        return sum(position < end for position in held)

    @property
    def seconds(self) -> dict[str, float]:
        """This question's share of the seconds of each stage, over all steps."""
        total = Counter[str]()
        for step in self.steps:
            total.update(step.seconds)
        return dict(total)

    def replay(self) -> Iterator[dict[int, CommittedToken]]:
        """The committed tokens by position after each step, from step 0 (none) to the last."""
        canvas: dict[int, CommittedToken] = {}
        for step in self.steps:
            canvas = step.write_tokens(canvas)
            yield canvas

    def final_tokens(self) -> dict[int, CommittedToken]:
        """The committed tokens by position after the last step."""
        canvas: dict[int, CommittedToken] = {}
        for step in self.steps:  # in place: a copy a step takes a second for 4,096 tokens
            for position in step.remasked:
                canvas.pop(position, None)
            canvas.update((token.position, token) for token in step.written_tokens)
        return canvas

    def provisional_tokens(self) -> Iterator[dict[int, ProvisionalToken]]:
        """The guesses after each step by position; empty if they were not recorded."""
        return replay_provisional(step.guesses for step in self.steps)

    def commit_steps(self) -> dict[int, int]:
        """The step that wrote each token of the final canvas, by position."""
        written = {token.position: step.step for step in self.steps for token in step.written_tokens}
        return {position: written[position] for position in self.final_tokens()}

    def count_steps_within(self, begin: int, end: int) -> int:
        """Number of last steps in a row that committed a token from `begin` to `end`."""
        within = (any(begin <= t.position < end for t in step.committed) for step in reversed(self.steps))
        return sum(takewhile(bool, within))

    def evidence_at(self, step: int) -> tuple[str, ...]:
        """Ids of the passages that were in context when the tokens of `step` were committed."""
        if step < 1:
            raise ValueError("step 0 commits nothing")
        return next(s.passage_ids for s in reversed(self.steps) if s.step < step)

    def to_dict(self) -> dict[str, Any]:
        """The answer with its sources and counts, a line of the answers file (file-formats.md)."""
        record = {
            "id": self.id,
            "question": self.question,
            "answer": self.answer,
            "response": self.response,
            "evidence": list(self.evidence),
            "unsupported": list(self.unsupported),
            "citations": self.citations,
            "steps": len(self.steps) - 1,
            "forwards": self.forwards,
            "retrievals": self.retrievals,
            "tokens": self.tokens_committed,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }
        optional = ("abstained", "abstain_reason", "closest", "cut", "error", "usage")
        sure = {"confidence": self.confidence, "relevance": self.relevance}
        record |= {name: round(value, 4) for name, value in sure.items() if value is not None}
        return record | {key: value for key in optional if (value := getattr(self, key))}

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each step, for `pandas.DataFrame`: what was written, searched for and read."""
        return [
            {
                "id": self.id,
                "question": self.question,
                "step": step.step,
                "written": "".join(token.token for token in step.committed),
                "tokens": len(step.committed),
                "query": step.query,
                "searched": step.retrieved,
                "passages": list(step.passage_ids),
                "answer": self.answer,
            }
            for step in self.steps
        ]


def find_closest(question: str, passages: Mapping[str, str], most: int = 2) -> list[ClosestPassage]:
    """Returns the passages whose best sentence, with the title, has most content words of the question.

    Of equals those whose whole text has more of them, then the first; none that has no word of it.
    """
    asked = {word for word, _ in content_words(question, 0, len(question))} or {*split_words(question)}
    ranked = []
    for name, text in passages.items():
        head, _, rest = text.strip().partition("\n")
        title, body = (head.strip('"'), rest) if rest.strip() else ("", head)
        titled = asked & {*split_words(title)}
        sentences = extract_sentences(body) or [body]
        held = [asked & {*split_words(sentence)} for sentence in sentences]
        scores = [(len(titled | own), len(own)) for own in held]
        best = max(scores)
        if best[0]:
            sentence = clip_text(sentences[scores.index(best)])
            found = ClosestPassage(id=name, title=fold_title(title or name), sentence=sentence)
            ranked.append((best[0], len(titled.union(*held)), found))
    ranked.sort(key=lambda each: each[:2], reverse=True)  # stable: of equals the first found stays first
    return [found for _, _, found in ranked[:most]]


def describe_abstention(reason: str, closest: Collection[ClosestPassage]) -> str:
    """Returns in a sentence that no answer is given, and why; it leads over to what is closest, if any."""
    if not closest:
        return f"I do not know: {ABSTAIN_REASONS[reason]}."
    why = "" if reason == "no_passage" else f" ({ABSTAIN_REASONS[reason]})"
    return f"I could not read an answer in these{why}; closest:"


def split_citable_spans(response: str, answer_form: str = "marked") -> list[tuple[Span, str]]:
    """What is cited, with its kind: each sentence or title before the answer, then the answer, if any."""
    mark, start, stop = find_answer(response, answer_form)
    split = find_title_spans if answer_form == "titled" else find_sentence_spans
    units = [(span, "reasoning") for span in split(response[:mark])]
    return [*units, ((start, stop), "answer")] if start < stop else units


def cite_passages(
    response: str, token_spans: Sequence[Span], commit_steps: Sequence[int],
    evidence_at: Callable[[int], Sequence[str]], texts: Mapping[str, str], question: str,
    answer_form: str = "marked",
) -> list[Citation]:  # fmt: skip
    """For each sentence of the reasoning and for the answer, the passages that hold its words.

    token_spans, commit_steps: per token of the response its character range and commit step.
    evidence_at: ids of the passages in context at a step, in rank order; texts: by id.

    A passage holds a word when it contains it and was in context at every step that committed a token of
    it. As few passages as possible are taken: first the one that holds most words of the sentence, then
    those that add most words that are not in the question (of equals the one whose word comes first). Each
    is cited with the last step that committed one of its words. Words held by none are listed.

    In the form `titled`, only passages that are named are cited: for a title those that have it, for the
    answer all of them. For a title whose passage was found after it was written, what was in context is.
    """
    words_of = cache(lambda name: _find_words(texts[name]))
    asked = frozenset(split_words(question))

    def find_holders(word: str, span: Span, citable: Collection[str]) -> HeldWord:
        steps = sorted({commit_steps[token] for token in overlapping_spans(token_spans, *span)})
        always = set.intersection(*(set(evidence_at(step)) for step in steps))
        ranked = [name for name in evidence_at(steps[-1]) if name in always and name in citable]
        return word, steps[-1], [name for name in ranked if word in words_of(name)]

    units: list[Citation] = []
    spans = split_citable_spans(response, answer_form)
    for unit, kind in spans:
        citable: Collection[str] = texts
        if answer_form == "titled":
            titles = [span for span, what in spans if what == "reasoning"] if kind == "answer" else [unit]
            named = ";".join(response[slice(*span)] for span in titles)
            citable = find_named_passages(named, texts, question)
        found = content_words(response, *unit)
        words = [find_holders(word, span, citable) for word, span in found]
        if kind == "reasoning" and citable and not any(names for _, _, names in words):
            words = [find_holders(word, span, texts) for word, span in found]
        unheld = dict.fromkeys(word for word, _, names in words if not names)
        cited, text = _choose_passages(words, asked), response[slice(*unit)].strip()
        units.append({"text": text, "kind": kind, "passages": cited, "unsupported": list(unheld)})
    return units


def _choose_passages(words: list[HeldWord], asked: Collection[str]) -> list[CitedPassage]:
    passages: list[CitedPassage] = []
    while words:
        every = Counter(name for _, _, names in words for name in names)
        new = Counter(name for word, _, names in words if word not in asked for name in names)
        # The first may hold words of the question only; what is added must bring others.
        gains = {name: (new[name], every[name]) if passages else (every[name], new[name]) for name in every}
        best = max(gains, key=gains.__getitem__, default=None)
        if best is None or not gains[best][0]:
            break
        taken = [(word, step) for word, step, names in words if best in names]
        step = max(step for _, step in taken)
        passages.append({"id": best, "step": step, "words": list(dict.fromkeys(word for word, _ in taken))})
        words = [word for word in words if best not in word[2]]
    return passages
